"""One unit's reduction in memory that the ranks of a host share: who copies what, and what is summed from where.

A rank *publishes* the elements of its gradients that others own, by copying them into its slot. The elements that it owns itself are
*kept*: they are summed out of the tensors that autograd made, and the sum may be put there, too. Ranges too short to be worth a call of
their own are published. A *run* is a range of the shard that is summed by one call.

Note "rotated slots". In the slot of rank r the unit is rotated so that r's own chunk is last: what is not published is then at the end of
every slot, whatever the unit, and pages that nobody writes are never taken.

Cost, for W ranks and n elements: (W-1)/W n read and written to publish, n read and n/W written to sum; the squares of the sum come
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

from ds_ops.stream import copy_ranges
from ds_ops.summing import sum_ranges
from ds_zero._torch import foreach_copy, storage_uses
from ds_zero.layout.elements import UnitLayout
from ds_zero.runtime.memory import HostMemory, Slot

__all__ = ["Posting", "Published", "Run", "SumPlan", "plan_sums"]

LEAST = 16384
"""Elements; copying fewer takes less time than the call that would spare it."""


_Place = tuple[int, int, int]
"""(first, at, n): elements [first, first + n) of a flattened tensor are at `at` of this rank's slot."""


@dataclass(frozen=True, slots=True)
class Published:
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
    """Of one rank. `published` names the kept parameters only; all others are published whole. Runs cover the shard, at least one."""

    published: tuple[Published, ...]
    runs: tuple[Run, ...]

    @property
    def kept(self) -> frozenset[int]:
        """Numbers of the parameters of which a part is kept."""
        return frozenset(run.member for run in self.runs if run.member is not None)


def plan_sums(layout: UnitLayout, rank: int, least: int | None = None) -> SumPlan:
    """What rank `rank` publishes and sums of a unit, where ranges of `least` elements are kept. Pure; O(parameters x segments)."""
    least = LEAST if least is None else least
    places = {slot.name: (member, slot) for member, slot in enumerate(layout.slots)}
    published: list[Published] = []
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
                published.append(Published(member, start, stop, slot.offset + start))
    return SumPlan(tuple(published), tuple(runs) or (Run(0, 0, 0),))


