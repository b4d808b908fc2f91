"""The gradients of one unit, from the tensors that autograd makes to this rank's shard of their sum.

Knows no optimizer and no hook: others say when gradients have arrived and when they are to be summed.

    collect   move the parameters' gradients into the unit's flat buffer
    reduce    sum that buffer over the ranks, leave this rank's shard of it
    finish    wait for that
    clear     forget all of it

Words: *arena* is the flat gradient buffer, as long as the unit; it is *open* while it holds gradients that were not reduced.
*shard* is the reduced sum (not yet averaged), as long as the unit's shard. Where the ranks share a host's memory there is a slot
instead of an arena (`posting.py`), and reducing is one pass over the ranks' slots.

A buffer that a collective is using belongs to that collective's handle; every verb waits for it before touching the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import ds_comm as comm
from ds_zero._torch import foreach_add, foreach_copy
from ds_zero.host import Slot
from ds_zero.posting import Posting
from ds_zero.rows import RowSum
from ds_zero.seat import Members, Seat

__all__ = ["Gradients"]


class Gradients:
    """See the module's docstring. Made on all ranks of the seat alike; `reduce` and `finish` are called on all of them.

    Attributes:
        shard: This rank's shard of the sum over ranks, [shard_numel], accumulate format; None before the first `reduce`.
        arena: The flat buffer, [numel]; None while there is none.
        open: Whether gradients were collected that were not reduced.
        rows: How gradients of embeddings are summed at stage 0; None: like all others.
        seat: Over which ranks they are summed.
    """

    def __init__(self, members: Members, seat: Seat) -> None:
        self.seat = seat
        self.rows: RowSum | None = None
        self.shard: Tensor | None = None
        self.arena: Tensor | None = None
        self.open = False
        self._members, self._layout, self._dtypes = members, members.layout, members.dtypes
        self._views: list[Tensor] = []
        self._gaps = members.layout.gaps
        self._shard_in_arena = False
        self._spare: Tensor | None = None
        self._reducing: _Reduction | None = None
        self._square: tuple[float, int] | None = None
        self._posting = None
        if seat.host is not None:
            self._posting = Posting(seat.host, members.layout, seat.shards.rank, members.spec.name)

    def collect(self, *, now: bool = True) -> None:
        """Move the parameters' gradients into the arena; parameters without one contribute zeros.

        Args:
            now: Whether a reduction follows at once. Then the arena is in the reduce format, else in the accumulate format.
        """
        self.finish()
        params = self._members.params
        present = [i for i, param in enumerate(params) if param.grad is not None]
        with torch.no_grad():
            if now and not self.open and self._posting is not None:
                self._show(self._posting, present)
            else:
                self._collect(present, now=now)
        for i in present:
            params[i].grad = None

    def _show(self, posting: Posting, present: Sequence[int]) -> None:
        slot = self._open_slot(posting, self._dtypes.reduce)
        posting.show(slot, {i: _dense(self._members.params[i].grad) for i in present})
        self.open = True

    def _collect(self, present: Sequence[int], *, now: bool) -> None:
        fresh = not self.open
        if fresh:
            self._open(self._dtypes.reduce if now else self._dtypes.accumulate)
        elif self.arena is not None and self.arena.dtype != self._dtypes.accumulate:
            self._recast(self.arena, self._dtypes.accumulate)
        views = self._views
        if len(present) != len(views):
            if fresh:
                for i in set(range(len(views))).difference(present):
                    views[i].zero_()
            views = [views[i] for i in present]
        grads = [_dense(self._members.params[i].grad) for i in present]
        if grads:
            (foreach_copy if fresh else foreach_add)(views, grads)

    def reduce(self) -> None:
        """Start to sum the arena over the ranks and add this rank's shard of the sum to `shard`. Sends (N-1)/N of it."""
        if not self.open:
            self.collect()
        arena = self.arena
        if arena is not None and self.seat.size > 1 and self._travels_narrow(arena):
            arena = self._recast(arena, self._dtypes.reduce)
        if self._posting is not None:
            self._post(self._posting, arena)
            return
        if arena is None:
            raise RuntimeError(f"unit {self._members.spec.name} has no gradient buffer to reduce")
        self._reducing, self.open = self._start(arena), False

    def _start(self, arena: Tensor) -> _Reduction:
        alone = self._layout.world == 1
        first, fits = self.shard is None, arena.dtype == self._dtypes.accumulate
        # A sum that is also one of its terms would need memory for the term that comes.
        in_place = first and fits and alone
        out = arena[: self._layout.shard_numel] if in_place else self._sum_buffer(arena.dtype)
        name, works = self._members.spec.name, []
        for segment in self._layout.segments:
            inp = arena[segment.start : segment.start + segment.chunk * self._layout.world]
            mine = out[segment.at : segment.at + segment.chunk]
            works.append(comm.reduce_scatter_single(mine, inp, group=self.seat.shards, async_op=True, unit=name))
        if alone and self.rows is not None:
            works += self.rows.start(out, self.seat.replicas)
        elif alone:
            works.append(comm.all_reduce(out, group=self.seat.replicas, async_op=True, unit=name))
        return _Reduction(works, out, adds=not (first and fits), keeps=alone, in_place=in_place)

    def _travels_narrow(self, arena: Tensor) -> bool:
        # Gradients that added up wide travel as they are, unless a format narrower than the parameters' was asked for.
        return self._dtypes.reduce.itemsize < min(arena.dtype.itemsize, self._dtypes.param.itemsize)

    def _post(self, posting: Posting, arena: Tensor | None) -> None:
        # The same on a shared host: the ranks' slots are summed where they are.
        if arena is not None:
            posting.show_flat(self._open_slot(posting, arena.dtype), arena)
        posting.post()
        self.open, dtype = False, posting.slot.mine.dtype
        adds = not (self.shard is None and dtype == self._dtypes.accumulate)
        self._reducing = _Reduction([], self._sum_buffer(dtype), adds=adds, keeps=False, in_place=False)

    def _open_slot(self, posting: Posting, dtype: torch.dtype) -> Slot:
        return posting.host.open_slot(self._layout.numel, dtype, self.finish)

    def _sum_buffer(self, dtype: torch.dtype) -> Tensor:
        """Where the sum goes: the gradient itself, if there is none yet and formats agree; else a buffer to add from."""
        if self.shard is None and dtype == self._dtypes.accumulate:
            return self._take_spare()
        return self.seat.pool.take(self._layout.shard_numel, dtype, self._members.device)

    def finish(self) -> None:
        """Wait for `reduce`: `shard` is valid afterwards."""
        going, self._reducing = self._reducing, None
        if going is None:
            return
        for work in going.works:
            work.wait()
        square = None if self._posting is None else self._posting.pull(going.out)
        if self._layout.world > 1 and self.seat.replicas.size > 1:
            comm.all_reduce(going.out, group=self.seat.replicas, unit=self._members.spec.name)
            square = None
        if going.adds:
            if self.shard is None:
                self.shard = self._take_spare().copy_(going.out)
            else:
                self.shard.add_(going.out)
            self.seat.pool.give(going.out)
        else:
            self.shard, self._shard_in_arena = going.out, going.in_place
        self._square = None if square is None or going.adds else (square, going.out._version)
        if not going.keeps:
            self._give_arena()

    @property
    def square(self) -> float | None:
        """Sum of squares of `shard`, if the pass that made it told, and nobody has written it since."""
        if self.shard is None or self._square is None or self.shard._version != self._square[1]:
            return None
        return self._square[0]

    def clear(self) -> None:
        """Forget every gradient, reduced or not."""
        self.finish()
        self.shard, self.open, self._shard_in_arena = None, False, False
        for param in self._members.params:
            param.grad = None
        if self._members.spec.residency.shard_grads or self._layout.world > 1:
            self._give_arena()
        if self._posting is not None:
            self._posting.drop()

    def drop_idle(self) -> int:
        """Give back buffers that hold nothing. Returns the bytes that were not the pool's."""
        if not self.open and not self._shard_in_arena:
            self._give_arena()
        if self.shard is not None or self._spare is None:
            return 0
        freed, self._spare = self._spare.nbytes, None
        return freed

    @property
    def tensors(self) -> list[Tensor]:
        """What holds gradients now."""
        return [tensor for tensor in (self.shard, self.arena) if tensor is not None]

    @property
    def full_bytes(self) -> int:
        """Of the arena."""
        return 0 if self.arena is None else self.arena.nbytes

    @property
    def shard_bytes(self) -> int:
        """Of the memory for the shard, in use or not."""
        return 0 if self._spare is None else self._spare.nbytes

    def _open(self, dtype: torch.dtype) -> None:
        if self._shard_in_arena and self.shard is not None:
            self.shard = self._take_spare().copy_(self.shard)  # the arena is about to be written
            self._shard_in_arena = False
        if self.arena is not None and self.arena.dtype != dtype:
            self._give_arena()
        arena = self._set_arena(dtype) if self.arena is None else self.arena
        for gap in self._gaps:
            arena[gap.start : gap.stop].zero_()
        self.open = True

    def _recast(self, old: Tensor, dtype: torch.dtype) -> Tensor:
        new = self._set_arena(dtype).copy_(old)
        self.seat.pool.give(old)
        return new

    def _set_arena(self, dtype: torch.dtype) -> Tensor:
        self.arena = arena = self.seat.pool.take(self._layout.numel, dtype, self._members.device)
        self._views = [arena[s.offset : s.offset + s.numel].view(s.shape) for s in self._layout.slots]
        return arena

    def _give_arena(self) -> None:
        if self.arena is not None:
            self.seat.pool.give(self.arena)
        self.arena, self._views = None, []

    def _take_spare(self) -> Tensor:
        dtype = self._dtypes.accumulate
        if self._spare is None and self.seat.sums is not None:
            self._spare = self.seat.sums.take(self._members.number, dtype)
        if self._spare is None:
            self._spare = torch.empty(self._layout.shard_numel, dtype=dtype, device=self._members.device)
        return self._spare


@dataclass(frozen=True, slots=True)
class _Reduction:
    """One under way.

    Attributes:
        out: Where this rank's shard of the sum comes.
        adds: It is to be added to the shard that is there, or cast.
        keeps: The arena stays with the unit.
        in_place: `out` is the arena.
    """

    works: list[comm.Work]
    out: Tensor
    adds: bool
    keeps: bool
    in_place: bool


def _dense(grad: Tensor | None) -> Tensor:
    if grad is None:
        raise RuntimeError("a gradient vanished while it was collected")
    return grad if grad.layout is torch.strided else grad.to_dense()
