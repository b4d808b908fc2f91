"""Where the steps of any training loop begin and end: seen from outside, by backwards and optimizers.

A step ends where an optimizer first steps after a backward has ended, so accumulation, several optimizers that step after one backward,
and optimizers made of others count once. In between, the time before the first backward is the forward, the time until the last one has
ended the backward, the rest the update.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["PhaseTimes", "StepClock"]


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """One step, from update to update, in seconds since the rehearsal began.

    Attributes:
        update_s: Its beginning, where the optimizer of the step before began.
        forward_s: Where that optimizer had ended.
        backward_s: Where the first backward began.
        end_s: Where the last backward had ended and the optimizer began.
    """

    update_s: float
    forward_s: float
    backward_s: float
    end_s: float

    def as_dict(self) -> dict[str, float]:
        """Return the times as plain data."""
        return asdict(self)


class StepClock:
    """Notes where steps end.

    Args:
        mark: Takes the time: a number, or an event of a device's stream that `seconds` reads later.
        ended: Called with the number of steps whenever one has ended.
    """

    def __init__(self, mark: Callable[[], Any], ended: Callable[[int], None]) -> None:
        self._marks: list[tuple[Any, Any, Any, Any]] = []
        self._mark, self._ended = mark, ended
        self._update: Any = None
        self._forward: Any = None
        self._backward: Any = None
        self._pending = False  # a backward has ended, and no optimizer has stepped since
        self._inside = 0
        self._main = threading.get_ident()

    @property
    def count(self) -> int:
        """How many steps have ended."""
        return len(self._marks)

    def steps(self, seconds: Callable[[Any], float]) -> list[PhaseTimes]:
        """Return the steps that ended; the first one begins with the first update. `seconds` reads a mark."""
        return [PhaseTimes(*map(seconds, marks)) for marks in self._marks]

    def install(self) -> Callable[[], None]:
        """Watch torch's backwards and optimizers; returns what ends it."""
        handle = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self.optimizer_steps())
        backward, grad = torch.autograd.backward, torch.autograd.grad
        torch.autograd.backward = self._watched(backward)
        torch.autograd.grad = self._watched(grad)

        def remove() -> None:
            handle.remove()
            torch.autograd.backward, torch.autograd.grad = backward, grad

        return remove

    def optimizer_steps(self) -> None:
        """An optimizer is about to step."""
        if not self._pending:
            return
        self._pending = False
        now = self._mark()
        if self._update is not None:
            forward = self._update if self._forward is None else self._forward
            self._marks.append((self._update, forward, now if self._backward is None else self._backward, now))
        self._update, self._forward, self._backward = now, None, None
        self._ended(len(self._marks))

    def model_runs(self) -> None:
        """A module's forward begins: the update is over."""
        if self._update is not None and self._forward is None and self._backward is None and not self._inside:
            self._forward = self._mark()

    def _watched(self, function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._main:
                return function(*args, **kwargs)
            if not self._inside and self._backward is None:
                self._backward = self._mark()
            self._inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._inside -= 1
                self._pending = self._pending or not self._inside

        return watched
