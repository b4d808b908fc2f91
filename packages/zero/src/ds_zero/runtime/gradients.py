"""The gradients of one unit, from the tensors that autograd makes to this rank's shard of their sum.

Others say when gradients have arrived and when they are to be summed:

    collect   move the parameters' gradients into the unit's flat buffer
    reduce    sum that buffer over the ranks, leave this rank's shard of it
    finish    wait for that
    clear     forget all of it

*arena* is the flat buffer, as long as the unit; it is *open* while it holds gradients that were not reduced. *sums* are the reduced
gradients (not yet averaged), together as long as the unit's shard, in one tensor for each of *ranges*. The unit's `GradReducer` makes them out
of the arena; those of `reduce_strategies.py` out of the tensors that autograd made; then there are several ranges, else one.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

import ds_comm as comm
from ds_accel import streams
from ds_comm import Group, Work
from ds_ops.stream import total_squares
from ds_zero._torch import foreach_add, foreach_copy, without_torch_function
from ds_zero.layout.elements import UnitLayout
from ds_zero.offload.host_gradients import HostGradients
from ds_zero.planning.unit_plan import UnitPlan
from ds_zero.runtime.unit_groups import GroupSet

__all__ = ["BucketMessage", "GradReducer", "Gradients", "Pieces"]

_POLL_S = 5e-5

Pieces = Sequence[Sequence[Tensor]]
"""For each rank the tensors that go to it, or come from it; contiguous."""


class BucketMessage(Protocol):
    """One message of several units, which is sent when all of them have given theirs. What both return is waited for by their unit."""

    def sum(self, arena: Tensor, out: Tensor, layout: UnitLayout, name: str) -> Work:
        """Sum `arena` [numel] over the ranks, and put this rank's shard of the sum into `out`, which may be a range of it."""

    def exchange(self, arriving: Pieces, leaving: Pieces, name: str) -> Work:
        """Send pieces to the other ranks, and receive theirs. Both sides know all sizes."""


class GradReducer:
    """Sums an arena by a collective; the interface of all ways. All ranks make the same calls in the same order.

    Attributes:
        ranges: (start, stop) in the shard, one after the other, from 0 to its end: a sum is one tensor for each. No piece of a
            parameter lies in two of them.
        adds_in_place: Whether sums that are added to others, or widened, may lie in the memory of their terms until then.
    """

    adds_in_place = True

    def __init__(self, plan: UnitPlan, group_set: GroupSet) -> None:
        self.name, self.layout = plan.name, plan.layout
        self.ranges: tuple[tuple[int, int], ...] = ((0, plan.layout.shard_numel),)
        self._codes, self._errors = plan.wire.sums(group_set.levels)
        self._arena: Tensor | None = None
        self._works: list[Work] = []
        self._joint: BucketMessage | None = None

    @property
    def joins(self) -> bool:
        """Whether its message may be one with those of other units."""
        return self._codes is None

    def join(self, joint: BucketMessage) -> None:
        """Make the next reduction add its message to the bucket `joint`, which is sent later."""
        self._joint = joint

    def take(self, grads: Mapping[int, Tensor], dtype: torch.dtype, finish: Callable[[], None]) -> bool:
        """Take gradients by number of the parameter as they are; False: they have to be in an arena.

        Args:
            finish: Finishes this reduction on this rank.
        """
        del grads, dtype, finish
        return False

    def begin(self, arena: Tensor | None, finish: Callable[[], None]) -> torch.dtype:
        """Publish this rank's gradients: the bucket, or gradients taken without a bucket. Returns the sum's dtype."""
        del finish
        if arena is None:
            raise RuntimeError(f"unit {self.name} has no gradient buffer to reduce")
        self._arena = arena
        return arena.dtype

    def in_place_sums(self) -> Sequence[Tensor | None]:
        """Return for each range the memory where its sum may replace its terms; None: separate memory."""
        # A sum that is also one of its terms would need memory for the term that comes.
        alone = self.layout.world == 1 and self._arena is not None
        return [self._arena[: self.layout.shard_numel] if alone and self._arena is not None else None]

    def start(self, outs: Sequence[Tensor], group_set: GroupSet) -> None:
        """Start to sum into `outs`, one tensor a range."""
        (out,), arena, layout = outs, self._arena, self.layout
        joint, self._joint = self._joint, None
        if joint is not None and arena is not None:
            self._works.append(joint.sum(arena, out, layout, self.name))
            return
        for segment, (start, stop) in zip(layout.segments, layout.spans, strict=True):
            if arena is not None:
                shard = out[segment.at : segment.at + segment.chunk]
                self._works.append(self._scatter(shard, arena[start:stop], group_set, segment.at))
        if layout.world == 1:
            self._works += self._sum_whole(out, group_set.replicate_group)

    def _scatter(self, out: Tensor, inp: Tensor, group_set: GroupSet, at: int) -> Work:
        if self._codes is None:
            return comm.reduce_scatter_single(out, inp, group=group_set.shard_group, async_op=True, unit=self.name)
        # Errors are kept by this name.
        unit = self.name if len(self.layout.segments) == 1 else f"{self.name}.{at}"
        return self._codes.reduce_scatter_single(out, inp, group=group_set.shard_group, async_op=True, unit=unit)

    def _sum_whole(self, flat: Tensor, group: Group) -> list[Work]:
        """Start to sum a whole unit in place."""
        return [comm.all_reduce(flat, group=group, async_op=True, unit=self.name)]

    def finish(self, outs: Sequence[Tensor]) -> Tensor | None:
        """Wait until `outs` are the sums. Returns the norms of each (`ds_ops.stream.norms_of`) where they cost no pass of their own."""
        del outs
        for work in self._works:
            work.wait()
        self._works.clear()
        self._arena = None
        return None

    def is_completed(self) -> bool:
        """Whether what `start` began is over, which `finish` would wait for."""
        return all(work.is_completed() for work in self._works)

    def drop(self) -> None:
        """Forget what was taken and not summed."""

    def rescale(self, factor: float) -> None:
        """Scale the error feedback by `factor`, as the next gradients are scaled; 0 clears the errors."""
        if self._errors is not None and factor:
            self._errors.rescale(factor)
        elif self._errors is not None:
            self._errors.clear()

    @property
    def full_bytes(self) -> int:
        """Held instead of an arena."""
        return 0

    @property
    def error_bytes(self) -> int:
        """Held for errors of codes."""
        return 0 if self._errors is None else self._errors.nbytes


