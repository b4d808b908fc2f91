"""How the gradients of a unit are summed over the ranks where it is not by the collective of a flat buffer, one `GradReducer` for each case.

    posting    in memory that the ranks share: each *publishes* the elements of its gradients that others own, by copying them into its
               slot, and sums what it owns
    exchange   by messages: a rank sends a large run to its owner as it is, and short runs in one message a rank, the *pack*
    rows       at stage 0: of an embedding only the rows that were looked up (`ds_comm.sparse_rows`)
    single     on a device that is the only one: nothing is summed, a gradient stays where autograd made it

The first two sum out of the tensors that autograd made, and put a sum in the memory of one of its terms where they may. Which ranges
those are is decided in `elements.py`. Every rank sends and receives the same whatever its gradients are like: one that is absent, not
contiguous or of another format is replaced by a copy. Cost, for W ranks and n elements: posting reads and writes (W-1)/W n to publish,
exchange sends as many and receives them into a buffer; then n are read and n/W written. The squares of the sum come out of the same pass.
Source: reduce-scatter as all-to-all and a local sum, Thakur et al. 2005, section 4.3.

Note "rotated slots". In the slot of rank r the unit is rotated so that r's own chunk is last: what is not published is then at the end of
every slot, whatever the unit, and pages that nobody writes are never taken.

Note "nothing else lies there". Autograd hands the same memory to several tensors: where a parameter was viewed and added, its gradient
is a view of the gradient that goes on to earlier layers. Such a gradient is read, and its sum is put elsewhere.

"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor, nn

import ds_comm as comm
from ds_accel import storage_uses
from ds_comm import Group, Work
from ds_comm.shm.shm_units import ReductionBuffers, ShmUnitMemory
from ds_comm.sparse_rows import EmbeddingTable, sum_rows
from ds_ops.reduce import sum_ranges, sum_sources
from ds_ops.stream import copy_ranges
from ds_zero._torch import foreach_copy
from ds_zero.layout.elements import ReduceRange, gaps_between, pack, plan_copies, plan_sums
from ds_zero.planning.unit_plan import ReduceStrategy, UnitPlan
from ds_zero.runtime.gradients import GradReducer
from ds_zero.runtime.unit_groups import GroupSet

__all__ = ["EmbeddingRowReducer", "P2PReduceScatter", "ShmReduceScatter", "SingleRankReducer", "make_reducer", "tables"]

LEAST_KEPT = 16384
"""Elements; in shared memory, copying fewer takes less time than the call that would avoid the copy."""
LEAST_SENT = 131072
"""Elements; a message of its own for fewer takes longer than to copy them to others."""

_Place = tuple[int, int, int]
"""(first, at, n): elements [first, first + n) of a flattened tensor are at `at` of this rank's slot."""


