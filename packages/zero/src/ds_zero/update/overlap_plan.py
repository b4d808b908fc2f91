"""Updates that begin before their step: which may, which have, and which of them hold. Pure; no tensor, no thread.

A unit whose state is in host memory can be updated when its summed gradient is there, while backward goes on. Such an update is *early*.
It rests on a guess: that no more gradients come, that nothing is clipped or skipped, that rates stay. The step knows. An update that was
made on the very *terms* that the step finds *holds*; every other one is taken back to the bit and made in the step. So no number depends
on a guess, and ranks need not guess alike.

    PLAIN    its gradient is there, and is expected to be the last   ->  WAITING
    WAITING  the thread takes it up                                  ->  WRITING
    WRITING  it is updated, or that failed                           ->  EARLY, or BROKEN
    WAITING  more gradients come, somebody wants the state, or the step begins: it is called off           ->  PLAIN
    EARLY    it holds, or was taken back                             ->  PLAIN
    BROKEN   it was taken back                                       ->  PLAIN

`Outlook` makes the guess out of the last step, `OverlapLedger` says where each unit is. Reference: Lian et al. 2025, "SuperOffload", speculation
and then validation. Deviation: an update is taken back by copies of what it overwrote, so to the bit, and begins with clipping on, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

__all__ = ["Outlook", "OverlapLedger", "OverlapState", "Terms"]


class OverlapState(Enum):
    """What the masters and the optimizer's state of a unit are."""

    PLAIN = auto()  # those after the last step
    WAITING = auto()  # the same; an update is in line
    WRITING = auto()  # being written by the thread: nobody else looks
    EARLY = auto()  # those after the coming step, if that holds; what they were is kept
    BROKEN = auto()  # neither; what they were is kept


@dataclass(frozen=True, slots=True)
class Terms:
    """What an update's numbers follow from, besides the state before it.

    Attributes:
        factor: Gradients are multiplied by it ...
        first: ... before they are cast to the format of the state, not in the update.
        settings: Of the optimizer's group: rates, decays.
        version: Of the summed gradient; each write makes another one.
    """

    factor: float
    first: bool
    settings: tuple[tuple[str, Any], ...]
    version: int


@dataclass(slots=True)
class Outlook:
    """What the coming step is expected to be: like the last one, if that was neither clipped nor skipped.

    Attributes:
        backwards: How many it has; 0: not known yet.
        divisor: What its gradients are divided by besides the ranks and the loss scale.
        calm: Whether an early update is expected to hold.
    """

    backwards: int = 0
    divisor: float = 1.0
    calm: bool = False

    def last(self, backward: int) -> bool:
        """Whether a gradient summed in this backward of the step, counted from 1, is final, as far as one can know."""
        return self.calm and backward == self.backwards

    def stepped(self, backwards: int, divisor: float, *, altered: bool) -> None:
        """Record a finished step, to predict the next backward.

        Args:
            altered: Whether the gradients were clipped, or the update skipped.
        """
        steady = self.backwards == 0 or divisor == self.divisor
        self.backwards, self.divisor, self.calm = backwards, divisor, steady and not altered


class OverlapLedger:
    """Where each unit is. Every verb checks where it starts.

    Args:
        units: Numbers of those that may be early.
    Attributes:
        retained: Early updates that held, so far.
        undone: Those that were taken back after they were written, at least in part.
    """

    def __init__(self, units: Iterable[int]) -> None:
        self.retained = self.undone = 0
        self._states = dict.fromkeys(units, OverlapState.PLAIN)
        self._terms: dict[int, Terms] = {}
        self._collected: dict[int, int] = {}

    def state(self, unit: int) -> OverlapState:
        """Return the state of a unit's early update."""
        return self._states[unit]

    @property
    def writing(self) -> bool:
        """Whether the thread writes to a unit."""
        return OverlapState.WRITING in self._states.values()

    @property
    def busy(self) -> list[int]:
        """Units that are not as the last step left them."""
        return [unit for unit, state in self._states.items() if state is not OverlapState.PLAIN]

    def collect(self, unit: int, backward: int) -> None:
        """Record that a unit's gradients are collected in this backward of the step. The unit has no early update yet."""
        self._check(unit, OverlapState.PLAIN)
        self._collected[unit] = backward

    def ready(self, unit: int, backward: int, outlook: Outlook) -> bool:
        """Return whether an arrived sum is final for the step and the unit has no early update.

        The sum must be that of what this backward, the last of the step, collected.
        """
        fresh = self._collected.get(unit) == backward
        return fresh and outlook.last(backward) and self._states[unit] is OverlapState.PLAIN

    def line_up(self, unit: int) -> None:
        """Queue the early update of a unit."""
        self._move(unit, OverlapState.PLAIN, OverlapState.WAITING)

    def call_off(self, unit: int) -> bool:
        """Cancel the queued update of a unit; return whether an update was queued."""
        if self._states[unit] is not OverlapState.WAITING:
            return False
        self._states[unit] = OverlapState.PLAIN
        return True

    def begin(self, unit: int) -> bool:
        """Start a queued update on the thread; return False if the update was cancelled."""
        if self._states[unit] is not OverlapState.WAITING:
            return False
        self._states[unit] = OverlapState.WRITING
        return True

    def end(self, unit: int, terms: Terms | None) -> None:
        """Record that the thread updated a unit on these terms; None: the update failed."""
        self._move(unit, OverlapState.WRITING, OverlapState.BROKEN if terms is None else OverlapState.EARLY)
        if terms is not None:
            self._terms[unit] = terms

    def holds(self, unit: int, terms: Terms) -> bool:
        """Whether a unit has the update of a step on these terms already: then it is as that step leaves it from now on."""
        if self._states[unit] is not OverlapState.EARLY or self._terms[unit] != terms:
            return False
        self._states[unit] = OverlapState.PLAIN
        self.retained += 1
        return True

    def undo(self, unit: int) -> None:
        """Mark a unit as restored to its state after the last step."""
        self._check(unit, OverlapState.EARLY, OverlapState.BROKEN)
        self._states[unit] = OverlapState.PLAIN
        self.undone += 1

    def _move(self, unit: int, before: OverlapState, after: OverlapState) -> None:
        self._check(unit, before)
        self._states[unit] = after

    def _check(self, unit: int, *allowed: OverlapState) -> None:
        if self._states[unit] not in allowed:
            raise RuntimeError(f"unit {unit} is {self._states[unit].name}, not {' or '.join(s.name for s in allowed)}")
