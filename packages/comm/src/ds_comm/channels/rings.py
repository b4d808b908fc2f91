"""How the two ends of a ring find each other: the sender makes the memory with its first message and leaves a note of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ds_comm._torch import second_connection
from ds_comm.call import CollectiveCall
from ds_comm.channels.shm_ring import End, RingLayout, RingReceiver, RingSender, plan_ring
from ds_comm.channels.signature import MessageSignature
from ds_comm.groups import Group
from ds_comm.node_topology import Neighbour
from ds_comm.watch.recorder import current
from ds_comm.work import Work, failed
from ds_ops.shm_collectives import SharedSegment

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Rings"]

_POLL_S = 0.001


class Rings:
    """The rings of this rank. What is still to be sent on any of them is known to all."""

    def __init__(self, group: Group, neighbours: Sequence[Neighbour], depth: int, timeout_s: float) -> None:
        self.group, self.depth, self.timeout_s = group, depth, timeout_s
        self._neighbours = neighbours
        self._sending: list[RingSender] = []
        order = group.order
        self._number = 0 if order is None else order.mark  # the same on all ranks, another one for the next Rings
        # Opened while all ranks are there: to connect later to a host that has ended takes as long as a rendezvous may, out of sight of any watchdog.
        near = any(neighbours[group.rank].shares(other) for rank, other in enumerate(neighbours) if rank != group.rank)
        self._store: Store | None = second_connection(group.link) if near and group.link is not None else None
        self.segments: list[SharedSegment] = []

    def sender(self, to: int, tag: int, unit: str) -> _LateSender:
        """Return the sending end of a ring to rank `to`."""
        return _LateSender(self, self._end("send", to, unit), tag)

    def receiver(self, source: int, tag: int, unit: str) -> _LateReceiver:
        """Return the receiving end of a ring that rank `source` fills."""
        return _LateReceiver(self, self._end("recv", source, unit), tag)

    def pids(self, sender: int, receiver: int) -> tuple[int, int]:
        """Process ids of two ranks of the group."""
        return self._neighbours[sender].pid, self._neighbours[receiver].pid

    def note(self, sender: int, receiver: int, tag: int) -> str:
        """Return the store key under which the sender of a channel publishes its memory."""
        return f"channel/{self._number}/{sender}/{receiver}/{tag}"

    @property
    def store(self) -> Store:
        """The group's store; a connection of our own."""
        if self._store is None:
            raise RuntimeError(f"{self.group} has no other rank on this host: it has no rings")
        return self._store

    def close(self) -> None:
        """Give the descriptors back. The memory goes with the last that has it mapped."""
        for segment in self.segments:
            segment.close()
        self.segments.clear()

    def _end(self, op: str, peer: int, unit: str) -> End:
        return End(CollectiveCall(op, self.group, unit), peer, self.timeout_s, self._sending)


class _LateSender:
    """Opens with the first message, whose size says how much memory is right."""

    def __init__(self, rings: Rings, end: End, tag: int) -> None:
        self._rings, self._end, self._tag = rings, end, tag
        self._open: RingSender | None = None

    def send(self, tensors: Sequence[Tensor]) -> Work:
        """Send the tensors as `Sender.send` does, opening the ring at the first message."""
        if self._open is None:
            self._open = self._make(MessageSignature(MessageSignature.key(tensors)).nbytes)
        return self._open.send(tensors)

    def _make(self, nbytes: int) -> RingSender:
        rings, rank, peer = self._rings, self._rings.group.rank, self._end.peer
        plan = plan_ring(nbytes, rings.depth)
        segment = SharedSegment(plan.nbytes)
        rings.segments.append(segment)  # open for as long as the other may still come
        sender = RingSender(segment, plan, rings.pids(rank, peer), self._end)
        try:
            rings.store.set(rings.note(rank, peer, self._tag), json.dumps([segment.token, plan.cells, plan.cell_bytes]))
        except RuntimeError as error:  # the rank that serves the store has ended
            slot = self._end.begin(None)
            finding = current().explain(slot)
            current().ended(slot)
            raise failed(self._end.call, finding, error) from None
        return sender


class _LateReceiver:
    """Opens when the sender has sent something."""

    def __init__(self, rings: Rings, end: End, tag: int) -> None:
        self._rings, self._end, self._tag = rings, end, tag
        self._open: RingReceiver | None = None

    def post(self) -> None:
        """Do nothing: a ring needs no preparation for the next message."""

    def ready(self) -> bool:
        """Whether something came."""
        return (self._open is not None or self._rings.store.check([self._note])) and self._opened().ready()

    def take(self) -> tuple[Tensor, ...]:
        """Wait for the next message and return its tensors in host memory, opening the ring first if needed."""
        return (self._open or self._opened()).take()

    @property
    def signature(self) -> MessageSignature | None:
        """The signature of the last message that was taken."""
        return None if self._open is None else self._open.signature

    @property
    def _note(self) -> str:
        return self._rings.note(self._end.peer, self._rings.group.rank, self._tag)

    def _opened(self) -> RingReceiver:
        if self._open is None:
            rings, store, note = self._rings, self._rings.store, self._note
            slot = self._end.begin(None)

            def nap() -> bool:
                time.sleep(_POLL_S)
                return bool(store.check([note]))

            self._end.wait_for(lambda: bool(store.check([note])), nap, slot)
            current().ended(slot)
            token, cells, cell_bytes = json.loads(store.get(note))
            plan = RingLayout(int(cells), int(cell_bytes))
            segment = SharedSegment.attach(token, plan.nbytes)
            self._open = RingReceiver(segment, plan, rings.pids(self._end.peer, rings.group.rank), self._end)
            segment.close()
        return self._open