class _Direct(GradReducer, ABC):
    """Sums out of the tensors that autograd made, which must not change until the sum is there."""

    adds_in_place = False

    def __init__(self, plan: UnitPlan, group_set: GroupSet, runs: Sequence[ReduceRange]) -> None:
        super().__init__(plan, group_set)
        self.rank, self._runs = group_set.shard_group.rank, runs
        # One tensor where what was summed is sent on to other ranks.
        self._in_place = group_set.replicate_group.size == 1
        if self._in_place:
            self.ranges = tuple((run.start, run.stop) for run in runs)
        self._flat: Tensor | None = None
        self._grads: dict[int, Tensor] = {}  # contiguous, in the format of the sum
        self._free: set[int] = set()  # of those: nothing else lies there
        self._views: dict[int, Tensor] = {}

    def take(self, grads: Mapping[int, Tensor], dtype: torch.dtype, finish: Callable[[], None]) -> bool:
        self._dtype = dtype
        self._publish(grads, finish)
        return True

    def begin(self, arena: Tensor | None, finish: Callable[[], None]) -> torch.dtype:
        if arena is not None:
            self._dtype, self._flat = arena.dtype, arena
            self._publish_flat(arena, finish)
        self._post()
        return self._dtype

    def in_place_sums(self) -> Sequence[Tensor | None]:
        if not self._in_place:
            return [None]
        return [self._mine(run) if run.member in self._free else None for run in self._runs]

    def start(self, outs: Sequence[Tensor], group_set: GroupSet) -> None:
        """Do nothing: peers read, or receive, the gradients that `begin` published."""

    def finish(self, outs: Sequence[Tensor]) -> Tensor | None:
        if not self._in_place:
            outs = [outs[0][run.start : run.stop] for run in self._runs]
        norms = self._pull(outs)
        self.drop()
        return norms if self._in_place else None

    def drop(self) -> None:
        self._flat = None
        self._grads.clear()
        self._free.clear()
        self._views.clear()

    def _hold(self, member: int, grad: Tensor) -> None:
        if storage_uses(grad) == 1:
            self._free.add(member)
        self._grads[member] = grad

    def _mine(self, run: ReduceRange) -> Tensor | None:
        """Return this rank's gradient elements of a run that are not copied; None if they were copied."""
        if self._flat is not None:
            return self._flat[run.at : run.at + run.numel]
        view = self._views.get(run.at)
        if view is None and run.member in self._grads:
            grad = self._grads[run.member]
            view = self._views[run.at] = grad.as_strided((run.numel,), (1,), grad.storage_offset() + run.first)
        return view

    @abstractmethod
    def _publish(self, grads: Mapping[int, Tensor], finish: Callable[[], None]) -> None:
        """Make ready what others need of gradients by number of the parameter; those without one contribute zeros."""

    @abstractmethod
    def _publish_flat(self, flat: Tensor, finish: Callable[[], None]) -> None:
        """Publish gradients from a buffer laid out like the unit."""

    @abstractmethod
    def _post(self) -> None:
        """Allow peers to read the published gradients."""

    @abstractmethod
    def _pull(self, outs: Sequence[Tensor]) -> Tensor:
        """Sum run i over ranks, in rank order, into outs[i], after all ranks posted. Returns the norms of each out."""


