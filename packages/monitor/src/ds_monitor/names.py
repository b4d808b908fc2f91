"""Names that more than one package reports under, so that dashboards and the progress bar find them.

The `Train/Samples/...` names are those that DeepSpeed dashboards already read.
"""

from __future__ import annotations

__all__ = ["DATA_WAIT", "GRAD_NORM", "LOSS", "LOSS_JUMP", "LOSS_SCALE", "LR", "NONFINITE", "TOKENS"]

LOSS = "Train/Samples/train_loss"  # gauge: mean training loss of the step, over all ranks
LR = "Train/Samples/lr"  # gauge: learning rate of the first parameter group
LOSS_JUMP = "Train/Samples/loss_deviations"  # gauge: standard deviations that the loss lies above its running mean
LOSS_SCALE = "Train/Samples/loss_scale"  # gauge: fp16 loss scale used in the step
GRAD_NORM = "Train/Samples/grad_norm"  # gauge: global gradient norm before clipping
NONFINITE = (
    "Train/nonfinite_steps"  # counter: steps whose gradient was not finite, those of a falling loss scale not counted
)
TOKENS = "Train/tokens"  # counter: tokens trained on, over all ranks
DATA_WAIT = "Train/Samples/data_wait_ms"  # gauge: time that the step waited for data, on rank 0
