"""A channel in memory that both ranks see: a ring of cells, and one number each that says how far they are.

    counters | who opened it | a head of 64 bytes for each cell | cells

The sender fills a cell when the receiver has freed it, and counts; the receiver copies out what is counted and frees it. A
message takes as many cells as it needs: large ones are copied in and out at the same time, and the ring bounds what is
under way. The first message of a kind comes after cells with its signature.

Numbers: the sender's is the cells it filled; the receiver's those it freed, plus C - 1 of C, which the sender counts for it. So
"both numbers have reached n" is what either waits for: cell n is free, or cell n - 1 is there. A message is in the ring before the receiver opens it, but
not complete: the memory goes with the sender until then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from ds_comm.call import CollectiveCall
from ds_comm.channels.signature import CellPiece, Leaf, MessageSignature
from ds_comm.shm.shm_wait import SLICE_S, wait_until
from ds_comm.watch.recorder import current
from ds_comm.work import DONE, Work
from ds_config.errors import CommError
from ds_ops.shm_collectives import HostCounters, SharedSegment

__all__ = ["End", "RingLayout", "RingReceiver", "RingSender", "plan_ring"]

_HEAD_WORDS = 8  # kind, number of the signature, bytes of the whole message; a cache line
_PAGE = 4096
_CELL_BYTES = 256 << 10  # what a core's cache keeps while the other core copies it out
_CELLS = 8  # at least: the first message of a channel may be a small one, and larger ones follow
_LOOK_S = 20e-6
_DATA, _TEXT = 0, 1


@dataclass(frozen=True, slots=True)
class RingLayout:
    """How the memory of a ring is cut. At least two cells."""

    cells: int
    cell_bytes: int

    @property
    def heads_at(self) -> int:
        return 2 * HostCounters.nbytes_for(2)

    @property
    def cells_at(self) -> int:
        return self.heads_at + -(-self.cells * _HEAD_WORDS * 8 // _PAGE) * _PAGE

    @property
    def nbytes(self) -> int:
        return self.cells_at + self.cells * self.cell_bytes


def plan_ring(message_bytes: int, depth: int) -> RingLayout:
    """Plan a ring for `depth` messages of `message_bytes`, with room for larger messages.

    Unused cells cost nothing: the system allocates memory only where it is touched.
    """
    return RingLayout(max(_CELLS, depth * -(-message_bytes // _CELL_BYTES)), _CELL_BYTES)


@dataclass(eq=False)
class End:
    """Who one end of a channel is, and what it owes.

    Attributes:
        call: Names it in messages: `send` or `recv`, of a group.
        peer: The other rank, within the group.
        limit_s: How long it waits where no watchdog does.
        sending: Senders of this process whose messages did not fit: whoever waits goes on with them, so that two ranks that
            send to each other and do not receive meanwhile cannot wait for each other.
    """

    call: CollectiveCall
    peer: int
    limit_s: float
    sending: list[RingSender] = field(default_factory=list)

    def begin(self, like: Tensor | None) -> int:
        """Stamp an operation of this end."""
        order = self.call.group.order
        if order is None:
            raise RuntimeError(f"{self.call.group} has one rank: it has no channels")
        return current().begin(order, 0, (self.call.op, self.call.unit, self.peer), like)

    def wait(self, ring: _RingEnd, slot: int) -> None:
        """Return when `ring` is ready."""
        self.wait_for(ring.ready, lambda: ring.counters.wait(ring.awaited, SLICE_S) is None, slot)

    def wait_for(self, ready: Callable[[], bool], nap: Callable[[], bool], slot: int) -> None:
        """Return when `ready` says so; `nap` sleeps until it may be so, half a second at most, and says whether it is."""

        def come() -> bool:
            if ready():
                return True
            for sender in list(self.sending):
                sender.drive()
            if self.sending:
                time.sleep(_LOOK_S)
                return ready()
            return nap()

        wait_until(self.call, slot, come, lambda: f"rank {self.call.group.ranks[self.peer]}", self.limit_s)


class _RingEnd:
    """One end's view of the memory. `side`: 0 fills, 1 takes out."""

    def __init__(self, segment: SharedSegment, plan: RingLayout, side: int, pids: Sequence[int]) -> None:
        self.plan, self.awaited = plan, side  # what all numbers must reach for this end to go on
        self.counters = HostCounters(segment, 0, side, pids)
        self.opened = HostCounters(segment, HostCounters.nbytes_for(2), side, pids)
        self.opened.advance()
        self._segment, self._cell = segment, 0
        self._heads = segment.tensor(plan.cells * _HEAD_WORDS, torch.int64, plan.heads_at).numpy().data
        self._bytes = segment.tensor(plan.cells * plan.cell_bytes, torch.uint8, plan.cells_at).view(plan.cells, -1)
        self._views: list[dict[int, list[Tensor]]] = [{} for _ in range(plan.cells)]

    def ready(self) -> bool:
        """Whether this end need not wait for the other: there is a free cell, or a full one."""
        return self.counters.behind(self.awaited) is None

    def step(self) -> None:
        """Advance to the next cell, and publish that this end is done with the present cell."""
        self._cell = (self._cell + 1) % self.plan.cells
        self.awaited += 1
        self.counters.advance()

    def publish(self, kind: int, number: int, nbytes: int) -> None:
        """Write the head of the filled present cell and advance to the next cell."""
        at = self._cell * _HEAD_WORDS
        self._heads[at], self._heads[at + 1], self._heads[at + 2] = kind, number, nbytes
        self.step()

    def head(self) -> tuple[int, int, int]:
        """Return the head of the present cell: kind, signature number, bytes of the message or text."""
        at = self._cell * _HEAD_WORDS
        return self._heads[at], self._heads[at + 1], self._heads[at + 2]

    def cell(self) -> Tensor:
        """Return the present cell as a uint8 tensor."""
        return self._bytes[self._cell]

    def leaves(self, layout: _Layout) -> list[Tensor]:
        """Return views of the present cell as the tensors of a message that fits one cell."""
        views = self._views[self._cell].get(layout.number)
        if views is None:
            at = self.plan.cells_at + self._cell * self.plan.cell_bytes
            views = [
                self._segment.tensor(shape.numel(), dtype, at + start).view(shape)
                for (dtype, shape, _), start in zip(layout.signature.leaves, layout.signature.starts, strict=True)
            ]
            self._views[self._cell][layout.number] = views
        return views