class ShmReduceScatter(_Direct):
    """In the slots of `host`."""

    def __init__(self, plan: UnitPlan, group_set: GroupSet, host: ShmUnitMemory) -> None:
        layout, rank = plan.layout, group_set.shard_group.rank
        sums = plan_sums(layout, rank, LEAST_KEPT)
        super().__init__(plan, group_set, sums.runs)
        self.host = host
        chunk = layout.segments[0].chunk if len(layout.segments) == 1 else 0  # 0: not rotated
        self._first = (rank + 1) * chunk % max(1, layout.numel)
        ahead = [(rank - other - 1) % layout.world for other in range(layout.world)]
        self._starts = [[run.at + (turns - rank) * chunk for turns in ahead] for run in sums.runs]
        self._blanks = [place for gap in layout.gaps for place in self._rotated(gap.start, gap.stop)]
        self._whole = [self._rotated(slot.offset, slot.offset + slot.numel) for slot in layout.slots]
        self._part: dict[int, list[_Place]] = {member: [] for member in sums.members}
        for part in sums.published:
            self._part[part.member] += self._rotated(part.at, part.at + part.stop - part.start, part.start)
        self._slot: ReductionBuffers | None = None

    def _rotated(self, start: int, stop: int, first: int = 0) -> list[_Place]:
        """Locate elements [start, stop) of the unit in this rank's slot: at most two ranges.

        They are elements [first, ...) of another tensor.
        """
        first_own, numel = self._first, self.layout.numel
        if start < first_own < stop:
            return [*self._rotated(start, first_own, first), *self._rotated(first_own, stop, first + first_own - start)]
        at = start - first_own if start >= first_own else start - first_own + numel
        return [(first, at, stop - start)] if stop > start else []

    @property
    def joins(self) -> bool:
        """Nothing is sent: a slot is posted."""
        return False

    @property
    def slot(self) -> ReductionBuffers:
        """The one that is open or posted."""
        if self._slot is None:
            raise RuntimeError(f"unit {self.name} has no slot open")
        return self._slot

    def _publish(self, grads: Mapping[int, Tensor], finish: Callable[[], None]) -> None:
        self._slot = self.host.open_slot(self.layout.numel, self._dtype, finish)
        slot_memory, part = self._slot.local, self._part
        blanks, sources, odd = list(self._blanks), [], []
        for member, whole in enumerate(self._whole):
            grad = grads.get(member)
            if grad is None:
                blanks += whole
            elif grad.dtype is not self._dtype or not grad.is_contiguous():
                odd += [(slot_memory[at : at + n], grad.reshape(-1)[start : start + n]) for start, at, n in whole]
            elif member in part:
                self._hold(member, grad)
                sources.append((grad, part[member]))
            else:
                sources.append((grad, whole))
        for _, at, n in blanks:
            slot_memory[at : at + n].zero_()
        if odd:
            foreach_copy([there for there, _ in odd], [grad for _, grad in odd])
        if sources:
            copy_ranges(slot_memory, sources)

    def _publish_flat(self, flat: Tensor, finish: Callable[[], None]) -> None:
        self._slot = self.host.open_slot(self.layout.numel, flat.dtype, finish)
        places: list[_Place] = []
        for segment, (_, end) in zip(self.layout.segments, self.layout.spans, strict=True):
            chunk_start = segment.start + self.rank * segment.chunk
            places += self._rotated(segment.start, chunk_start, segment.start)
            places += self._rotated(chunk_start + segment.chunk, end, chunk_start + segment.chunk)
        copy_ranges(self._slot.local, [(flat, places)])

    def _post(self) -> None:
        self.host.post(self.slot, self.name)

    def _pull(self, outs: Sequence[Tensor]) -> Tensor:
        slot, instead = self.slot, [self._mine(run) for run in self._runs]
        self.host.wait(slot, self.name)
        norms = sum_ranges(outs, slot.all, self._starts, own_row=self.rank, instead=instead)
        self.host.pulled(slot)
        return norms

    def drop(self) -> None:
        """Drop pending gradients, and the slot that no peer will read."""
        super().drop()
        self._slot = None


