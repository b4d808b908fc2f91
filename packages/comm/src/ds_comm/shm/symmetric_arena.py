"""Symmetric arenas: tensors born in memory that the ranks of a host share, so that gathering them is a view.

Words: an *arena* belongs to a group whose ranks are on one host. A *shared* tensor is one piece of memory that every rank
sees; whoever owns a part writes it, and a barrier is all it takes for the others to read it. A *symmetric* tensor exists
once per rank, and every rank sees all of them: a reduce-scatter is one pass that pulls from the peers.

    arena = Arena(group)
    (full,), grads = arena.allocate([Wish(n, torch.float32, shared=True), Wish(n, torch.float32)])
    grads[arena.rank].copy_(...)                         # mine; grads[r] is rank r's
    arena.reduce_scatter(out, grads)                     # out = sum of everyone's part for this rank
    ...                                                  # update full[my part]
    arena.barrier()                                      # the all-gather: everyone's part is new

Memory is a memfd: nothing has a name, nothing outlives the ranks, whoever dies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ds_comm.groups import Group
from ds_comm.metadata import broadcast_json
from ds_comm.node_topology import Neighbour, neighbours
from ds_comm.shm.shm_wait import LIMIT_S, own_order, patient_s
from ds_comm.watch.recorder import current
from ds_comm.work import failed
from ds_config.errors import CommError
from ds_ops.shm_collectives import Channel, ChannelSettings, SharedSegment, ShmReduceOp

__all__ = ["Arena", "TensorRequest", "arena_refusal"]

T = TypeVar("T")

_PAGE = 4096
_LINE = 64
# Tensors of one arena do not start at the same place of a page: streams that alias in the cache cost a fifth of the
# bandwidth (docs/benchmarks/ops.md).
_STAGGER = 1024


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A tensor to allocate: [numel] of dtype, one for all ranks (`shared`) or one per rank."""

    numel: int
    dtype: torch.dtype
    shared: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def arena_refusal(group: Group) -> str:
    """Return why the ranks of `group` cannot share an arena; empty if they can. Collective over the group."""
    return _refusal(group, neighbours(group, unit="arena"))


def _refusal(group: Group, peers: Sequence[Neighbour]) -> str:
    places = [one.place for one in peers]
    if not all(places):
        return f"rank {group.ranks[places.index('')]} has no native module or no memfd"
    if len(set(places)) > 1:
        return f"the ranks are on {len(set(places))} hosts"
    return ""


class Arena:
    """Memory shared by the ranks of `group`. Construction and `allocate` are collective.

    Raises:
        CommError: the ranks cannot share memory ("comm-arena"); ask `arena_refusal` first.
    """

    def __init__(self, group: Group, *, timeout_s: float = LIMIT_S) -> None:
        peers = neighbours(group, unit="arena")
        refusal = _refusal(group, peers)
        if refusal:
            raise CommError(
                f"group {group.name!r} of {group.size} ranks cannot share memory: {refusal}",
                code="comm-arena",
                fix="Use the collectives of ds_comm, which work everywhere.",
            )
        self.group, self.rank, self.size = group, group.rank, group.size
        self.nbytes = 0
        crowded = group.size > len(os.sched_getaffinity(0))
        settings = ChannelSettings(
            _slot_bytes(group.size), _PAGE, spin_us=20 if crowded else 200, timeout_s=patient_s(timeout_s)
        )
        segment = self._segment(settings.segment_bytes(self.size))
        self._channel = Channel(segment, self.rank, [one.pid for one in peers], settings)
        self._order = own_order(group, "arena")
        self.barrier("arena")
        segment.close()

    def allocate(self, wishes: Sequence[TensorRequest]) -> list[tuple[Tensor, ...]]:
        """Allocate zero-filled shared memory: per request (tensor,) if shared, else one tensor per rank of the group.

        All requests of one call share one segment, so request everything at once. Pages take memory when they are first
        written.
        """
        offsets: list[list[int]] = []
        at = 0
        for number, wish in enumerate(wishes):
            places = []
            for _ in range(1 if wish.shared else self.size):
                places.append(at + number % 4 * _STAGGER)
                at += -(-(wish.nbytes + 4 * _STAGGER) // _PAGE) * _PAGE
            offsets.append(places)
        if at == 0:
            return []
        segment = self._segment(at)
        self.nbytes += at
        tensors = [
            tuple(segment.tensor(wish.numel, wish.dtype, place) for place in places)
            for wish, places in zip(wishes, offsets, strict=True)
        ]
        self.barrier("arena")
        segment.close()
        return tensors

    @property
    def channel(self) -> Channel:
        """For native loops that make their own collectives; one at a time, in the same order on every rank.

        Its waits have no end of their own where a watchdog runs: call such a loop by `observe`.
        """
        return self._channel

    def observe(self, op: str, unit: str, call: Callable[[], T]) -> T:
        """Run a native loop over `channel` as one operation that the watchdog sees. The same on every rank.

        Raises:
            CommError: a rank ended, came with something else, or did not come.
        """
        return self._run(op, unit, None, call)

    def barrier(self, unit: str = "") -> None:
        """Return when every rank came: what they wrote before is visible after. About 3 us when all are ready."""
        self._run("barrier", unit, None, self._channel.barrier)

    def reduce_scatter(
        self, out: Tensor, parts: Sequence[Tensor], op: ShmReduceOp = ShmReduceOp.SUM, unit: str = ""
    ) -> None:
        """Reduce this rank's part of all ranks' symmetric tensors into `out`; in rank order, half types in fp32.

        Args:
            out: [n]. May be memory of this rank's part.
            parts: The symmetric tensor, [size * n] each.
        Cost: reads size * n elements, writes n. The peers' tensors may be overwritten after the next barrier.
        """
        pull = partial(self._channel.pull, out, parts, op, first=self.rank * out.numel())
        self._run("reduce_scatter_single", unit, parts[0], pull)

    def all_gather(self, out: Tensor, shared: Tensor, unit: str = "") -> None:
        """Copy the shared tensor into `out`, with every rank's part as written before the last rank's call.

        A caller that can use `shared` directly needs `barrier` only.

        Args:
            out: As many elements as `shared`, contiguous, of its dtype.
        Cost: one copy, past the cache when it is large. The shared tensor may be written again after the next barrier.
        """
        self._run("all_gather_single", unit, shared, lambda: self._channel.fetch(out, shared))

    def close(self) -> None:
        """End the channel. Tensors stay valid as long as they are referenced."""
        self._channel.close()

    def _run(self, op: str, unit: str, tensor: Tensor | None, call: Callable[[], T]) -> T:
        """Run a native call as an operation of the recorder.

        Raises:
            CommError: a rank ended, came with something else, or did not come.
        """
        order = self._order
        if order is None:
            return call()
        order.mark += 1
        recorder = current()
        slot = recorder.begin(order, order.mark, (op, unit, -1), tensor)
        recorder.waiting(slot)
        try:
            return call()
        except CommError as error:
            raise failed(f"{op}[{unit}] in the arena of group {order.name!r}", recorder.explain(slot), error) from None
        finally:
            recorder.ended(slot)

    def _segment(self, nbytes: int) -> SharedSegment:
        owned = SharedSegment(nbytes) if self.rank == 0 else None
        token = broadcast_json(owned.token if owned else "", self.group, unit="arena")
        return owned or SharedSegment.attach(token, nbytes)


def _slot_bytes(ranks: int) -> int:
    """Return the slot bytes of a channel that only serves as a barrier: a cache line per rank, in whole pages."""
    return -(-ranks * _LINE // _PAGE) * _PAGE
