"""A channel over the messages of a torch backend (gloo), where ranks share no memory.

Each message is a head (which signature) and its tensors: one buffer where they are small, else a message of gloo each. All are posted at once: the
receiver expects the signature of the last message, and the sender keeps to that. Before a message of another signature it sends one of the
old one that nobody reads, so what is posted always fits what is sent, and a steady stream costs one trip.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_accel import storage_uses
from ds_comm.call import CollectiveCall
from ds_comm.channels.signature import Leaf, MessageSignature
from ds_comm.groups import Group
from ds_comm.transports import Started, Transport
from ds_comm.work import Work

__all__ = ["MessageReceiver", "MessageSender"]

_TAGS = 1 << 29  # the channels' own; those of users are small, those of collectives larger
_UNDER_WAY = 64  # works that nobody waited for; gloo does not tell of those that ended
_HEAD = struct.Struct("<qq")  # number of the signature; bytes of its text where it is new
_HEAD_BYTES = 64  # of which the words take 16: leaves behind them keep their alignment
_PACKED_BYTES = 256 << 10  # up to here a copy into one buffer takes less time than a second message of gloo
_KEPT = 8  # buffers that are used again; memory that malloc has given back costs a fault a page


def _tags(tag: int) -> tuple[int, int]:
    """Return the message tags of heads and of tensors for channel `tag`."""
    return _TAGS + 2 * tag, _TAGS + 2 * tag + 1


class _Frame:
    """The memory of one message: a head, and behind it the tensors of a signature where they are small.

    Args:
        signature: None: a head alone.
    Attributes:
        packed: Whether the tensors have their place here. Else they are messages of their own, which this frame has no memory for.
    """

    __slots__ = ("_address", "_signature", "buffer", "packed")

    def __init__(self, signature: MessageSignature | None) -> None:
        self.packed = signature is not None and signature.nbytes <= _PACKED_BYTES
        nbytes = _HEAD_BYTES + signature.nbytes if signature is not None and self.packed else _HEAD.size
        self.buffer, self._signature = torch.empty(nbytes, dtype=torch.uint8, device="cpu"), signature
        self._address = self.buffer.data_ptr()

    def write_head(self, number: int, text_bytes: int) -> None:
        """Write the number of the message's signature, and how many bytes of text follow."""
        ctypes.memmove(self._address, _HEAD.pack(number, text_bytes), _HEAD.size)

    def read_head(self) -> tuple[int, int]:
        """Return what `write_head` wrote on the other rank."""
        number, text_bytes = _HEAD.unpack(ctypes.string_at(self._address, _HEAD.size))
        return number, text_bytes

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors, which have the frame's signature, to their places."""
        if self._signature is None:
            return
        for leaf, tensor in enumerate(tensors):
            if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                place = self._address + _HEAD_BYTES + self._signature.starts[leaf]
                ctypes.memmove(place, tensor.data_ptr(), self._signature.sizes[leaf])
            else:
                self._leaf(leaf).copy_(tensor.detach())

    def leaves(self) -> list[Tensor]:
        """Return the tensors in their places, as new ones that are no views: changes of one are none of its neighbours for autograd."""
        return [] if self._signature is None else [self._leaf(leaf) for leaf in range(len(self._signature.leaves))]

    def _leaf(self, leaf: int) -> Tensor:
        if self._signature is None:
            raise IndexError(leaf)
        dtype, shape, _ = self._signature.leaves[leaf]
        at = (_HEAD_BYTES + self._signature.starts[leaf]) // dtype.itemsize
        return torch.empty(0, dtype=dtype, device="cpu").set_(
            self.buffer.untyped_storage(), at, shape, self._signature.strides[leaf]
        )

    @property
    def shared(self) -> bool:
        """Whether somebody still has a tensor of this memory."""
        return storage_uses(self.buffer) > 1


class _FramePool:
    """Frames of one signature that may be used again: those of the last messages."""

    __slots__ = ("_frames", "_signature")

    def __init__(self) -> None:
        self._signature: MessageSignature | None = None
        self._frames: deque[_Frame] = deque(maxlen=_KEPT)

    def take(self, signature: MessageSignature | None) -> _Frame:
        """Return a frame for `signature` that nobody uses."""
        if signature is not self._signature:
            self._signature = signature
            self._frames.clear()
        for _ in range(len(self._frames)):
            frame = self._frames.popleft()
            if not frame.shared:
                return frame
            self._frames.append(frame)
        return _Frame(signature)

    def give(self, frame: _Frame) -> None:
        """Take a frame back that is no part of a message any more; its tensors may still be in use."""
        if frame.packed and frame._signature is self._signature:
            self._frames.append(frame)