class P2PReduceScatter(_Direct):
    """By messages between ranks that share no memory."""

    def __init__(self, plan: UnitPlan, group_set: GroupSet) -> None:
        layout, rank = plan.layout, group_set.shard_group.rank
        self._parcels = [pack(layout, other, LEAST_SENT) for other in range(layout.world)]
        super().__init__(plan, group_set, self._parcels[rank].plan.runs)
        self._group, self._pool = group_set.shard_group, group_set.pool
        self._chosen = frozenset(member for parcel in self._parcels for member in parcel.plan.members)
        # Where the packs of the ranks begin in a buffer for all of them, and where it ends.
        self._packs = [0, *accumulate(layout.shard_numel - parcel.packed for parcel in self._parcels)]
        self._copies = plan_copies(layout, self._parcels, self._packs[:-1])
        self._blanks = gaps_between([(at, at + numel) for _, _, numel, at in self._copies], self._packs[-1])
        self._pooled: list[Tensor] = []  # the pool's, until `drop`
        self._received: Tensor | None = None
        self._work: Work | None = None

    @property
    def full_bytes(self) -> int:
        """Gradients that are being sent, and what comes."""
        return 0 if self._received is None else 2 * self._received.nbytes

    def _publish(self, grads: Mapping[int, Tensor], finish: Callable[[], None]) -> None:
        del finish
        packed = self._begin_pack()
        to, of = [], []
        for member, first, numel, at in self._copies:
            grad, there = grads.get(member), packed[at : at + numel]
            if grad is None:
                there.zero_()
            else:
                to.append(there)
                of.append(grad.reshape(-1)[first : first + numel])
        for member in self._chosen:
            grad = grads.get(member)
            if grad is not None and grad.dtype == self._dtype and grad.is_contiguous():
                self._hold(member, grad)
                continue
            self._grads[member] = buffer = self._take(self.layout.slots[member].numel)
            if grad is None:
                buffer.zero_()
            else:
                to.append(buffer)
                of.append(grad.reshape(-1))
        if to:
            foreach_copy(to, of)

    def _publish_flat(self, flat: Tensor, finish: Callable[[], None]) -> None:
        del finish
        packed = self._begin_pack()
        if self._copies:
            slots = self.layout.slots
            foreach_copy(
                [packed[at : at + numel] for _, _, numel, at in self._copies],
                [flat[slots[member].offset + first :][:numel] for member, first, numel, _ in self._copies],
            )

    def _begin_pack(self) -> Tensor:
        self._pack = self._take(self._packs[-1])
        for blank in self._blanks:
            self._pack[blank.start : blank.stop].zero_()
        return self._pack

    def _take(self, numel: int) -> Tensor:
        self._pooled.append(self._pool.take(numel, self._dtype, torch.device("cpu")))
        return self._pooled[-1]

    def _post(self) -> None:
        others = self.layout.world - 1
        self._received = self._take(others * self.layout.shard_numel)
        arriving = [[row[a:b] for a, b in self._parcels[self.rank].messages] for row in self._received.view(others, -1)]
        leaving = [[] if rank == self.rank else self._leaving(rank) for rank in range(self.layout.world)]
        arriving.insert(self.rank, [])
        joint, self._joint = self._joint, None
        if joint is not None:
            self._work = joint.exchange(arriving, leaving, self.name)
        else:
            self._work = comm.all_to_all_pieces(arriving, leaving, self._group, async_op=True, unit=self.name)

    def _leaving(self, rank: int) -> list[Tensor]:
        parcel = self._parcels[rank]
        messages = [view for i in parcel.large if (view := self._mine(parcel.plan.runs[i])) is not None]
        return messages + ([self._pack[self._packs[rank] : self._packs[rank + 1]]] if parcel.small else [])

    def _pull(self, outs: Sequence[Tensor]) -> Tensor:
        if self._work is not None:
            self._work.wait()
        bucket, norms = self._parcels[self.rank], torch.zeros(len(outs), 2, dtype=torch.float64, device="cpu")
        received = [] if self._received is None else list(self._received.view(self.layout.world - 1, -1))
        for number, (at, run, out) in enumerate(zip(bucket.places, self._runs, outs, strict=True)):
            direct, copied = self._mine(run), self._packs[self.rank] + at - bucket.packed
            terms = [row[at : at + run.numel] for row in received]
            terms.insert(self.rank, self._pack[copied : copied + run.numel] if direct is None else direct)
            if run.numel:
                norms[number] = sum_sources(out, terms)
        return norms

    def drop(self) -> None:
        """Drop pending gradients; wait for messages in flight and return their buffers to the pool."""
        super().drop()
        if self._work is not None:
            self._work.wait()
            self._work = None
        for buffer in self._pooled:
            self._pool.give(buffer)
        self._pooled.clear()
        self._received = None


