"""What a loss is averaged over, so that ranks and microbatches of unequal size weigh right.

Words: a *mean loss* is a scalar that is already an average over its microbatch; every microbatch of every rank counts
the same. A *sum loss* is a scalar sum with the number of things it sums over (tokens, pairs); the step then trains on
(sum of all sums) / (sum of all counts), over all ranks and microbatches, whatever their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_comm import Group, all_reduce
from ds_comm.metadata import on_group
from ds_config.errors import PlanError

__all__ = ["LossAccumulator", "SumLoss", "Totals", "loss_of"]


@dataclass(frozen=True, slots=True)
class SumLoss:
    """A loss that is still a sum.

    Attributes:
        total: Scalar with a graph: the sum over the microbatch.
        count: How many things it sums over; a number or a scalar tensor. May be 0.
    """

    total: Tensor
    count: Tensor | float


def loss_of(output: Any) -> Tensor | SumLoss:
    """Extract the loss from a model's output: the value itself, its `.loss`, or the first element of a tuple.

    Raises:
        PlanError: there is none, or it is no scalar ("loss-missing").
    """
    loss: Any = output if isinstance(output, SumLoss | Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    value = loss.total if isinstance(loss, SumLoss) else loss
    if not isinstance(value, Tensor) or value.numel() != 1 or not isinstance(loss, SumLoss | Tensor):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(output).__name__}"
        raise PlanError(
            f"the model returned {what} where a scalar loss is needed",
            code="loss-missing",
            fix="Return the mean loss, a ds_engine.SumLoss(total, count), or an object with a .loss.",
        )
    return loss


@dataclass(frozen=True, slots=True)
class Totals:
    """What a step was trained on, over all ranks.

    Attributes:
        loss: The mean that was minimised; a scalar tensor on the device, so that reading it is the caller's choice.
        count: What a sum loss was divided by; None for mean losses.
    """

    loss: Tensor
    count: float | None

    @classmethod
    def of(cls, total: float, count: float) -> Totals | None:
        """Build the totals of accumulated mean losses; None where there were none."""
        return cls(torch.tensor(total / count, device="cpu"), None) if count else None


class LossAccumulator:
    """Adds up the losses of one step. Empty after `close`.

    Attributes:
        losses: How many were noted.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count: Tensor | None = None
        self.losses = 0
        self._kind: type | None = None

    def add(self, loss: Tensor | SumLoss) -> None:
        """Note one microbatch's loss; its graph is not kept.

        Raises:
            PlanError: mean losses and sum losses in one step ("loss-mixed").
        """
        kind = SumLoss if isinstance(loss, SumLoss) else Tensor
        if self._kind not in (None, kind):
            raise PlanError(
                "one step has both mean losses and SumLoss losses",
                code="loss-mixed",
                fix="Return the same kind from every microbatch.",
            )
        self._kind = kind
        self.losses += 1
        value, count = (loss.total, loss.count) if isinstance(loss, SumLoss) else (loss, 1.0)
        value = value.detach().reshape(()).float()
        # A number becomes a tensor on the device: a copy from the host would wait for all that the device has to do.
        number = count.detach().to(value) if isinstance(count, Tensor) else torch.full_like(value, count)
        number = number.reshape(())
        self._sum = value if self._sum is None else self._sum + value
        self._count = number if self._count is None else self._count + number

    @property
    def waits(self) -> bool:
        """Whether the totals may come after the update: of mean losses in host memory, and where nothing was noted."""
        return self._kind is not SumLoss and (self._sum is None or self._sum.device.type == "cpu")

    def leave(self) -> tuple[float, float]:
        """Return and reset this rank's sum and number of losses; the caller adds them up over the ranks for `Totals.of`."""
        both = (0.0, 0.0) if self._sum is None or self._count is None else (float(self._sum), float(self._count))
        self._sum = self._count = self._kind = None
        self.losses = 0
        return both

    def close(self, group: Group) -> Totals | None:
        """Add up over the group and forget; None when nothing was noted. Collective: one all-reduce of 8 bytes."""
        if self._sum is None or self._count is None:
            return None
        both = on_group(torch.stack([self._sum, self._count]), group)
        all_reduce(both, group=group, unit="loss")
        summed = self._kind is SumLoss
        self._sum = self._count = self._kind = None
        self.losses = 0
        if not summed:
            return Totals(both[0] / both[1], None)
        count = float(both[1])
        return Totals(both[0] / (count or 1.0), count)  # no token on any rank: a loss of zero, and no gradient