class Posting:
    """The slots of one unit, one reduction after the other. All ranks make the same calls in the same order."""

    def __init__(self, host: HostMemory, layout: UnitLayout, rank: int, name: str) -> None:
        self.host, self.layout, self.rank, self.name = host, layout, rank, name
        self.plan = plan_sums(layout, rank)
        chunk = layout.segments[0].chunk if len(layout.segments) == 1 else 0  # 0: not rotated
        self._first = (rank + 1) * chunk % max(1, layout.numel)
        ahead = [(rank - other - 1) % layout.world for other in range(layout.world)]
        self._shifts = [(turns - rank) * chunk for turns in ahead]
        self._starts = [[run.at + by for by in self._shifts] for run in self.plan.runs]
        self._blanks = [place for gap in layout.gaps for place in self._rotated(gap.start, gap.stop)]
        self._whole = [self._rotated(slot.offset, slot.offset + slot.numel) for slot in layout.slots]
        self._part: dict[int, list[_Place]] = {member: [] for member in self.plan.kept}
        for part in self.plan.published:
            self._part[part.member] += self._rotated(part.at, part.at + part.stop - part.start, part.start)
        self._slot: Slot | None = None
        self._kept: dict[int, Tensor] = {}
        self._own: set[int] = set()
        self._views: dict[int, Tensor] = {}
        self._flat: Tensor | None = None

    @property
    def slot(self) -> Slot:
        """The one that is open or posted."""
        if self._slot is None:
            raise RuntimeError(f"unit {self.name} has no slot open")
        return self._slot

    @property
    def dtype(self) -> torch.dtype:
        """Of what is published now."""
        return self.slot.mine.dtype

    @property
    def nbytes(self) -> int:
        """Of memory of its own: the slots are shared by all units."""
        return 0

    def publish(self, grads: Mapping[int, Tensor], dtype: torch.dtype, finish: Callable[[], None]) -> None:
        """Fill the next slot with gradients by number of the parameter; those without one contribute zeros.

        Where formats agree, what this rank owns is kept and not copied: the tensors must not change until `pull`, which may
        write the sum there.

        Args:
            finish: Finishes this reduction; called when the slot is needed for another.
        """
        self._slot = self.host.open_slot(self.layout.numel, dtype, finish)
        mine, part = self._slot.mine, self._part
        blanks, moves, odd = list(self._blanks), [], []
        for member, whole in enumerate(self._whole):
            grad = grads.get(member)
            if grad is None:
                blanks += whole
            elif grad.dtype is not dtype or not grad.is_contiguous():
                odd += [(mine[at : at + n], grad.reshape(-1)[start : start + n]) for start, at, n in whole]
            elif member in part:
                if storage_uses(grad) == 1:
                    self._own.add(member)
                self._kept[member] = grad
                moves += [(at, grad, start, n) for start, at, n in part[member]]
            else:
                moves += [(at, grad, start, n) for start, at, n in whole]
        for _, at, n in blanks:
            mine[at : at + n].zero_()
        if odd:
            foreach_copy([there for there, _ in odd], [grad for _, grad in odd])
        if moves:
            copy_ranges(mine, moves)

    def publish_flat(self, flat: Tensor, finish: Callable[[], None]) -> None:
        """The same from a buffer laid out like the unit; what this rank owns of it must not change until `pull`."""
        self._slot, self._flat = self.host.open_slot(self.layout.numel, flat.dtype, finish), flat
        places = []
        for segment in self.layout.segments:
            own = segment.start + self.rank * segment.chunk
            end = segment.start + segment.chunk * self.layout.world
            places += self._rotated(segment.start, own, segment.start)
            places += self._rotated(own + segment.chunk, end, own + segment.chunk)
        copy_ranges(self._slot.mine, [(at, flat, start, n) for start, at, n in places])

    def _rotated(self, start: int, stop: int, first: int = 0) -> list[_Place]:
        """Where elements [start, stop) of the unit, which are [first, ...) of something else, are in this rank's slot: at most two."""
        first_own, numel = self._first, self.layout.numel
        if start < first_own < stop:
            return [*self._rotated(start, first_own, first), *self._rotated(first_own, stop, first + first_own - start)]
        at = start - first_own if start >= first_own else start - first_own + numel
        return [(first, at, stop - start)] if stop > start else []

    def post(self) -> None:
        """What is published may be read by the others."""
        self.host.post(self.slot, self.name)

    def kept(self, run: Run) -> Tensor | None:
        """The gradient that stands for this rank's part of a run, if nothing else lies there. It may be the run's `out` in `pull`."""
        return self._mine(run) if run.member in self._own else None

    def _mine(self, run: Run) -> Tensor | None:
        """What this rank has of a run and did not publish."""
        if self._flat is not None:
            return self._flat[run.at : run.at + run.numel]
        mine = self._views.get(run.start)
        if mine is None and run.member in self._kept:
            grad = self._kept[run.member]
            mine = self._views[run.start] = grad.as_strided((run.numel,), (1,), grad.storage_offset() + run.first)
        return mine

    def pull(self, outs: Sequence[Tensor]) -> float:
        """outs[i] = the sum over ranks of run i, in rank order; waits until all posted. Returns the squares' sum."""
        slot, instead = self.slot, [self._mine(run) for run in self.plan.runs]
        self.host.wait(slot, self.name)
        squares = sum_ranges(outs, slot.all, self._starts, own=self.rank, instead=instead)
        self.host.pulled(slot)
        self.drop()
        return squares

    def drop(self) -> None:
        """Forget a slot that nobody will pull, and what was kept for it."""
        self._slot, self._flat = None, None
        self._kept.clear()
        self._own.clear()
        self._views.clear()
