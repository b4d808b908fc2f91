"""One unit's reduction by messages between ranks that share no memory: each gets its chunk of the others' gradients and sums it.

Runs, *published* and *kept* are as in `posting.py`. A rank sends a large run to its owner straight out of the tensor that autograd made;
short runs are copied into one message a rank, the *pack*. A run's *place* is where it lies in what a rank receives from another: large
runs first, then the pack. Every rank sends and receives the same messages whatever its gradients are like: one that is absent, not
contiguous or of another format is replaced by a copy.

Cost, for W ranks and n elements: (W-1)/W n sent, (W-1)/W n received into a buffer, n read and n/W written to sum. Nothing is copied
but the pack. Source: reduce-scatter as all-to-all and a local sum, Thakur et al. 2005, section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import ds_comm as comm
from ds_ops.summing import sum_sources
from ds_zero._torch import foreach_copy, storage_uses
from ds_zero.layout.elements import UnitLayout
from ds_zero.runtime.memory import Pool
from ds_zero.runtime.posting import Run, SumPlan, plan_sums

__all__ = ["Exchange", "Parcel", "pack", "sends_from_anywhere"]

LEAST = 131072
"""Elements; a message of its own for fewer takes longer than to copy them to others."""
_NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one rank gets from each other rank.

    Attributes:
        plan: Its runs.
        places: Of each run.
        large: Numbers of the runs with a message of their own, in order.
        small: Numbers of the others.
        packed: Place of the first of those; they end with the shard.
    """

    plan: SumPlan
    places: tuple[int, ...]
    large: tuple[int, ...]
    small: tuple[int, ...]
    packed: int

    def cut(self, received: Tensor) -> list[Tensor]:
        """The memory of each message in a buffer as long as the shard."""
        found = [received[self.places[i] : self.places[i] + self.plan.runs[i].numel] for i in self.large]
        return found + ([received[self.packed :]] if self.small else [])


def pack(layout: UnitLayout, rank: int, least: int | None = None) -> Parcel:
    """What rank `rank` gets of a unit, where runs of `least` elements travel by themselves. Pure; O(parameters x segments)."""
    plan = plan_sums(layout, rank, LEAST if least is None else least)
    large = tuple(i for i, run in enumerate(plan.runs) if run.member is not None)
    small = tuple(i for i, run in enumerate(plan.runs) if run.member is None)
    places, end = {}, 0
    for i in (*large, *small):
        places[i], end = end, end + plan.runs[i].numel
    ordered = tuple(places[i] for i in range(len(plan.runs)))
    return Parcel(plan, ordered, large, small, sum(plan.runs[i].numel for i in large))


def sends_from_anywhere(group: comm.Group, device: torch.device) -> bool:
    """Whether messages between these ranks leave from and arrive in any memory at no cost: gloo's on the CPU."""
    if group.pg is None or device.type != "cpu":
        return False
    return "cpu:gloo" in dist.get_backend_config(group.pg).split(",")


