"""Names that more than one package reports under, so that dashboards and the progress bar find them.

The `Train/Samples/...` names are those that DeepSpeed dashboards already read.
"""

from __future__ import annotations

__all__ = [
    "COMM_SHARE",
    "DATA_WAIT",
    "GRAD_NORM",
    "LOSS",
    "LOSS_JUMP",
    "LOSS_SCALE",
    "LR",
    "MEMORY",
    "MEMORY_PEAK",
    "MFU",
    "NONFINITE",
    "SAMPLES_RATE",
    "SKIPPED",
    "STEP_TIME",
    "TOKENS",
    "TOKENS_RATE",
]

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
SKIPPED = "Train/skipped_steps"  # counter: steps whose update was left out
STEP_TIME = "Train/step_ms"  # gauge: wall-clock time from the end of the step before to the end of this one
SAMPLES_RATE = "Train/samples_per_s"  # gauge: over all ranks, over the last steps
TOKENS_RATE = "Train/tokens_per_s"  # gauge: the same in tokens
MFU = "Train/mfu"  # gauge: operations that the model needs, over what this rank's device could do in the time; 0 to 1
COMM_SHARE = "Train/comm_share"  # gauge: time inside collectives (those that overlap added up) over the step's time
MEMORY = "Train/memory/allocated_bytes"  # gauge: of this rank's device, once a second
MEMORY_PEAK = "Train/memory/peak_bytes"  # gauge: the most it was
