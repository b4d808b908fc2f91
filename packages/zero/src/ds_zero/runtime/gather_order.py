"""In which order the ranks gather and reduce, alike on all of them whatever path each took, and how long a gathered unit stays. Pure; no torch.

A *phase* is one forward or one backward. In a phase every rank takes part in the collectives of the same *sequence* of units, in that
order, exactly once each. A rank may run ahead (prefetch) or lag, never reorder, never leave one out: a unit it does not need itself is
issued on the way to one it does need, and what is left is issued at the end of the phase. So no rank waits for one that does not come.

The sequence starts as registration order and may be replaced by the order seen in the first step once all ranks saw the
same, or a part of the same: it is a hint, correctness never depends on it. A unit needed again after it was issued is issued on the spot,
after what is left of the sequence, and stays until the end of the phase. How often a unit is needed may differ between ranks: those that
need it no more take part in the gather when their forward is over (`gather_agreement.py`). A unit that a rank still has is issued all the
same, because other ranks cannot know what this rank holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

__all__ = ["Arrivals", "GatherOrder", "GatherOrders", "ReduceOrder", "Retention", "merge_orders"]


def merge_orders(recorded: Sequence[Sequence[int]]) -> list[int] | None:
    """Return the order that contains those of all ranks; None where no rank's does.

    A rank that used a unit less often, or not at all, leaves out some elements of the longest order and has no others.
    """
    longest = max(recorded, key=len)
    for order in recorded:
        rest = iter(longest)
        if not all(unit in rest for unit in order):
            return None
    return list(longest)


class GatherOrder:
    """The gathers of one phase.

    Args:
        sequence: Unit numbers in canonical order; a unit that is used twice may stand in it twice.
        ahead: How many elements may be issued beyond what is needed (0: nothing early).
        numels: Elements of each unit, by unit number.
    Attributes:
        skip: Units that are not issued in the phases that begin from now on: every rank has them. The same on every rank.
    """

    def __init__(self, sequence: Sequence[int], ahead: int, numels: Sequence[int]) -> None:
        self.ahead, self.numels = ahead, numels
        self.skip: frozenset[int] = frozenset()
        self._set(tuple(sequence))
        self.begin()

    def _set(self, sequence: tuple[int, ...]) -> None:
        self._all = sequence
        self.sequence = tuple(unit for unit in sequence if unit not in self.skip) if self.skip else sequence
        self._last = {unit: i for i, unit in enumerate(self.sequence)}

    def begin(self) -> None:
        """Start a phase: no unit is issued."""
        self._set(self._all)
        self._cursor = 0
        self._waiting: dict[int, int] = {}
        self._ahead_numel = 0
        self.recorded: list[int] = []

    def need(self, unit: int) -> list[int]:
        """Return the units to all-gather now, in order, so that `unit` can be used. Empty if prefetched and waiting."""
        self.recorded.append(unit)
        if not self.awaits(unit):
            return [unit]  # it was issued: once more, on the spot
        issue = self.expect(unit)
        self._take(unit)
        while self._cursor < len(self.sequence) and self._fits(self.sequence[self._cursor]):
            issue.append(self._issue())
        return issue

    def expect(self, unit: int) -> list[int]:
        """Return the units to prefetch now, in order, so that `unit` is under way before use. Empty if issued already."""
        if self._waiting.get(unit) or self._last.get(unit, -1) < self._cursor:
            return []
        place = self.sequence.index(unit, self._cursor)
        return [self._issue() for _ in range(self._cursor, place + 1)]

    def awaits(self, unit: int) -> bool:
        """Whether `unit` is still to be issued in this phase, or was issued early and not needed yet."""
        return self._last.get(unit, -1) >= self._cursor or self.is_waiting(unit)

    def adopt(self, sequence: Sequence[int]) -> None:
        """Follow `recorded` from the next phase on; units it leaves out keep their place at the end. Same on every rank."""
        left = [unit for unit in self._all if unit not in set(sequence)]
        self._set(tuple(sequence) + tuple(left))

    def drop(self, units: Collection[int]) -> None:
        """Leave `units` out from the next phase on. Same on every rank."""
        self._set(tuple(unit for unit in self._all if unit not in units))

    def run_ahead(self) -> int | None:
        """Return the next unit in order to prefetch, before any use on this rank; None at the end."""
        return self._issue() if self._cursor < len(self.sequence) else None

    def rest(self) -> list[int]:
        """Return the units that were not issued in this phase, to prefetch now: they wait for their use, or for the end of the phase.

        Before a gather that is in no order. A rank that is inside a branch may wait for one of them, and comes to the other after it.
        """
        return [self._issue() for _ in range(self._cursor, len(self.sequence))]

    def finish(self) -> list[int]:
        """Return the units that were not issued in this phase, for which other ranks may wait; clear the waiting units."""
        left = list(self.sequence[self._cursor :])
        self._cursor = len(self.sequence)
        self._waiting.clear()
        return left

    def is_waiting(self, unit: int) -> bool:
        """Whether `unit` was issued early, for a use that is still to come."""
        return bool(self._waiting.get(unit))

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


class GatherOrders:
    """The orders of one model's phases: of forwards by the module that they begin with, and of the backward.

    Args:
        backward: Unit numbers, in the order in which a backward is expected to need them.
        ahead: Elements gathered before they are needed.
        numels: Elements of each unit, by unit number.
    """

    def __init__(self, backward: Sequence[int], ahead: int, numels: Sequence[int]) -> None:
        self._ahead, self._numels = ahead, numels
        self.forwards: dict[str, GatherOrder] = {}
        self.backward = self._of(backward)

    def _of(self, sequence: Sequence[int]) -> GatherOrder:
        return GatherOrder(sequence, self._ahead, self._numels)

    def __iter__(self) -> Iterator[GatherOrder]:
        yield from self.forwards.values()
        yield self.backward

    def add(self, module: str, sequence: Sequence[int]) -> None:
        """Add the order of forwards that begin with `module`, which a model that was attached before has."""
        self.forwards.setdefault(module, self._of(sequence))

    def forward(self, modules: Sequence[str]) -> GatherOrder:
        """Return the order of a forward that begins with one of `modules`, on each rank with another."""
        if len(modules) == 1:
            return self.forwards[modules[0]]
        numbers = [number for module in modules for number in self.forwards[module].sequence]
        return self._of(list(dict.fromkeys(numbers)))

    @property
    def ahead(self) -> int:
        """Elements gathered before they are needed."""
        return self._ahead

    @ahead.setter
    def ahead(self, numel: int) -> None:
        self._ahead = numel
        for order in self:
            order.ahead = numel

    def skip(self, units: frozenset[int]) -> None:
        """Leave `units` out in the phases that begin from now on: every rank has them. The same on every rank."""
        for order in self:
            order.skip = units

    def _by_name(self) -> dict[str, GatherOrder]:
        return {"backward": self.backward} | {f"forward {module}": order for module, order in self.forwards.items()}

    @property
    def observed(self) -> dict[str, list[int]]:
        """The units of the last phases, for the ranks to compare."""
        return {name: order.recorded for name, order in self._by_name().items()}

    def adopt(self, observed: Mapping[str, Sequence[int] | None]) -> bool:
        """Follow what was `observed` from now on; None: go on as before. The same on every rank.

        Returns:
            Whether forwards are known, and need each unit once.
        """
        for name, order in self._by_name().items():
            if (recorded := observed[name]) is not None:
                order.adopt(recorded)
        followed = [observed[f"forward {module}"] for module in self.forwards]
        return all(one is not None and len(set(one)) == len(one) for one in followed)


class Retention:
    """How long units that are released between uses stay gathered after one.

    Attributes:
        shared: Units that were used outside their modules.
        until_update: Units in graphs of which no hook sees the end: they stay until the update, which makes those graphs unusable.
        until_phase_ends: Units that are needed once more in this phase, or may be on another rank.
        persistent: Units that all ranks keep from their first use until the update.
        unclaimed: Units that nobody released who used them: calls that were interrupted, accesses that make no graph.
    """

    def __init__(self) -> None:
        self.shared: set[int] = set()
        self.until_update: set[int] = set()
        self.until_phase_ends: set[int] = set()
        self.persistent: frozenset[int] = frozenset()
        self.unclaimed: set[int] = set()
        self._several: set[int] = set()  # needed more than once in a forward since the update
        self._uses: Counter[int] = Counter()  # in the forwards whose graph a backward may go through
        self._paths_differ = self._keeps_graph = False

    def outlasts_phase(self, unit: int) -> bool:
        """Whether a unit stays gathered until the update."""
        return unit in self.until_update or unit in self.persistent

    def holds(self, unit: int) -> bool:
        """Whether a unit stays gathered now, whoever has used it."""
        return unit in self.until_update or unit in self.persistent or unit in self.until_phase_ends

    def share(self, unit: int) -> None:
        """Mark a unit as used outside its module: in every graph from now on."""
        self.shared.add(unit)
        self.until_update.add(unit)

    def forward_ended(self, recorded: Sequence[int], *, has_graph: bool) -> None:
        """Note the uses of a forward.

        Args:
            recorded: The units that were used, in order.
            has_graph: Whether a backward may go through it.
        """
        uses = Counter(recorded)
        self._several.update(unit for unit, times in uses.items() if times > 1)
        if has_graph:
            self._uses.update(uses)

    def paths_differ(self) -> None:
        """Note that ranks took other paths through a forward since the update."""
        self._paths_differ = True

    def begin_backward(self, *, keeps_graph: bool) -> None:
        """Retain what the backward may need more than once, as often as others may: nobody waits for rounds beside reductions."""
        self.until_phase_ends |= self._several
        if self._paths_differ:  # also of several forwards that one loss is made of
            self.until_phase_ends.update(unit for unit, times in self._uses.items() if times > 1)
        self._keeps_graph = keeps_graph

    def end_backward(self) -> None:
        """Forget the forwards whose graph is gone."""
        if not self._keeps_graph:
            self._uses.clear()

    def end_phase(self) -> set[int]:
        """Return the units that stayed until the end of the phase, which they need not outlast."""
        units, self.until_phase_ends = self.until_phase_ends, set()
        return units

    def updated(self) -> set[int]:
        """Return the units that stayed until the update: no earlier graph is usable."""
        units, self.until_update = self.until_update | self.persistent, set()
        self._paths_differ = False
        self._several.clear()
        self._uses.clear()
        return units


class ReduceOrder:
    """The reductions of one backward: each unit of `sequence` exactly once, in order, as soon as it and all before it are ready."""

    def __init__(self, sequence: Sequence[int]) -> None:
        self.sequence = tuple(sequence)
        self.begin()

    def begin(self) -> None:
        """Start a backward: nothing is ready."""
        self._cursor = 0
        self._ready: set[int] = set()
        self.recorded: list[int] = []

    def ready(self, unit: int) -> list[int]:
        """Mark `unit` as having all its gradients, and return the units to reduce now."""
        self.recorded.append(unit)
        self._ready.add(unit)
        issue = []
        while self._cursor < len(self.sequence) and self.sequence[self._cursor] in self._ready:
            issue.append(self.sequence[self._cursor])
            self._cursor += 1
        return issue

    def finish(self) -> list[int]:
        """Return the units that were not reduced in this backward."""
        left = list(self.sequence[self._cursor :])
        self._cursor = len(self.sequence)
        return left

    def adopt(self, sequence: Sequence[int]) -> None:
        """Follow `recorded` from the next backward on; units it leaves out come after. Same on every rank."""
        first = tuple(dict.fromkeys(sequence))
        self.sequence = first + tuple(unit for unit in self.sequence if unit not in set(first))

    def was_issued(self, unit: int) -> bool:
        """Whether `unit` was already given out for reduction in this backward."""
        return unit in self.sequence[: self._cursor]


class Arrivals:
    """Which gradients of each unit have arrived in this backward.

    Attributes:
        missing: Of each unit the numbers of the parameters whose gradient has not arrived; `any` did.
        again: Units of which a gradient arrived twice: a parameter is used in several graphs.
        late: Units of which one did after all had, in an earlier backward: they wait for the end. `known` once that was seen.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self.missing: list[set[int]] = [set(range(size)) for size in sizes]
        self.again: set[int] = set()
        self.late: set[int] = set()
        self.known = self.any = False

    def add(self, unit: int, member: int) -> bool:
        """Record the arrival of a gradient; return whether it was the last of its unit."""
        self.any = True
        missing = self.missing[unit]
        if member not in missing:
            self.again.add(unit)
            return False
        missing.discard(member)
        return not missing

    def complete(self, unit: int) -> bool:
        """Whether all gradients of a unit have arrived."""
        return not self.missing[unit]

    def clear(self) -> None:
        """Reset the arrival counters before the next backward."""
        for missing, size in zip(self.missing, self._sizes, strict=True):
            missing.update(range(size))
        self.again.clear()