class Exchange:
    """The messages of one unit, one reduction after the other. All ranks make the same calls in the same order."""

    def __init__(self, group: comm.Group, layout: UnitLayout, pool: Pool, name: str) -> None:
        self.layout, self.rank, self.name = layout, group.rank, name
        self._group, self._pool = group, pool
        self._parcels = [pack(layout, rank) for rank in range(layout.world)]
        self.plan = self._parcels[self.rank].plan
        self._chosen = frozenset(run.member for p in self._parcels for run in p.plan.runs if run.member is not None)
        # Of each rank, where its short runs begin in a buffer for all of them.
        self._packs, end = [], 0
        for parcel in self._parcels:
            self._packs.append(end)
            end += layout.shard_numel - parcel.packed
        self._pack_numel = end
        self._copies = _plan_copies(layout, self._parcels, self._packs)
        self._work: comm.Work | None = None
        self._lent: list[Tensor] = []  # the pool's, until `pull`
        self._grads: dict[int, Tensor] = {}
        self._own: set[int] = set()
        self._flat: Tensor | None = None
        self._pack = _NOTHING
        self._received: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of what is published now."""
        return self._pack.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that are held until `pull`: gradients that are being sent, and what comes."""
        return 0 if self._received is None else 2 * self._received.nbytes

    def publish(self, grads: Mapping[int, Tensor], dtype: torch.dtype, finish: Callable[[], None]) -> None:
        """Take gradients by number of the parameter; those without one contribute zeros.

        What can be sent as it is must not change until `pull`, which may write the sum there.
        """
        del finish
        pack = self._begin(dtype)
        to, of = [], []
        for member, first, numel, at in self._copies:
            grad, there = grads.get(member), pack[at : at + numel]
            if grad is None:
                there.zero_()
            else:
                to.append(there)
                of.append(grad.reshape(-1)[first : first + numel])
        for member in self._chosen:
            grad = grads.get(member)
            if grad is not None and grad.dtype == dtype and grad.is_contiguous():
                if storage_uses(grad) == 1:  # posting.py, "nothing else lies there"
                    self._own.add(member)
                self._grads[member] = grad.view(-1)
                continue
            made = self._take(self.layout.slots[member].numel, dtype)
            self._grads[member] = made
            if grad is None:
                made.zero_()
            else:
                to.append(made)
                of.append(grad.reshape(-1))
        if to:
            foreach_copy(to, of)

    def publish_flat(self, flat: Tensor, finish: Callable[[], None]) -> None:
        """The same from a buffer laid out like the unit, which must not change until `pull`."""
        del finish
        pack, self._flat = self._begin(flat.dtype), flat
        places = [flat[s.offset : s.offset + s.numel] for s in self.layout.slots]
        if self._copies:
            foreach_copy(
                [pack[at : at + numel] for _, _, numel, at in self._copies],
                [places[member][first : first + numel] for member, first, numel, _ in self._copies],
            )

    def _begin(self, dtype: torch.dtype) -> Tensor:
        self._pack = pack = self._take(self._pack_numel, dtype)
        for start, stop in _gaps(self._copies, self._pack_numel):
            pack[start:stop].zero_()
        return pack

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        self._lent.append(self._pool.take(numel, dtype, torch.device("cpu")))
        return self._lent[-1]

    def post(self) -> None:
        """Start to send what is published, and to receive."""
        world, mine = self.layout.world, self._parcels[self.rank]
        self._received = self._take((world - 1) * self.layout.shard_numel, self.dtype)
        rows = iter(self._received.view(world - 1, -1))
        arriving = [[] if rank == self.rank else mine.cut(next(rows)) for rank in range(world)]
        leaving = [[] if rank == self.rank else self._leaving(rank) for rank in range(world)]
        self._work = comm.all_to_all_pieces(arriving, leaving, self._group, async_op=True, unit=self.name)

    def _leaving(self, rank: int) -> list[Tensor]:
        parcel = self._parcels[rank]
        found = [self._source(parcel.plan.runs[i]) for i in parcel.large]
        return found + ([self._pack_of(rank)] if parcel.small else [])

    def _pack_of(self, rank: int) -> Tensor:
        begin = self._packs[rank]
        return self._pack[begin : begin + self.layout.shard_numel - self._parcels[rank].packed]

    def _source(self, run: Run) -> Tensor:
        """This rank's gradient of a large run."""
        if self._flat is not None:
            return self._flat[run.at : run.at + run.numel]
        if run.member is None:
            raise RuntimeError(f"unit {self.name}: a run of several parameters is not one gradient")
        return self._grads[run.member][run.first : run.first + run.numel]

    def kept(self, run: Run) -> Tensor | None:
        """The gradient that stands for this rank's part of a run, where autograd made it. It may be the run's `out` in `pull`."""
        return self._source(run) if run.member in self._own else None

    def pull(self, outs: Sequence[Tensor]) -> float:
        """outs[i] = the sum over ranks of run i, in rank order; waits for the messages. Returns the squares' sum."""
        if self._work is not None:
            self._work.wait()
        mine, squares = self._parcels[self.rank], 0.0
        received = [] if self._received is None else list(self._received.view(self.layout.world - 1, -1))
        for number, (run, out) in enumerate(zip(self.plan.runs, outs, strict=True)):
            at = mine.places[number]
            terms = [row[at : at + run.numel] for row in received]
            own = (
                self._source(run)
                if run.member is not None
                else self._pack_of(self.rank)[at - mine.packed :][: run.numel]
            )
            terms.insert(self.rank, own)
            if run.numel:
                squares += sum_sources(out, terms)
        self.drop()
        return squares

    def drop(self) -> None:
        """Forget what is published, and wait for messages that nobody will pull."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        for buffer in self._lent:
            self._pool.give(buffer)
        self._lent.clear()
        self._grads.clear()
        self._own.clear()
        self._flat = self._received = None
        self._pack = _NOTHING


def _plan_copies(
    layout: UnitLayout, parcels: Sequence[Parcel], packs: Sequence[int]
) -> tuple[tuple[int, int, int, int], ...]:
    """(parameter, its first element, elements, where they go in the buffer of the packs), by where they go."""
    found = []
    for parcel, begin in zip(parcels, packs, strict=True):
        for i in parcel.small:
            run = parcel.plan.runs[i]
            for member, slot in enumerate(layout.slots):
                start, stop = max(run.at, slot.offset), min(run.at + run.numel, slot.offset + slot.numel)
                if start < stop:
                    at = begin + parcel.places[i] - parcel.packed + start - run.at
                    found.append((member, start - slot.offset, stop - start, at))
    return tuple(sorted(found, key=lambda copy: copy[3]))


def _gaps(copies: Sequence[tuple[int, int, int, int]], numel: int) -> list[tuple[int, int]]:
    """Ranges of the buffer of the packs that no parameter fills."""
    found, end = [], 0
    for _, _, length, at in copies:
        if at > end:
            found.append((end, at))
        end = at + length
    return found if end == numel else [*found, (end, numel)]
