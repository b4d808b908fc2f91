"""The gradients of one unit, from the tensors that autograd makes to this rank's shard of their sum.

Knows no optimizer and no hook: others say when gradients have arrived and when they are to be summed.

    collect   move the parameters' gradients into the unit's flat buffer
    reduce    sum that buffer over the ranks, leave this rank's shard of it
    finish    wait for that
    clear     forget all of it

Words: *arena* is the flat gradient buffer, as long as the unit; it is *open* while it holds gradients that were not reduced.
*sums* are the reduced gradients (not yet averaged), together as long as the unit's shard, in one tensor for each of *ranges*. Where
the ranks share a host's memory there is a slot instead of an arena (`posting.py`), reducing is one pass over the ranks' slots, and
the sums take the memory of the gradients that they are made of. So it is where messages can leave from any memory (`exchange.py`).
Then there are several ranges, else one. Both ways to do without an arena are called *direct*.

A buffer that a collective is using belongs to that collective's handle; every verb waits for it before touching the buffer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

import ds_comm as comm
from ds_zero._torch import foreach_add, foreach_copy
from ds_zero.layout.plan import Reduction, UnitPlan
from ds_zero.policies.wire import quantized
from ds_zero.runtime.exchange import Exchange
from ds_zero.runtime.posting import Posting
from ds_zero.runtime.rows import RowSum
from ds_zero.runtime.seat import Members, Seat

__all__ = ["Gradients"]


class Gradients:
    """See the module's docstring. Made on all ranks of the seat alike; `reduce` and `finish` are called on all of them.

    Attributes:
        ranges: (start, stop) in the shard, one after the other, from 0 to its end; no piece of a parameter lies in two of them.
        sums: This rank's shard of the sum over ranks, a flat tensor a range, accumulate format; None before the first `reduce`.
        arena: The flat buffer, [numel]; None while there is none.
        open: Whether gradients were collected that were not reduced.
        rows: How gradients of embeddings are summed at stage 0; None: like all others.
        seat: Over which ranks they are summed.
    """

    def __init__(self, members: Members, seat: Seat) -> None:
        self.seat = seat
        self.rows: RowSum | None = None
        self.sums: list[Tensor] | None = None
        self.arena: Tensor | None = None
        self.open = False
        self._members, self._layout, self._dtypes = members, members.plan.layout, members.plan.dtypes
        self._views: list[Tensor] = []
        self._gaps = self._layout.gaps
        self._sums_in_arena = False
        self._reducing: _Reduction | None = None
        self._square: tuple[float, int] | None = None
        self._direct = self._way(members.plan, seat)
        self._codes, self._errors = quantized(members.plan.wire, seat.levels)
        self.ranges: tuple[tuple[int, int], ...] = ((0, self._layout.shard_numel),)
        # One tensor where what was summed is sent on to other ranks.
        self._in_place = self._direct is not None and seat.replicas.size == 1
        if self._direct is not None and self._in_place:
            self.ranges = tuple((run.start, run.stop) for run in self._direct.plan.runs)
        self._spares: list[Tensor | None] = [None] * len(self.ranges)

    @staticmethod
    def _way(plan: UnitPlan, seat: Seat) -> Posting | Exchange | None:
        if plan.reduction is Reduction.POSTING and seat.host is not None:
            return Posting(seat.host, plan.layout, seat.shards.rank, plan.name)
        if plan.reduction is Reduction.EXCHANGE:
            return Exchange(seat.shards, plan.layout, seat.pool, plan.name)
        return None

    def collect(self, *, now: bool = True) -> None:
        """Move the parameters' gradients into the arena; parameters without one contribute zeros.

        Args:
            now: Whether a reduction follows at once. Then the arena is in the reduce format, else in the accumulate format.
        """
        self.finish()
        params = self._members.params
        grads = {i: grad for i, param in enumerate(params) if (grad := param.grad) is not None}
        with torch.no_grad():
            if now and not self.open and self._direct is not None:
                self._direct.show(_dense(grads), self._dtypes.reduce, self.finish)
                self.open = True
            else:
                self._collect(_dense(grads), now=now)
        for i in grads:
            params[i].grad = None

    def _collect(self, grads: dict[int, Tensor], *, now: bool) -> None:
        fresh = not self.open
        if fresh:
            self._open(self._dtypes.reduce if now else self._dtypes.accumulate)
        elif self.arena is not None and self.arena.dtype != self._dtypes.accumulate:
            self._recast(self.arena, self._dtypes.accumulate)
        views = self._views
        if fresh:
            for i in set(range(len(views))).difference(grads):
                views[i].zero_()
        if grads:
            (foreach_copy if fresh else foreach_add)([views[i] for i in grads], list(grads.values()))

    def reduce(self) -> None:
        """Start to sum the arena over the ranks and add this rank's shard of the sum to `sums`. Sends (N-1)/N of it."""
        if not self.open:
            self.collect()
        arena = self.arena
        if arena is not None and self.seat.size > 1 and self._travels_narrow(arena):
            arena = self._recast(arena, self._dtypes.reduce)
        if self._direct is not None:
            self._post(self._direct, arena)
            return
        if arena is None:
            raise RuntimeError(f"unit {self._members.plan.name} has no gradient buffer to reduce")
        self._reducing, self.open = self._start(arena), False

    def _start(self, arena: Tensor) -> _Reduction:
        alone = self._layout.world == 1
        fits = self.sums is None and arena.dtype == self._dtypes.accumulate
        # A sum that is also one of its terms would need memory for the term that comes.
        in_place = fits and alone
        if in_place:
            out = arena[: self._layout.shard_numel]
        else:
            out = self._take_spare(0) if fits else self._take_flat(arena.dtype)
        name, works = self._members.plan.name, []
        for segment in self._layout.segments:
            inp = arena[segment.start : segment.start + segment.chunk * self._layout.world]
            mine = out[segment.at : segment.at + segment.chunk]
            works.append(self._scatter(mine, inp, segment.at))
        if alone and self.rows is not None:
            works += self.rows.start(out, self.seat.replicas)
        elif alone:
            works.append(comm.all_reduce(out, group=self.seat.replicas, async_op=True, unit=name))
        return _Reduction(works, [out], None if fits else out, keeps=alone, in_place=in_place)

    def _scatter(self, mine: Tensor, inp: Tensor, at: int) -> comm.Work:
        name = self._members.plan.name
        if self._codes is None:
            return comm.reduce_scatter_single(mine, inp, group=self.seat.shards, async_op=True, unit=name)
        # Errors are kept by this name.
        unit = name if len(self._layout.segments) == 1 else f"{name}.{at}"
        return self._codes.reduce_scatter_single(mine, inp, group=self.seat.shards, async_op=True, unit=unit)

    def rescale(self, factor: float) -> None:
        """The next gradients are so many times as large; 0: nothing is known of them. So are errors that they correct."""
        if self._errors is None:
            return
        if factor:
            self._errors.rescale(factor)
        else:
            self._errors.clear()

    def _travels_narrow(self, arena: Tensor) -> bool:
        # Gradients that added up wide travel as they are, unless a format narrower than the parameters' was asked for.
        return self._dtypes.reduce.itemsize < min(arena.dtype.itemsize, self._dtypes.param.itemsize)

    def _post(self, direct: Posting | Exchange, arena: Tensor | None) -> None:
        if arena is not None:
            direct.show_flat(arena, self.finish)
        direct.post()
        self.open, dtype = False, direct.dtype
        if self.sums is not None or dtype != self._dtypes.accumulate:
            flat = self._take_flat(dtype)
            outs = [flat[start:stop] for start, stop in self.ranges]
            self._reducing = _Reduction([], outs, flat, keeps=False, in_place=False)
            return
        kept = [direct.kept(run) for run in direct.plan.runs] if self._in_place else [None]
        outs = [self._take_spare(i) if found is None else found for i, found in enumerate(kept)]
        self._reducing = _Reduction([], outs, None, keeps=False, in_place=False)

    def finish(self) -> None:
        """Wait for `reduce`: `sums` is valid afterwards."""
        going, self._reducing = self._reducing, None
        if going is None:
            return
        for work in going.works:
            work.wait()
        square = None if self._direct is None else self._pull(self._direct, going.outs)
        if self._layout.world > 1 and self.seat.replicas.size > 1:
            for out in going.outs:
                comm.all_reduce(out, group=self.seat.replicas, unit=self._members.plan.name)
            square = None
        if going.flat is not None:
            self._add(going.outs)
            self.seat.pool.give(going.flat)
            square = None
        else:
            self.sums, self._sums_in_arena = going.outs, going.in_place
        self._square = None if square is None else (square, self._version)
        if not going.keeps:
            self._give_arena()

    def _pull(self, direct: Posting | Exchange, outs: list[Tensor]) -> float:
        if not self._in_place:
            outs = [outs[0][run.start : run.stop] for run in direct.plan.runs]
        return direct.pull(outs)

    def _add(self, outs: Sequence[Tensor]) -> None:
        if self.sums is None:
            self.sums = [self._take_spare(i).copy_(out) for i, out in enumerate(outs)]
            return
        for held, more in zip(self.sums, outs, strict=True):
            held.add_(more)

    def own(self, member: int) -> Tensor | None:
        """What this rank has collected for a member and not reduced yet; None where nothing waits, or sums are there, too."""
        if not self.open or self.sums is not None:
            return None
        return self._members.params[member].grad if self.arena is None else self._views[member]

    def view(self, start: int, stop: int) -> Tensor | None:
        """Elements [start, stop) of the shard of the sum, which lie in one range; None while there is none."""
        if self.sums is None:
            return None
        number = bisect_right(self.ranges, start, key=itemgetter(0)) - 1
        first, last = self.ranges[number]
        if start == first and stop == last:
            return self.sums[number]
        return self.sums[number][start - first : stop - first]

    @property
    def _version(self) -> int:
        return sum(held._version for held in self.sums or ())

    @property
    def square(self) -> float | None:
        """Sum of squares of `sums`, if the pass that made them told, and nobody has written them since."""
        if self.sums is None or self._square is None or self._version != self._square[1]:
            return None
        return self._square[0]

    def clear(self) -> None:
        """Forget every gradient, reduced or not."""
        self.finish()
        self.sums, self.open, self._sums_in_arena = None, False, False
        for param in self._members.params:
            param.grad = None
        if self._layout.world > 1:  # else it held the sums until now, so no other unit could have used it
            self._give_arena()
        if self._direct is not None:
            self._direct.drop()

    def drop_idle(self) -> int:
        """Give back buffers that hold nothing. Returns the bytes that were not the pool's."""
        if not self.open and not self._sums_in_arena:
            self._give_arena()
        if self.sums is not None:
            return 0
        freed, self._spares = self.shard_bytes, [None] * len(self.ranges)
        return freed - self.shard_bytes

    @property
    def tensors(self) -> list[Tensor]:
        """What holds gradients now."""
        return [*(self.sums or ()), *([] if self.arena is None else [self.arena])]

    @property
    def full_bytes(self) -> int:
        """Of the arena, or of what is sent and received in its stead."""
        passing = self._direct.nbytes if isinstance(self._direct, Exchange) else 0
        return passing if self.arena is None else self.arena.nbytes

    @property
    def shard_bytes(self) -> int:
        """Of memory of its own for sums, in use or not, and for errors of codes."""
        errors = 0 if self._errors is None else self._errors.nbytes
        return errors + sum(spare.nbytes for spare in self._spares if spare is not None)

    def _open(self, dtype: torch.dtype) -> None:
        if self._sums_in_arena and self.sums is not None:
            self.sums = [self._take_spare(0).copy_(self.sums[0])]  # the arena is about to be written
            self._sums_in_arena = False
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

    def _take_flat(self, dtype: torch.dtype) -> Tensor:
        return self.seat.pool.take(self._layout.shard_numel, dtype, self._members.device)

    def _take_spare(self, number: int) -> Tensor:
        """Memory of its own for the sum of a range."""
        spare, dtype = self._spares[number], self._dtypes.accumulate
        if spare is None:
            start, stop = self.ranges[number]
            spare = torch.empty(stop - start, dtype=dtype, device=self._members.device)
        self._spares[number] = spare
        return spare


@dataclass(frozen=True, slots=True)
class _Reduction:
    """One under way.

    Attributes:
        outs: Where the sums come, one tensor a range.
        flat: What all of `outs` are cut from, if they are to be added to sums that are there, or cast.
        keeps: The arena stays with the unit.
        in_place: `outs` is the arena.
    """

    works: list[comm.Work]
    outs: list[Tensor]
    flat: Tensor | None
    keeps: bool
    in_place: bool


def _dense(grads: dict[int, Tensor]) -> dict[int, Tensor]:
    return {i: grad if grad.layout is torch.strided else grad.to_dense() for i, grad in grads.items()}
