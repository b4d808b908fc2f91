"""What one call of `step` did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["StepResult"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one `step` did. The same on every rank.

    Attributes:
        step: Optimizer steps done, this one included.
        applied: Whether parameters changed: False between accumulation boundaries and for a skipped step.
        skipped: Whether the update was left out because a gradient was not finite.
        norm: Global norm of the averaged gradient before clipping; None where nothing asked for it.
        scale: The loss scale of the step's gradients; 1.0 without loss scaling.
        lr: The learning rate of each parameter group that the step used.
        samples: Samples of the step, over all ranks.
        tokens: What a sum loss was divided by, over all ranks; 0 for mean losses.
        timings: Seconds by phase (`forward`, `backward`, `step`) where they are timed; with `wall_clock_breakdown`, on rank 0 also the
            parts of backward (`backward_inner`, `backward_allreduce`).
        waited_s: Seconds that this rank's step waited for data: for the engine's loader, or for the iterator that `train_batch` was given.
        mean: The loss that was minimised, a scalar on the device; None when no loss went through `engine.backward`.
    """

    step: int
    applied: bool
    skipped: bool = False
    norm: float | None = None
    scale: float = 1.0
    lr: tuple[float, ...] = ()
    samples: int = 0
    tokens: int = 0
    timings: Mapping[str, float] = field(default_factory=dict)
    waited_s: float = 0.0
    mean: Tensor | None = None

    @property
    def loss(self) -> float:
        """Mean loss over all ranks and microbatches of the step; not a number when none is known. Waits for the device."""
        return float("nan") if self.mean is None else float(self.mean)
