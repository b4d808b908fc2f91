"""Gathers between nodes of ranks in two steps, so that every byte enters a node once.

A *node* is some neighbouring ranks, as many in every one. The group *inside* has the ranks of this node, *across* those with this rank's
place in every node. Each rank first gathers its place's chunks across, then all of them inside. Reference: Zhang et al. 2022, "MiCS",
section 3.3.

Note "order of second steps". A second step starts after its first has ended, and starts must have one order on all ranks. So second
steps queue: one starts when it, or anything gathered after it, is needed or started. A rank that waits for something else meanwhile
must push the queue (`HierarchicalGather.push`), because others may wait for its part.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta

from torch import Tensor

from ds_comm.buffer_pool import BufferPool
from ds_comm.collectives import all_gather_single
from ds_comm.groups import Group
from ds_comm.work import Work

__all__ = ["HierarchicalGather"]


class HierarchicalGather:
    """The way gathers take; see the module's docstring. All ranks make the same calls in the same order.

    Args:
        inside, across: See the module's docstring.
        pool: Where the buffers of first steps come from.
    """

    def __init__(self, inside: Group, across: Group, pool: BufferPool) -> None:
        self.inside, self.across = inside, across
        self._pool = pool
        self._line: deque[_Trip] = deque()

    def gather(self, out: Tensor, inp: Tensor, unit: str) -> Work:
        """Start `all_gather_single(out, inp)` in two steps.

        Args:
            out: [ranks * n].
            inp: [n], of the same dtype.
        Cost: (nodes-1) n elements over the links between nodes, (size-1) nodes n inside; a buffer of nodes n meanwhile.
        """
        self.push()
        staged = self._pool.take(self.across.size * inp.numel(), inp.dtype, inp.device)
        first = all_gather_single(staged, inp, self.across, async_op=True, unit=unit)
        trip = _Trip(self, out, staged, first, unit)
        self._line.append(trip)
        return trip

    def gather_inside(self, out: Tensor, inp: Tensor, unit: str) -> Work:
        """Start to put together `out` [size * n] from the pieces [n] of this node's ranks."""
        self.push()
        return all_gather_single(out, inp, self.inside, async_op=True, unit=unit)

    def push(self, last: Work | None = None) -> None:
        """Start the second steps that wait in line, in order; up to that of `last`, by default all."""
        while self._line:
            trip = self._line.popleft()
            trip.go_inside()
            if trip is last:
                return

    def waits(self, work: Work) -> bool:
        """Whether the second step of a gather has not started."""
        return any(trip is work for trip in self._line)

    def give(self, buffer: Tensor) -> None:
        """Return the staging buffer of a finished gather to the pool."""
        self._pool.give(buffer)


class _Trip:
    """One gather in two steps."""

    def __init__(self, route: HierarchicalGather, out: Tensor, staged: Tensor, first: Work, unit: str) -> None:
        self._route, self._out, self._staged, self._first, self._unit = route, out, staged, first, unit
        self._second: list[Work] = []
        self._over = False

    def go_inside(self) -> None:
        """Start the second step: per node, an all-gather of its ranks' chunks, which are adjacent in `out`."""
        self._first.wait()
        chunk = self._staged.numel() // self._route.across.size
        row = chunk * self._route.inside.size
        for node in range(self._route.across.size):
            out, inp = self._out[node * row :][:row], self._staged[node * chunk :][:chunk]
            self._second.append(all_gather_single(out, inp, self._route.inside, async_op=True, unit=self._unit))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until `out` may be read."""
        if self._over:
            return True
        if self._route.waits(self):
            self._route.push(self)
        for work in self._second:
            work.wait(timeout)
        self._over = True
        self._route.give(self._staged)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return without waiting for another rank."""
        return self._over or (bool(self._second) and all(work.is_completed() for work in self._second))