class Gradients:
    """See the module's docstring. Made on all ranks of the group set alike; `reduce` and `finish` are called on all of them.

    Attributes:
        ranges: Those of its way.
        sums: This rank's shard of the sum over ranks, a flat tensor a range, accumulate format; None before the first `reduce`.
        arena: The flat buffer, [numel]; None while there is none.
        open: Whether gradients were collected that were not reduced.
        way: How they are summed.
        group_set: Over which ranks they are summed.
        applied: What `sums` were multiplied by since they were summed: they are `applied` times the sum over ranks.
        changing: Called before `sums` change: more is collected, or all of it is forgotten; None: nobody watches.
        summed: Called when a reduction is over. Both are called by the thread that does it.
        host: Where sums go at once; None: they stay on the device.
        measure: Called before sums leave the device, while `view` shows them there; the result is `measured` until they change.
    """

    def __init__(
        self, plan: UnitPlan, params: Sequence[Parameter], device: torch.device, group_set: GroupSet, way: GradReducer
    ) -> None:
        self.groups, self.way, self.ranges = group_set, way, way.ranges
        self.host: HostGradients | None = None
        self.measure: Callable[[], Tensor] | None = None
        self._measured: tuple[Tensor, int] | None = None
        self._sums: list[Tensor] | None = None
        self.arena: Tensor | None = None
        self.open, self.applied = False, 1.0
        self._params, self._device, self._name = params, device, plan.name
        self._layout, self._dtypes = plan.layout, plan.dtypes
        self._views: list[Tensor] = []
        self._gaps = self._layout.gaps
        self._sums_in_arena = False
        # Where sums come; what these are cut from, if not kept; whether they are added to others, or widened.
        self._reducing: tuple[list[Tensor], Tensor | None, bool] | None = None
        self._square: tuple[Tensor, int] | None = None  # of sums that have left
        self._norms: tuple[Tensor, int] | None = None
        self.changing: Callable[[], None] | None = None
        self.summed: Callable[[], None] | None = None
        self._spares: list[Tensor | None] = [None] * len(self.ranges)

    @property
    def joins(self) -> bool:
        """Whether it may be reduced with others, see `GradientReductions.sum_together`."""
        return self.way.joins and self.groups.size > 1

    def collect(self, *, now: bool = True, waits: bool = False) -> None:
        """Move the parameters' gradients into the arena; parameters without one contribute zeros.

        Args:
            now: Whether to use the reduce format for the arena, else the accumulate format.
            waits: Whether the reduction may be that of a later backward, so that autograd's own memory is not kept for it.
        """
        self._finish()
        self.change()
        params = self._params
        grads = {i: grad for i, param in enumerate(params) if (grad := param.grad) is not None}
        with torch.no_grad():
            for i in [i for i, grad in grads.items() if grad.layout is not torch.strided]:
                grads[i] = grads[i].to_dense()
            if now and not waits and not self.open and self.way.take(grads, self._dtypes.reduce, self.finish):
                self.open = True
            else:
                self._collect(grads, now=now)
        for i in grads:
            params[i].grad = None

    def _collect(self, grads: dict[int, Tensor], *, now: bool) -> None:
        fresh = not self.open
        if fresh:
            self._open(self._dtypes.reduce if now else self._dtypes.accumulate)
        elif not now and self.arena is not None and self.arena.dtype != self._dtypes.accumulate:
            self._recast(self.arena, self._dtypes.accumulate)
        views = self._views
        if fresh:
            for i in set(range(len(views))).difference(grads):
                views[i].zero_()
        if grads:
            (foreach_copy if fresh else foreach_add)([views[i] for i in grads], list(grads.values()))

    def change(self) -> None:
        """Tell who watches, if anybody does, that `sums` change now."""
        if self.changing is not None:
            self.changing()

    def reduce(self) -> None:
        """Start to sum the arena over the ranks and add this rank's shard of the sum to `sums`. Sends (N-1)/N of it."""
        if not self.open:
            self.collect()
        arena, dtypes = self.arena, self._dtypes
        # Gradients that added up wide travel as they are, unless a format narrower than the parameters' was asked for.
        if (
            arena is not None
            and self.groups.size > 1
            and dtypes.reduce.itemsize < min(arena.itemsize, dtypes.param.itemsize)
        ):
            arena = self._recast(arena, dtypes.reduce)
        dtype, flat = self.way.begin(arena, self.finish), None
        in_place = self.way.in_place_sums()
        adds = self.host is None and (self._sums is not None or dtype != self._dtypes.accumulate)
        if self.host is not None and all(place is not None for place in in_place):
            outs = [place for place in in_place if place is not None]
        elif self.host is None and not adds:
            outs = [self._take_spare(i) if place is None else place for i, place in enumerate(in_place)]
        elif adds and self.way.adds_in_place and any(place is not None for place in in_place):
            numels = [stop - start for start, stop in self.ranges]
            outs = [
                torch.empty(numel, dtype=dtype, device=self._device) if place is None else place
                for numel, place in zip(numels, in_place, strict=True)
            ]
        else:
            flat = self.groups.pool.take(self._layout.shard_numel, dtype, self._device)
            outs = [flat[start:stop] for start, stop in self.ranges]
        self.way.start(outs, self.groups)
        self._reducing, self.open = (outs, flat, adds), False

    def finish(self) -> None:
        """Wait for `reduce`: `sums` is valid afterwards."""
        if self._finish() and self.summed is not None:
            self.summed()

    def wait_on_host(self) -> None:
        """Let this thread wait until `reduce` is over, where `finish` lets only the current stream of a device wait."""
        if self._reducing is None or not streams.is_device_memory(self._reducing[0][0]):
            return
        if self.groups.shard_group.backend(self._device.type) == "gloo":
            return  # its works block this thread, and some are over only then
        while not self.way.is_completed():
            time.sleep(_POLL_S)

    def _finish(self) -> bool:
        """Whether there was anything to wait for."""
        going, self._reducing = self._reducing, None
        if going is None:
            return False
        outs, flat, adds = going
        norms = self.way.finish(outs)
        if self._layout.world > 1 and self.groups.replicate_group.size > 1:
            for out in outs:
                comm.all_reduce(out, group=self.groups.replicate_group, unit=self._name)
            norms = None
        if self.host is not None:
            self._leave(self.host, outs, flat)
            return True
        if adds:
            self._add(outs)
            norms = None
        else:
            alone = self._layout.world == 1 and self.arena is not None
            self._sums, self._sums_in_arena, self.applied = outs, alone, 1.0
        if flat is not None:
            self.groups.pool.give(flat)
        self._norms = None if norms is None else (norms, self.version)
        if self._layout.world > 1 or adds:
            self._give_arena()
        return True

    def _leave(self, host: HostGradients, outs: Sequence[Tensor], flat: Tensor | None) -> None:
        """Send sums, valid on the current stream, to the host, and give their memory on the device back."""
        square: Tensor | None = None
        measured = None
        if not host.filled:
            self._sums, self.applied = list(outs), 1.0
            square = total_squares([torch.view_as_real(out) if out.is_complex() else out for out in outs])
            measured = None if self.measure is None else self.measure()
            self._sums = None
        host.receive(outs, self.applied)
        self._square = None if square is None else (square, self.version)
        self._measured = None if measured is None else (measured, self.version)
        if flat is not None:
            self.groups.pool.give(flat)
        self._give_arena()

    def _add(self, outs: Sequence[Tensor]) -> None:
        if self._sums is None:
            self._sums, self.applied = [self._take_spare(i) for i in range(len(outs))], 1.0
            foreach_copy(self._sums, list(outs))
            return
        for total, more in zip(self._sums, outs, strict=True):
            total.add_(more, alpha=self.applied)

    @property
    def sums(self) -> list[Tensor] | None:
        """This rank's shard of the sum over ranks; see the class. Waits for what is on its way to the host."""
        return self._sums if self.host is None or not self.host.filled else self.host.wide()

    @property
    def has_sums(self) -> bool:
        """Whether there are sums. Waits for nothing."""
        return self._sums is not None or self.leaves

    @property
    def leaves(self) -> bool:
        """Whether the sums are on the host, or on their way there."""
        return self.host is not None and self.host.filled

    @property
    def measured(self) -> Tensor | None:
        """What `measure` returned for the sums, if nobody has written them since."""
        known = self._measured
        return None if known is None or not self.leaves or self.version != known[1] else known[0]

    def scale(self, factor: float) -> None:
        """Multiply `sums` by `factor` in place, and `applied` with them: the gradient that they stand for stays."""
        if factor != 1.0 and (sums := self.sums) is not None:
            for total in sums:
                total.mul_(factor)
            self.applied *= factor

    @property
    def local(self) -> bool:
        """Whether all that was collected lies in the arena and waits for its first sum over the ranks."""
        return self.open and not self.has_sums and self.arena is not None

    def leave_memory(self) -> None:
        """Move `sums`, or what waits in the arena, to memory of its own, and leave the old memory to whoever holds a view of that."""
        old = self.arena
        if self.local and old is not None:
            self._set_arena(old.dtype).copy_(old)
            return
        if self._sums is not None:
            self._spares = [None] * len(self.ranges)
            self._sums = [self._take_spare(i).copy_(total) for i, total in enumerate(self._sums)]
            if self._sums_in_arena:
                self.arena, self._views, self._sums_in_arena = None, [], False

    def local_grad(self, member: int) -> Tensor | None:
        """Return the collected gradient of a member that is not reduced yet; None if reduced or partly summed already."""
        if not self.open or self.has_sums:
            return None
        return self._params[member].grad if self.arena is None else self._views[member]

    def view(self, start: int, stop: int) -> Tensor | None:
        """Return elements [start, stop) of the shard of the sum, which lie in one range; None without a sum."""
        sums = self.sums
        return None if sums is None else self._cut(sums, start, stop)

    def cut(self, pieces: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return elements [start, stop) of the shard of the sum for each of pieces, which are sorted; each lies in one range."""
        sums = self.sums
        if sums is None:
            raise RuntimeError(f"unit {self._name} has no sums to cut")
        return [self._cut(sums, start, stop) for start, stop in pieces]

    def narrow_view(self, start: int, stop: int) -> Tensor:
        """Return `view` of sums on the host, in the format in which they are there: to be read alone."""
        if self.host is None:
            raise RuntimeError(f"the gradients of unit {self._name} stay on the device")
        return self._cut(self.host.narrow(), start, stop)

    def _cut(self, sums: Sequence[Tensor], start: int, stop: int) -> Tensor:
        number = bisect_right(self.ranges, start, key=itemgetter(0)) - 1
        first, last = self.ranges[number]
        if start == first and stop == last:
            return sums[number]
        return sums[number][start - first : stop - first]

    @property
    def version(self) -> int:
        """Another one after every write to `sums`."""
        moved = 0 if self.host is None else self.host.version
        return moved + sum([total._version for total in self._sums or ()])

    @property
    def norms(self) -> Tensor | None:
        """The norms of `sums`, [ranges, 2] as `ds_ops.stream.norms_of`, if the pass that made them told, and nobody has written them since."""
        known = self._norms
        return known[0] if known is not None and self.has_sums and self.version == known[1] else None

    @property
    def square(self) -> float | Tensor | None:
        """Sum of squares of `sums`, if the pass that made them told, and nobody has written them since.

        A tensor is fp64 of one element, valid on the stream of the reduction.
        """
        if (norms := self.norms) is not None:
            return math.fsum(norms[:, 0].tolist())
        known = self._square
        return known[0] if known is not None and self.has_sums and self.version == known[1] else None

    def clear(self) -> None:
        """Forget every gradient, reduced or not."""
        self._finish()
        self.change()
        if self.host is not None:
            self.host.clear()
        self._sums, self.open, self._sums_in_arena, self.applied = None, False, False, 1.0
        self._square = self._measured = self._norms = None
        with without_torch_function():
            for param in self._params:
                if param.grad is not None:
                    param.grad = None
        there = self._device.type != "cpu"
        if self._layout.world > 1 or there:  # else it held the sums until now, so no other unit could have used it
            self._give_arena()
        if there:  # the next forward's activations can have it: torch's allocator keeps memory, too
            self._spares = [None] * len(self.ranges)
        self.way.drop()

    def drop_idle(self) -> int:
        """Give back buffers that hold nothing. Returns the bytes that were not the pool's."""
        if not self.open and not self._sums_in_arena:
            self._give_arena()
        if self._sums is not None:
            return 0
        freed, self._spares = self.shard_bytes, [None] * len(self.ranges)
        return freed - self.shard_bytes

    @property
    def device(self) -> torch.device:
        """Where gradients are summed."""
        return self._device

    @property
    def tensors(self) -> list[Tensor]:
        """What holds gradients on the device now."""
        return [*(self._sums or ()), *([] if self.arena is None else [self.arena])]

    @property
    def full_bytes(self) -> int:
        """Of the arena, or of what is sent and received in its stead."""
        return self.way.full_bytes if self.arena is None else self.arena.nbytes

    @property
    def shard_bytes(self) -> int:
        """Of memory of its own for sums, in use or not, and for errors of codes."""
        return self.way.error_bytes + sum(spare.nbytes for spare in self._spares if spare is not None)

    def _open(self, dtype: torch.dtype) -> None:
        if self._sums_in_arena and self._sums is not None:
            # The arena is about to be written.
            self._sums = [self._take_spare(i).copy_(total) for i, total in enumerate(self._sums)]
            self._sums_in_arena = False
        if self.arena is not None and self.arena.dtype != dtype:
            self._give_arena()
        arena = self._set_arena(dtype) if self.arena is None else self.arena
        for gap in self._gaps:
            arena[gap.start : gap.stop].zero_()
        self.open = True

    def _recast(self, old: Tensor, dtype: torch.dtype) -> Tensor:
        new = self._set_arena(dtype).copy_(old)
        self.groups.pool.give(old)
        return new

    def _set_arena(self, dtype: torch.dtype) -> Tensor:
        self.arena = arena = self.groups.pool.take(self._layout.numel, dtype, self._device)
        self._views = [arena[s.offset : s.offset + s.numel].view(s.shape) for s in self._layout.slots]
        return arena

    def _give_arena(self) -> None:
        if self.arena is not None:
            self.groups.pool.give(self.arena)
        self.arena, self._views = None, []

    def _take_spare(self, number: int) -> Tensor:
        """Return the separate memory for the sum of a range, allocated at first use."""
        spare, dtype = self._spares[number], self._dtypes.accumulate
        if spare is None:
            start, stop = self.ranges[number]
            spare = torch.empty(stop - start, dtype=dtype, device=self._device)
        self._spares[number] = spare
        return spare
