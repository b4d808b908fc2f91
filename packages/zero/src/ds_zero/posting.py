"""One unit's reduction in memory that the ranks of a host share: who copies what, and what is summed from where.

Words: a rank *shows* the others the elements of its gradients that they own, by copying them into its slot. The elements that it
owns itself are *kept*: they are summed straight out of the tensors that autograd made, and the sum may be put there, too. Ranges
too short to be worth a call of their own are shown, too. A *run* is a range of the shard that is summed by one call.

Note "turned slots". In the slot of rank r the unit is turned so that what comes after r's own chunk is first and that chunk last: what
is not shown is then at the end of every slot, whatever the unit, and memory that nobody writes takes no room.

Cost, for W ranks and n elements: (W-1)/W n read and written to show, n read and n/W written to sum; the squares of the sum come
out of the same pass. A sum that is put where a gradient was kept needs no memory of its own.

Note "nothing else lies there". Autograd hands the same memory to several tensors: where a parameter was viewed and added, its gradient
is a view of the gradient that goes on to earlier layers. Such a gradient is read, and its sum is put elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ds_ops.summing import sum_sources
from ds_zero._torch import foreach_copy, storage_uses
from ds_zero.host import HostMemory, Slot
from ds_zero.layout import UnitLayout

__all__ = ["Posting", "Run", "Shown", "SumPlan", "plan_sums"]

LEAST = 16384
"""Elements; copying fewer takes less time than the call that would spare it."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Elements [start, stop) of flattened parameter number `member` go to `at` of the slot."""

    member: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, stop) of the shard are the sum over ranks of what begins at `at` of their slots.

    Attributes:
        member: The parameter whose gradient stands for this rank's slot, from its element `first`; None: the slot.
    """

    start: int
    stop: int
    at: int
    member: int | None = None
    first: int = 0

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SumPlan:
    """Of one rank. `shown` names the kept parameters only; all others are shown whole. Runs cover the shard, at least one."""

    shown: tuple[Shown, ...]
    runs: tuple[Run, ...]

    @property
    def kept(self) -> frozenset[int]:
        """Numbers of the parameters of which a part is kept."""
        return frozenset(run.member for run in self.runs if run.member is not None)


def plan_sums(layout: UnitLayout, rank: int, least: int | None = None) -> SumPlan:
    """What rank `rank` shows and sums of a unit, where ranges of `least` elements are kept. Pure; O(parameters x segments)."""
    least = LEAST if least is None else least
    places = {slot.name: (member, slot) for member, slot in enumerate(layout.slots)}
    shown: list[Shown] = []
    runs: list[Run] = []
    ends: dict[int, list[int]] = {}
    pieces = [piece for piece in layout.owned(rank) if piece.interval.numel >= least]
    for segment in layout.segments:
        done, last = segment.at, segment.at + segment.chunk
        to_full = segment.start + rank * segment.chunk - segment.at
        for piece in (p for p in pieces if segment.at <= p.start < last):
            member = places[piece.name][0]
            if piece.start > done:
                runs.append(Run(done, piece.start, done + to_full))
            done = piece.stop
            runs.append(Run(piece.start, done, piece.start + to_full, member, piece.interval.start))
            ends.setdefault(member, []).extend((piece.interval.start, piece.interval.stop))
        if done < last:
            runs.append(Run(done, last, done + to_full))
    for member, inside in ends.items():
        slot = layout.slots[member]
        for start, stop in list(pairwise((0, *sorted(inside), math.prod(slot.shape))))[::2]:
            if stop > start:
                shown.append(Shown(member, start, stop, slot.offset + start))
    return SumPlan(tuple(shown), tuple(runs) or (Run(0, 0, 0),))


class Posting:
    """The slots of one unit, one reduction after the other. All ranks make the same calls in the same order."""

    def __init__(self, host: HostMemory, layout: UnitLayout, rank: int, name: str) -> None:
        self.host, self.layout, self.rank, self.name = host, layout, rank, name
        self.plan = plan_sums(layout, rank)
        chunk = layout.segments[0].chunk if len(layout.segments) == 1 else 0  # 0: not turned
        self._first = (rank + 1) * chunk % max(1, layout.numel)
        ahead = [(rank - other - 1) % layout.world for other in range(layout.world)]
        self._shifts = [(turns - rank) * chunk for turns in ahead]
        self._kept_numbers, self._gaps = self.plan.kept, layout.gaps
        self._slot: Slot | None = None
        self._kept: dict[int, Tensor] = {}
        self._own: set[int] = set()
        self._flat: Tensor | None = None

    @property
    def slot(self) -> Slot:
        """The one that is open or posted."""
        if self._slot is None:
            raise RuntimeError(f"unit {self.name} has no slot open")
        return self._slot

    @property
    def dtype(self) -> torch.dtype:
        """Of what is shown now."""
        return self.slot.mine.dtype

    def show(self, grads: Mapping[int, Tensor], dtype: torch.dtype, finish: Callable[[], None]) -> None:
        """Fill the next slot with gradients by number of the parameter; those without one contribute zeros.

        Where formats agree, what this rank owns is kept and not copied: the tensors must not change until `pull`, which may
        write the sum there.

        Args:
            finish: Finishes this reduction; called when the slot is needed for another.
        """
        self._slot = self.host.open_slot(self.layout.numel, dtype, finish)
        mine = self._slot.mine
        for gap in self._gaps:
            for _, _, view in self._turned(mine, gap.start, gap.stop):
                view.zero_()
        to, of = [], []
        for member, place in enumerate(self.layout.slots):
            grad = grads.get(member)
            if grad is not None and member in self._kept_numbers and grad.dtype == mine.dtype and grad.is_contiguous():
                if storage_uses(grad) == 1:
                    self._own.add(member)
                self._kept[member] = grad.view(-1)
                continue
            there = self._turned(mine, place.offset, place.offset + place.numel)
            if grad is None:
                for _, _, view in there:
                    view.zero_()
            elif len(there) == 1:
                to.append(there[0][2].view(place.shape))
                of.append(grad)
            else:
                flat = grad.reshape(-1)
                to += [view for _, _, view in there]
                of += [flat[start - place.offset : stop - place.offset] for start, stop, _ in there]
        for part in self.plan.shown:
            kept = self._kept.get(part.member)
            if kept is not None:
                for start, stop, view in self._turned(mine, part.at, part.at + part.stop - part.start):
                    to.append(view)
                    of.append(kept[part.start + start - part.at : part.start + stop - part.at])
        if to:
            foreach_copy(to, of)

    def show_flat(self, flat: Tensor, finish: Callable[[], None]) -> None:
        """The same from a buffer laid out like the unit; what this rank owns of it must not change until `pull`."""
        self._slot, self._flat = self.host.open_slot(self.layout.numel, flat.dtype, finish), flat
        for segment in self.layout.segments:
            own = segment.start + self.rank * segment.chunk
            end = segment.start + segment.chunk * self.layout.world
            for start, stop in ((segment.start, own), (own + segment.chunk, end)):
                for a, b, there in self._turned(self._slot.mine, start, stop):
                    there.copy_(flat[a:b])

    def _turned(self, mine: Tensor, start: int, stop: int) -> list[tuple[int, int, Tensor]]:
        """Where elements [start, stop) of the unit are in this rank's slot: (start, stop, view) of at most two parts."""
        first, numel = self._first, self.layout.numel
        if start < first < stop:
            return [*self._turned(mine, start, first), *self._turned(mine, first, stop)]
        at = start - first if start >= first else start - first + numel
        return [(start, stop, mine[at : at + stop - start])] if stop > start else []

    def post(self) -> None:
        """What is shown may be read by the others."""
        self.host.post(self.slot)

    def kept(self, run: Run) -> Tensor | None:
        """The gradient that stands for this rank's part of a run, if nothing else lies there. It may be the run's `out` in `pull`."""
        return self._mine(run) if run.member in self._own else None

    def _mine(self, run: Run) -> Tensor | None:
        if run.member is None or run.member not in self._kept:
            return None
        return self._kept[run.member][run.first : run.first + run.numel]

    def pull(self, outs: Sequence[Tensor]) -> float:
        """outs[i] = the sum over ranks of run i, in rank order; waits until all posted. Returns the squares' sum."""
        slot, squares = self.slot, 0.0
        self.host.wait(slot, self.name)
        for run, out in zip(self.plan.runs, outs, strict=True):
            end = run.at + run.numel
            sources = [row[run.at + by : end + by] for row, by in zip(slot.all, self._shifts, strict=True)]
            kept = self._flat[run.at : end] if self._flat is not None else self._mine(run)
            if kept is not None:
                sources[self.rank] = kept
            if end > run.at:
                squares += sum_sources(out, sources)
        self.host.pulled(slot)
        self.drop()
        return squares

    def drop(self) -> None:
        """Forget a slot that nobody will pull, and what was kept for it."""
        self._slot, self._flat = None, None
        self._kept.clear()
        self._own.clear()
