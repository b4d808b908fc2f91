"""What the actions of a program cost: time and memory by stage, as numbers that schedules are made from and judged by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ds_config.errors import PlanError
from ds_config.option_checks import check_options
from ds_pipe.actions import ActionKind

__all__ = ["Costs"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Time and activation memory by stage. Times are in one unit of the caller's (seconds, or forwards of a stage).

    Attributes:
        forward, input_grad, weight_grad: Time of each stage's three passes; a whole backward takes the sum of the last two.
        activation: Memory that one microbatch holds in each stage, from its forward to the end of its backward.
        transfer: Time from the end of a send to the moment the receiver can go on.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    activation: tuple[float, ...]
    transfer: float = 0.0

    def __post_init__(self) -> None:
        check_options(self)
        rows = (self.forward, self.input_grad, self.weight_grad, self.activation)
        numbers = [value for row in rows for value in row] + [self.transfer]
        if len({len(row) for row in rows}) != 1 or any(not math.isfinite(v) or v < 0 for v in numbers):
            raise PlanError(
                f"costs need one finite number of 0 or more for each stage, got forward {self.forward}, input_grad "
                f"{self.input_grad}, weight_grad {self.weight_grad}, activation {self.activation}, transfer {self.transfer}",
                code="program-costs",
                fix="Give tuples of the same length, one number a stage.",
            )

    @property
    def stages(self) -> int:
        return len(self.forward)

    @classmethod
    def even(cls, stages: int) -> Costs:
        """Return equal costs for all stages: each of the three passes takes 1, a microbatch's activations take 1."""
        one = (1.0,) * stages
        return cls(one, one, one, one)

    @classmethod
    def measured(cls, rows: Sequence[Sequence[float]], transfer: float = 0.0) -> Costs:
        """Build costs from `(forward, input_grad, weight_grad)` of every stage; activations count 1 each."""
        if any(len(row) != 3 for row in rows):
            raise PlanError(
                f"a stage is measured by three times, got {[len(row) for row in rows]}",
                code="program-costs",
                fix="Give (forward, input_grad, weight_grad) of every stage.",
            )
        f, i, w = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(tuple(f), tuple(i), tuple(w), (1.0,) * len(rows), transfer)

    def of(self, op: ActionKind, stage: int) -> float:
        """Time of an action; what does not compute takes none."""
        if op is ActionKind.FORWARD:
            return self.forward[stage]
        if op is ActionKind.INPUT_GRAD:
            return self.input_grad[stage]
        if op is ActionKind.WEIGHT_GRAD:
            return self.weight_grad[stage]
        return self.input_grad[stage] + self.weight_grad[stage] if op is ActionKind.BACKWARD else 0.0