class _Layout:
    """A signature in cells of some size, and the number both ends know it by."""

    __slots__ = ("cells", "number", "signature")

    def __init__(self, number: int, signature: MessageSignature, cell_bytes: int) -> None:
        self.number, self.signature = number, signature
        self.cells: list[list[CellPiece]] = signature.cells(cell_bytes)


class RingSender:
    """The end that fills."""

    def __init__(self, segment: SharedSegment, plan: RingLayout, pids: Sequence[int], end: End) -> None:
        """Open the sending end of a ring, before the other; `pids` are those of the sender and the receiver."""
        self._ring, self._end = _RingEnd(segment, plan, 0, pids), end
        free = HostCounters(segment, 0, 1, pids)  # the receiver's: what is sent before it comes needs no driving
        for _ in range(plan.cells - 1):
            free.advance()
        self._known: dict[tuple[Leaf, ...], _Layout] = {}
        self._under_way: deque[_Sending] = deque()
        self._met = False

    def send(self, tensors: Sequence[Tensor]) -> Work:
        """Send the tensors as `Sender.send` does; the work is complete at once where cells are free."""
        ring, layout = self._ring, self._known.get(MessageSignature.key(tensors))
        if layout is None or len(layout.cells) > 1 or self._under_way or not self._met or not ring.ready():
            slot = self._end.begin(tensors[0] if tensors else None)
            self._under_way.append(sending := _Sending(self, self._fill(tensors), slot))
            if len(self._under_way) == 1:
                self._end.sending.append(self)
            self.drive()
            return DONE if sending.is_completed() else sending
        for view, tensor in zip(ring.leaves(layout), tensors, strict=True):
            view.copy_(tensor.detach() if tensor.requires_grad else tensor)
        ring.publish(_DATA, layout.number, layout.signature.nbytes)
        current().ended(self._end.begin(tensors[0] if tensors else None))  # stamped while the other copies it out
        return DONE

    def drive(self) -> None:
        """Fill the free cells."""
        while self._under_way:
            if not self._under_way[0].advance():
                return
            self._under_way.popleft()
            if not self._under_way:
                self._end.sending.remove(self)

    def met(self) -> bool:
        """Whether the receiver has opened the ring."""
        self._met = self._met or self._ring.opened.behind(1) is None
        return self._met

    def wait(self, slot: int, filled: bool) -> None:
        """Return when a cell is free or, where all is `filled`, when the receiver has opened the ring."""
        if filled:
            opened = self._ring.opened
            self._end.wait_for(self.met, lambda: opened.wait(1, SLICE_S) is None, slot)
        else:
            self._end.wait(self._ring, slot)

    def _fill(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Fill the cells of a message one by one; yields where none is free."""
        ring, key = self._ring, MessageSignature.key(tensors)
        size = ring.plan.cell_bytes
        layout = self._known.get(key)
        if layout is None:
            layout = self._known[key] = _Layout(len(self._known), MessageSignature(key), size)
            text = torch.frombuffer(bytearray(layout.signature.text()), dtype=torch.uint8)
            for part in text.split(size):
                while not ring.ready():
                    yield
                ring.cell()[: len(part)].copy_(part)
                ring.publish(_TEXT, layout.number, len(text))
        flats = [_flat(tensor) for tensor in tensors]
        for pieces in layout.cells:
            while not ring.ready():
                yield
            cell = ring.cell()
            for piece in pieces:
                into = cell[piece.place : piece.place + piece.stop - piece.start]
                into.copy_(flats[piece.leaf][piece.start : piece.stop])
            ring.publish(_DATA, layout.number, layout.signature.nbytes)


class _Sending:
    """A message of which not all is in the ring yet."""

    def __init__(self, sender: RingSender, filling: Iterator[None], slot: int) -> None:
        self._sender, self._filling, self._slot = sender, filling, slot
        self._filled = self._done = False

    def advance(self) -> bool:
        """Fill the free cells; whether that was all."""
        for _ in self._filling:
            return False
        self._filled = True
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as `Work.wait` does, without a limit: `timeout` is ignored."""
        while not self.is_completed():
            self._sender.wait(self._slot, self._filled)
        return True

    def is_completed(self) -> bool:
        """Whether the receiver has, or will find, all of it."""
        self._sender.drive()
        if not self._done and self._filled and self._sender.met():
            self._done = True
            current().ended(self._slot)
        return self._done


class RingReceiver:
    """The end that takes out."""

    def __init__(self, segment: SharedSegment, plan: RingLayout, pids: Sequence[int], end: End) -> None:
        """Open the receiving end of a ring; `pids` are those of the sender and the receiver."""
        self._ring, self._end = _RingEnd(segment, plan, 1, pids), end
        self.signature: MessageSignature | None = None
        self._known: dict[int, _Layout] = {}
        self._last: _Layout | None = None

    def ready(self) -> bool:
        """Whether something came."""
        return self._ring.ready()

    def take(self) -> tuple[Tensor, ...]:
        """Wait for the next message and return copies of its tensors in host memory; sets `signature` to its signature."""
        ring, layout = self._ring, self._last
        outs = None if layout is None else layout.signature.empties()  # while it is on its way
        slot = self._end.begin(outs[0] if outs else None)
        if not ring.ready():
            self._end.wait(ring, slot)
        kind, number, nbytes = ring.head()
        if layout is None or outs is None or kind == _TEXT or number != layout.number:
            layout = self._last = self._learn(slot, kind, number, nbytes)
            outs = layout.signature.empties()
        if len(layout.cells) == 1:
            for out, view in zip(outs, ring.leaves(layout), strict=True):
                out.copy_(view)
            ring.step()
        else:
            self._collect(outs, layout, slot)
        current().ended(slot)
        self.signature = layout.signature
        return tuple(outs)

    def _collect(self, outs: list[Tensor], layout: _Layout, slot: int) -> None:
        flats = [_flat(out) for out in outs]
        for pieces in layout.cells:
            if not self._ring.ready():
                self._end.wait(self._ring, slot)
            cell = self._ring.cell()
            for piece in pieces:
                came = cell[piece.place : piece.place + piece.stop - piece.start]
                flats[piece.leaf][piece.start : piece.stop].copy_(came)
            self._ring.step()

    def _learn(self, slot: int, kind: int, number: int, nbytes: int) -> _Layout:
        """Return the layout of the message that begins in the present cell, after reading its signature if new."""
        ring, text = self._ring, b""
        while kind == _TEXT:
            text += ring.cell()[: min(nbytes - len(text), ring.plan.cell_bytes)].numpy().tobytes()
            ring.step()
            if len(text) == nbytes:
                self._known[number] = _Layout(number, MessageSignature.parse(text), ring.plan.cell_bytes)
            if not ring.ready():
                self._end.wait(ring, slot)
            kind, number, nbytes = ring.head()
        known = self._known.get(number)
        if known is None or known.signature.nbytes != nbytes:
            raise CommError(
                f"{self._end.call}: a message of signature {number} and {nbytes} bytes, which nobody announced",
                code="comm-metadata",
                fix="See whether all ranks run one version of the packages.",
            )
        return known


def _flat(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor` as flat uint8, in a copy where they are not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
