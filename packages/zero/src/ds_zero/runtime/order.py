"""In which order the ranks communicate, so that ranks that took different paths still meet. Pure; no torch.

Words: a *phase* is one forward or one backward. In a phase every rank takes part in the collectives of the same
*sequence* of units, in that order, exactly once each. A rank may run ahead (prefetch) or lag, never reorder, never leave
one out: a unit it does not need itself is issued on the way to one it does need, and what is left is issued at the end of
the phase. When and why a rank asks never changes the order in which it issues, so no rank waits for one that does not come.

The sequence starts as registration order and may be replaced by the order seen in the first step once all ranks saw the
same: it is a hint, correctness never depends on it. A unit needed again after its turn is issued on the spot; ranks that
do the same things do that in the same place. A unit that a rank still has takes its turn all the same: whether to take
part never depends on what this rank holds, because other ranks cannot know that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["GatherOrder", "ReduceOrder"]


class GatherOrder:
    """The gathers of one phase.

    Args:
        sequence: Unit numbers in canonical order; a unit that is used twice may stand in it twice.
        ahead: How many elements may be issued beyond what is needed (0: nothing early).
        numels: Elements of each unit, by unit number.
    """

    def __init__(self, sequence: Sequence[int], ahead: int, numels: Sequence[int]) -> None:
        self.ahead, self.numels = ahead, numels
        self._set(tuple(sequence))
        self.begin()

    def _set(self, sequence: tuple[int, ...]) -> None:
        self.sequence = sequence
        self._last = {unit: i for i, unit in enumerate(sequence)}

    def begin(self) -> None:
        """Start a phase: no unit has had its turn."""
        self._cursor = 0
        self._waiting: dict[int, int] = {}
        self._ahead_numel = 0
        self.seen: list[int] = []

    def need(self, unit: int) -> list[int]:
        """Units to issue now, in order, so that `unit` can be used. Empty if it was issued early and is waiting."""
        self.seen.append(unit)
        issue: list[int] = []
        if self._waiting.get(unit):
            self._take(unit)
        else:
            try:
                turn = self.sequence.index(unit, self._cursor)
            except ValueError:
                return [unit]  # its turn has passed: once more, on the spot
            while self._cursor <= turn:
                issue.append(self._issue())
            self._take(unit)
        while self._cursor < len(self.sequence) and self._fits(self.sequence[self._cursor]):
            issue.append(self._issue())
        return issue

    def awaits(self, unit: int) -> bool:
        """Whether `unit` has a turn left in this phase, or was issued early and not needed yet."""
        return self._last.get(unit, -1) >= self._cursor or bool(self._waiting.get(unit))

    def adopt(self, seen: Sequence[int]) -> None:
        """Follow `seen` from the next phase on; units it leaves out keep their place at the end. Same on every rank."""
        left = [unit for unit in self.sequence if unit not in set(seen)]
        self._set(tuple(seen) + tuple(left))

    def drop(self, units: Collection[int]) -> None:
        """Leave `units` out from the next phase on. Same on every rank."""
        self._set(tuple(unit for unit in self.sequence if unit not in units))

    def run_ahead(self) -> int | None:
        """The next unit in order, to be issued before anyone here needs it; None at the end."""
        return self._issue() if self._cursor < len(self.sequence) else None

    def finish(self) -> list[int]:
        """Units whose turn has not come in this phase: other ranks may be waiting for them."""
        rest = list(self.sequence[self._cursor :])
        self._cursor = len(self.sequence)
        return rest

    @property
    def waiting(self) -> list[int]:
        """Units issued and not yet needed."""
        return [unit for unit, times in self._waiting.items() if times]

    def _fits(self, unit: int) -> bool:
        return 0 < self.ahead >= self._ahead_numel + self.numels[unit]

    def _issue(self) -> int:
        unit = self.sequence[self._cursor]
        self._cursor += 1
        self._waiting[unit] = self._waiting.get(unit, 0) + 1
        self._ahead_numel += self.numels[unit]
        return unit

    def _take(self, unit: int) -> None:
        self._waiting[unit] -= 1
        self._ahead_numel -= self.numels[unit]


class ReduceOrder:
    """The reductions of one backward: each unit of `sequence` exactly once, in order, as soon as it and all before it are ready."""

    def __init__(self, sequence: Sequence[int]) -> None:
        self.sequence = tuple(sequence)
        self.begin()

    def begin(self) -> None:
        """Start a backward: nothing is ready."""
        self._cursor = 0
        self._ready: set[int] = set()
        self.seen: list[int] = []

    def ready(self, unit: int) -> list[int]:
        """`unit` has all its gradients: the units to reduce now."""
        self.seen.append(unit)
        self._ready.add(unit)
        issue = []
        while self._cursor < len(self.sequence) and self.sequence[self._cursor] in self._ready:
            issue.append(self.sequence[self._cursor])
            self._cursor += 1
        return issue

    def finish(self) -> list[int]:
        """Units that were not reduced in this backward."""
        rest = list(self.sequence[self._cursor :])
        self._cursor = len(self.sequence)
        return rest

    def adopt(self, seen: Sequence[int]) -> None:
        """Follow `seen` from the next backward on; units it leaves out come after. Same on every rank."""
        first = tuple(dict.fromkeys(seen))
        self.sequence = first + tuple(unit for unit in self.sequence if unit not in set(first))

    def had_turn(self, unit: int) -> bool:
        """Whether `unit` was already given out for reduction in this backward."""
        return unit in self.sequence[: self._cursor]