class MessageSender:
    """The end that sends."""

    def __init__(self, group: Group, peer: int, tag: int, unit: str) -> None:
        self._call, self._peer = CollectiveCall("send", group, unit), peer
        self._head_tag, self._tag = _tags(tag)
        self._numbers: dict[tuple[Leaf, ...], int] = {}
        self._last: MessageSignature | None = None
        self._under_way: deque[tuple[Work, _Frame, list[Tensor]]] = deque()
        self._pool = _FramePool()

    def send(self, tensors: Sequence[Tensor]) -> Work:
        """Send the tensors as `Sender.send` does; the work is complete when the receiver took them."""
        while self._under_way and (self._under_way[0][0].is_completed() or len(self._under_way) > _UNDER_WAY):
            work, ended, _ = self._under_way.popleft()
            work.wait()
            self._pool.give(ended)
        key = MessageSignature.key(tensors)
        signature, text = self._last, b""
        if signature is None or signature.leaves != key:
            signature = MessageSignature(key)
            if key not in self._numbers:
                self._numbers[key] = len(self._numbers)
                text = signature.text()
        frame = self._pool.take(self._last)
        frame.write_head(self._numbers[key], len(text))
        parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8)] if text else []
        if self._last is not signature:  # what is posted, unread; then this message
            parts = [*(self._last.empties() if self._last is not None and not frame.packed else []), *parts]
            parts += [tensor.detach().contiguous().cpu() for tensor in tensors]
        elif not frame.packed:
            parts = [tensor.detach().contiguous().cpu() for tensor in tensors]
        else:
            frame.write(tensors)
        sent = [(frame.buffer, self._head_tag), *((part, self._tag) for part in parts)]
        self._last = signature

        def launch(to: Transport) -> Started:
            works = [to.send(_some(part), self._peer, tag).works for part, tag in sent]
            return Started([work for one in works for work in one])

        work = self._call.start(parts[-1] if parts else frame.buffer, True, launch, peer=self._peer)
        self._under_way.append((work, frame, parts))
        return work


class MessageReceiver:
    """The end that receives. One message is posted at a time."""

    def __init__(self, group: Group, peer: int, tag: int, unit: str) -> None:
        self._call, self._peer = CollectiveCall("recv", group, unit), peer
        self._head_tag, self._tag = _tags(tag)
        self._known: dict[int, MessageSignature] = {}
        self._last: tuple[int, MessageSignature] | None = None
        self._posted: tuple[Work, _Frame, list[Tensor]] | None = None
        self._pool = _FramePool()

    def post(self) -> None:
        """Make ready for the next message, once."""
        self._made_ready()

    def _made_ready(self) -> tuple[Work, _Frame, list[Tensor]]:
        if self._posted is not None:
            return self._posted
        last = None if self._last is None else self._last[1]
        frame = self._pool.take(last)
        apart = [] if last is None or frame.packed else last.empties()
        work = self._receive([(frame.buffer, self._head_tag), *((out, self._tag) for out in apart)])
        self._posted = work, frame, apart
        return self._posted

    def ready(self) -> bool:
        """Whether what was posted came."""
        return self._made_ready()[0].is_completed()

    def take(self) -> tuple[Tensor, ...]:
        """Wait for the next message and return its tensors in host memory; sets `signature` to its signature."""
        (work, frame, outs), self._posted = self._made_ready(), None
        work.wait()
        number, text_bytes = frame.read_head()
        if self._last is None or number != self._last[0]:
            if text_bytes:
                text = torch.empty(text_bytes, dtype=torch.uint8, device="cpu")
                self._receive([(text, self._tag)]).wait()
                self._known[number] = MessageSignature.parse(text.numpy().tobytes())
            self._last = number, self._known[number]
            outs = self._last[1].empties()
            self._receive([(out, self._tag) for out in outs]).wait()
        elif frame.packed:
            outs = frame.leaves()
            self._pool.give(frame)
        return tuple(outs)

    @property
    def signature(self) -> MessageSignature | None:
        """The signature of the last message that was taken."""
        return None if self._last is None else self._last[1]

    def _receive(self, parts: Sequence[tuple[Tensor, int]]) -> Work:
        def launch(to: Transport) -> Started:
            works = [to.recv(_some(part), self._peer, tag).works for part, tag in parts]
            return Started([work for one in works for work in one])

        return self._call.start(parts[-1][0] if parts else torch.empty(0, device="cpu"), True, launch, peer=self._peer)


def _some(tensor: Tensor) -> Tensor:
    return tensor if tensor.numel() else torch.zeros(1, dtype=torch.uint8, device="cpu")