def tables(model: nn.Module) -> frozenset[str]:
    """Names of the weights of all nn.Embedding and nn.EmbeddingBag."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    owners = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
    return frozenset(name for name, param in model.named_parameters() if id(param) in owners)


class EmbeddingRowReducer(GradReducer):
    """Sums embeddings by rows."""

    def __init__(self, plan: UnitPlan, group_set: GroupSet, tables: Sequence[EmbeddingTable]) -> None:
        super().__init__(plan, group_set)
        self.tables = tables

    @property
    def joins(self) -> bool:
        """What is sent depends on the batch."""
        return False

    def _sum_whole(self, flat: Tensor, group: Group) -> list[Work]:
        return sum_rows(flat, self.tables, group, self.name)


class SingleRankReducer(GradReducer):
    """Keeps gradients in the memory where autograd made them, one range a parameter: blocks that are as small as activations come out of
    the memory that backward frees, where one for a whole unit is too large for any gap and makes torch's allocator take more."""

    def __init__(self, plan: UnitPlan, group_set: GroupSet) -> None:
        super().__init__(plan, group_set)
        slots = self.layout.slots
        self._members = sorted(range(len(slots)), key=lambda member: slots[member].offset)
        starts = [slots[member].offset for member in self._members if slots[member].numel]
        self._members = [member for member in self._members if slots[member].numel]
        if starts:
            self.ranges = tuple(pairwise([0, *starts[1:], self.layout.shard_numel]))
        self._grads: dict[int, Tensor] = {}

    @property
    def joins(self) -> bool:
        """Nothing is sent."""
        return False

    def take(self, grads: Mapping[int, Tensor], dtype: torch.dtype, finish: Callable[[], None]) -> bool:
        del finish
        self._dtype = dtype
        for member, grad in grads.items():
            self._grads[member] = grad.to(dtype)
        return True

    def begin(self, arena: Tensor | None, finish: Callable[[], None]) -> torch.dtype:
        if arena is None:
            return self._dtype
        return super().begin(arena, finish)

    def in_place_sums(self) -> Sequence[Tensor | None]:
        if self._arena is not None:
            return [self._arena[start:stop] for start, stop in self.ranges]
        if not self._members:
            return [None]
        return [
            self._place(member, stop - start) for member, (start, stop) in zip(self._members, self.ranges, strict=True)
        ]

    def _place(self, member: int, numel: int) -> Tensor | None:
        grad = self._grads.get(member)
        # Nothing else may lie there, see "nothing else lies there".
        if grad is None or grad.numel() != numel or not grad.is_contiguous() or storage_uses(grad) > 1:
            return None
        return grad.view(-1)

    def start(self, outs: Sequence[Tensor], group_set: GroupSet) -> None:
        """Copy what cannot stay where it is."""
        del group_set
        if self._arena is not None:
            if len(outs) != len(self.ranges) or outs[0].data_ptr() != self._arena.data_ptr():
                foreach_copy(list(outs), [self._arena[start:stop] for start, stop in self.ranges])
            return
        to, of = [], []
        for out, member in zip(outs, self._members, strict=False):
            grad = self._grads.get(member)
            if grad is not None and grad.data_ptr() == out.data_ptr():
                continue
            numel = 0 if grad is None else grad.numel()
            out[numel:].zero_()
            if grad is not None:
                to.append(out[:numel].view(grad.shape))
                of.append(grad)
        if to:
            foreach_copy(to, of)
        if not self._members:
            outs[0].zero_()

    def finish(self, outs: Sequence[Tensor]) -> Tensor | None:
        self._grads.clear()
        return super().finish(outs)

    def drop(self) -> None:
        self._grads.clear()
        self._arena = None


def make_reducer(plan: UnitPlan, group_set: GroupSet) -> GradReducer:
    """Build the GradReducer that the plan chose."""
    if plan.reduction is ReduceStrategy.POSTING and group_set.host is not None:
        return ShmReduceScatter(plan, group_set, group_set.host)
    if plan.reduction is ReduceStrategy.SINGLE:
        return SingleRankReducer(plan, group_set)
    if plan.reduction is ReduceStrategy.EXCHANGE:
        return P2PReduceScatter(plan, group_set)
    table_slots = [slot for slot in plan.layout.slots if slot.name in group_set.tables and slot.numel]
    if table_slots:
        return EmbeddingRowReducer(
            plan, group_set, [EmbeddingTable(slot.offset, slot.shape[0], prod(slot.shape[1:])) for slot in table_slots]
        )
    return GradReducer(plan, group_set)
