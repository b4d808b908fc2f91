"""Names that more than one package reports under, so that dashboards and the progress bar find them.

The `Train/Samples/...` names are those that DeepSpeed dashboards already read.
"""

from __future__ import annotations

__all__ = ["DATA_WAIT", "GRAD_NORM", "LOSS", "LOSS_SCALE", "LR", "TOKENS"]

LOSS = "Train/Samples/train_loss"  # gauge: mean training loss of the step, over all ranks
LR = "Train/Samples/lr"  # gauge: learning rate of the first parameter group
LOSS_SCALE = "Train/Samples/loss_scale"  # gauge: fp16 loss scale used in the step
GRAD_NORM = "Train/Samples/grad_norm"  # gauge: global gradient norm before clipping
TOKENS = "Train/tokens"  # counter: tokens trained on, over all ranks
DATA_WAIT = "Train/Samples/data_wait_ms"  # gauge: time that the step waited for data, on rank 0
