"""Gathers where ranks are grouped in nodes: what links inside a node can carry does not go between nodes.

A *node* is `size` neighbouring ranks of those that share one copy of the sharded state. The group *inside* has the ranks of this node,
*across* those with this rank's place in every node. Two ways, which go together:

    two steps   Each rank first gathers its place's chunks across, then all of them inside. Every byte enters a node once.
                Reference: Zhang et al. 2022, "MiCS", section 3.3.
    secondary   What a gather brought is kept in pieces inside the node, 1/size of it a rank, until the next update. Until then
                gathers stay inside the node. Reference: Wang et al. 2023, "ZeRO++", section 3.2 (hpZ).

Note "order of second steps". A second step starts after its first has ended, and starts must have one order on all ranks. So second
steps queue: one starts when it, or anything gathered after it, is needed or started. A rank that waits for something else meanwhile
must push the queue (`Route.push`), because others may wait for its part.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

import ds_comm as comm
from ds_comm import Group, part_group
from ds_config.errors import PlanError
from ds_zero.layout.elements import UnitLayout
from ds_zero.runtime.memory import Pool

__all__ = ["Nodes", "Route", "Secondary", "node_groups", "split_nodes"]

_log = logging.getLogger("ds_zero")


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where ranks are close to each other, and what is made of it. At stage 3.

    Attributes:
        size: Neighbouring ranks of a node.
        two_steps: Gather across nodes first, then inside.
        secondary: Keep what was gathered inside the node until the next update: 1/size of the parameters on each rank.
    """

    size: int
    two_steps: bool = False
    secondary: bool = False


class Route:
    """The way gathers of one model take between nodes. All ranks make the same calls in the same order.

    Attributes:
        nodes: What was asked for.
        inside, across: See the module's docstring.
    """

    def __init__(self, nodes: Nodes, inside: Group, across: Group, pool: Pool) -> None:
        self.nodes, self.inside, self.across = nodes, inside, across
        self._pool = pool
        self._line: deque[_Trip] = deque()

    def gather(self, out: Tensor, mine: Tensor, unit: str) -> comm.Work:
        """Start `all_gather_single(out, mine)` in two steps.

        Args:
            out: [ranks * n].
            mine: [n], of the same dtype.
        Cost: (nodes-1) n elements over the links between nodes, (size-1) nodes n inside; a buffer of nodes n meanwhile.
        """
        self.push()
        staged = self._pool.take(self.across.size * mine.numel(), mine.dtype, mine.device)
        first = comm.all_gather_single(staged, mine, self.across, async_op=True, unit=unit)
        trip = _Trip(self, out, staged, first, unit)
        self._line.append(trip)
        return trip

    def gather_inside(self, out: Tensor, mine: Tensor, unit: str) -> comm.Work:
        """Start to put together `out` [size * n] from the pieces [n] of this node's ranks."""
        self.push()
        return comm.all_gather_single(out, mine, self.inside, async_op=True, unit=unit)

    def push(self, last: comm.Work | None = None) -> None:
        """Start the second steps that wait in line, in order; up to that of `last`, by default all."""
        while self._line:
            trip = self._line.popleft()
            trip.go_inside()
            if trip is last:
                return

    def waits(self, work: comm.Work) -> bool:
        """Whether the second step of a gather has not started."""
        return any(trip is work for trip in self._line)

    def give(self, buffer: Tensor) -> None:
        """A trip is over."""
        self._pool.give(buffer)


class _Trip:
    """One gather in two steps."""

    def __init__(self, route: Route, out: Tensor, staged: Tensor, first: comm.Work, unit: str) -> None:
        self._route, self._out, self._staged, self._first, self._unit = route, out, staged, first, unit
        self._second: list[comm.Work] = []
        self._over = False

    def go_inside(self) -> None:
        """The second step: for each node its ranks' chunks, which lie side by side in `out`."""
        self._first.wait()
        chunk = self._staged.numel() // self._route.across.size
        row = chunk * self._route.inside.size
        for node in range(self._route.across.size):
            out, mine = self._out[node * row :][:row], self._staged[node * chunk :][:chunk]
            self._second.append(comm.all_gather_single(out, mine, self._route.inside, async_op=True, unit=self._unit))

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


class Secondary:
    """This rank's piece of the copy of one unit that its node keeps between updates.

    Attributes:
        valid: Whether the piece is what the shards hold. Cleared, on all ranks alike, by whoever writes the shards.
    """

    def __init__(self, route: Route, layout: UnitLayout, unit: str) -> None:
        self.valid = False
        self._route, self._layout, self._unit = route, layout, unit
        self._piece: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return 0 if self._piece is None else self._piece.nbytes

    def gather(self, full: Tensor) -> list[comm.Work]:
        """Start to fill the full buffer from the pieces of this node's ranks."""
        if self._piece is None:
            raise RuntimeError(f"unit {self._unit} has no secondary copy to gather from")
        works, at = [], 0
        for start, numel in self._segments():
            own = numel // self._route.nodes.size
            works.append(self._route.gather_inside(full[start : start + numel], self._piece[at : at + own], self._unit))
            at += own
        return works

    def keep(self, full: Tensor) -> None:
        """The full buffer was gathered from everywhere: copy this rank's piece of it. Nothing happens where that is valid."""
        if self.valid:
            return
        if self._piece is None:
            self._piece = torch.empty(
                self._layout.numel // self._route.nodes.size, dtype=full.dtype, device=full.device
            )
        at = 0
        with torch.no_grad():
            for start, numel in self._segments():
                own = numel // self._route.nodes.size
                self._piece[at : at + own].copy_(full[start + self._route.inside.rank * own :][:own])
                at += own
        self.valid = True

    def drop(self) -> int:
        """Give the memory back; returns its bytes."""
        freed, self._piece, self.valid = self.nbytes, None, False
        return freed

    def _segments(self) -> list[tuple[int, int]]:
        # Start and length in the full buffer.
        return [(segment.start, segment.chunk * self._layout.world) for segment in self._layout.segments]


def split_nodes(nodes: Nodes | None, shards: Group, pool: Pool) -> Route | None:
    """The groups for `nodes` among the ranks of `shards`; None where all of them are in one node. Collective over `shards`."""
    if nodes is None:
        return None
    if nodes.size >= shards.size or nodes.size == 1:
        _log.info("zero: %d ranks in nodes of %d: gathers need no second level", shards.size, nodes.size)
        return None
    return Route(nodes, *node_groups(shards, nodes.size, ("node", "across")), pool)


def node_groups(shards: Group, size: int, names: tuple[str, str]) -> tuple[Group, Group]:
    """The ranks of this rank's node, and those with its place in every node. Collective over `shards`.

    Raises:
        PlanError: the size does not divide the ranks ("zero-nodes").
    """
    if size < 1 or shards.size % size:
        raise PlanError(
            f"{shards.size} ranks that share the sharded state are not in nodes of {size}",
            code="zero-nodes",
            fix=f"Use a divisor of {shards.size} above 1, or leave it out.",
        )
    node, place = divmod(shards.rank, size)
    inside = part_group(shards.ranks[node * size : (node + 1) * size], names[0])
    return inside, part_group(shards.ranks[place::size], names[1])
