"""A channel over the messages of a torch backend (gloo), where ranks share no memory.

Each message is a head (which signature) and its tensors: one buffer where they are small, else a message of gloo each. All are posted at once: the
receiver expects the signature of the last message, and the sender keeps to that. Before a message of another signature it sends one of the
old one that nobody reads, so what is posted always fits what is sent, and a steady stream costs one trip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_comm.call import CollectiveCall
from ds_comm.channels.signature import Leaf, MessageSignature
from ds_comm.groups import Group
from ds_comm.transports import Started, Transport
from ds_comm.work import Work

__all__ = ["MessageReceiver", "MessageSender"]

_TAGS = 1 << 29  # the channels' own; those of users are small, those of collectives larger
_UNDER_WAY = 64  # works that nobody waited for; gloo does not tell of those that ended
_HEAD_WORDS = 2  # number of the signature; bytes of its text where it is new
_HEAD_BYTES = 64  # of which the words take 16: leaves behind them keep their alignment
_PACKED_BYTES = 256 << 10  # up to here a copy into one buffer takes less time than a second message of gloo


def _tags(tag: int) -> tuple[int, int]:
    """Return the message tags of heads and of tensors for channel `tag`."""
    return _TAGS + 2 * tag, _TAGS + 2 * tag + 1


class _Frame:
    """The buffers of one message: a head, and the tensors of a signature.

    Args:
        signature: None: a head alone.
    Attributes:
        head: Number of the signature, bytes of its text.
        leaves: The tensors. None where they are messages of their own, which this frame has no memory for.
    """

    def __init__(self, signature: MessageSignature | None) -> None:
        packed = signature is not None and signature.nbytes <= _PACKED_BYTES
        nbytes = _HEAD_BYTES + signature.nbytes if signature is not None and packed else 8 * _HEAD_WORDS
        self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.head = self.buffer[: 8 * _HEAD_WORDS].view(torch.int64)
        self.leaves: list[Tensor] | None = None if signature is None or not packed else self._cut(signature)

    def _cut(self, signature: MessageSignature) -> list[Tensor]:
        # `.data`: a tensor that is changed in place must not count as a change of its neighbours, which autograd may have saved.
        places = zip(signature.leaves, signature.starts, signature.sizes, strict=True)
        return [
            self.buffer[_HEAD_BYTES + at :][:size].view(dtype).view(shape).data
            for (dtype, shape, _), at, size in places
        ]


class MessageSender:
    """The end that sends."""

    def __init__(self, group: Group, peer: int, tag: int, unit: str) -> None:
        self._call, self._peer = CollectiveCall("send", group, unit), peer
        self._head_tag, self._tag = _tags(tag)
        self._numbers: dict[tuple[Leaf, ...], int] = {}
        self._last: MessageSignature | None = None
        self._under_way: deque[tuple[Work, list[Tensor]]] = deque()

    def send(self, tensors: Sequence[Tensor]) -> Work:
        """Send the tensors as `Sender.send` does; the work is complete when the receiver took them."""
        while self._under_way and (self._under_way[0][0].is_completed() or len(self._under_way) > _UNDER_WAY):
            self._under_way.popleft()[0].wait()
        key = MessageSignature.key(tensors)
        signature, text = self._last, b""
        if signature is None or signature.leaves != key:
            signature = MessageSignature(key)
            if key not in self._numbers:
                self._numbers[key] = len(self._numbers)
                text = signature.text()
        frame = _Frame(self._last)
        frame.head[0], frame.head[1] = self._numbers[key], len(text)
        parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8)] if text else []
        if self._last is not signature:  # what is posted, unread; then this message
            parts = [*(self._last.empties() if self._last is not None and frame.leaves is None else []), *parts]
            parts += [tensor.detach().contiguous().cpu() for tensor in tensors]
        elif frame.leaves is None:
            parts = [tensor.detach().contiguous().cpu() for tensor in tensors]
        else:
            for leaf, tensor in zip(frame.leaves, tensors, strict=True):
                leaf.copy_(tensor.detach())
        sent = [(frame.buffer, self._head_tag), *((part, self._tag) for part in parts)]
        self._last = signature

        def launch(to: Transport) -> Started:
            works = [to.send(_some(part), self._peer, tag).works for part, tag in sent]
            return Started([work for one in works for work in one])

        work = self._call.start(parts[-1] if parts else frame.buffer, True, launch, peer=self._peer)
        self._under_way.append((work, [frame.buffer, *parts]))
        return work


class MessageReceiver:
    """The end that receives. One message is posted at a time."""

    def __init__(self, group: Group, peer: int, tag: int, unit: str) -> None:
        self._call, self._peer = CollectiveCall("recv", group, unit), peer
        self._head_tag, self._tag = _tags(tag)
        self._known: dict[int, MessageSignature] = {}
        self._last: tuple[int, MessageSignature] | None = None
        self._posted: tuple[Work, Tensor, list[Tensor]] | None = None

    def post(self) -> None:
        """Make ready for the next message, once."""
        self._made_ready()

    def _made_ready(self) -> tuple[Work, Tensor, list[Tensor]]:
        if self._posted is not None:
            return self._posted
        last = None if self._last is None else self._last[1]
        frame = _Frame(last)
        apart = [] if last is None or frame.leaves is not None else last.empties()
        work = self._receive([(frame.buffer, self._head_tag), *((out, self._tag) for out in apart)])
        self._posted = work, frame.head, frame.leaves or apart
        return self._posted

    def ready(self) -> bool:
        """Whether what was posted came."""
        return self._made_ready()[0].is_completed()

    def take(self) -> tuple[Tensor, ...]:
        """Wait for the next message and return its tensors in host memory; sets `signature` to its signature."""
        (work, head, outs), self._posted = self._made_ready(), None
        work.wait()
        number, text_bytes = head.tolist()
        if self._last is None or number != self._last[0]:
            if text_bytes:
                text = torch.empty(text_bytes, dtype=torch.uint8)
                self._receive([(text, self._tag)]).wait()
                self._known[number] = MessageSignature.parse(text.numpy().tobytes())
            self._last = number, self._known[number]
            outs = self._last[1].empties()
            self._receive([(out, self._tag) for out in outs]).wait()
        return tuple(outs)

    @property
    def signature(self) -> MessageSignature | None:
        """The signature of the last message that was taken."""
        return None if self._last is None else self._last[1]

    def _receive(self, parts: Sequence[tuple[Tensor, int]]) -> Work:
        def launch(to: Transport) -> Started:
            works = [to.recv(_some(part), self._peer, tag).works for part, tag in parts]
            return Started([work for one in works for work in one])

        return self._call.start(parts[-1][0] if parts else torch.empty(0), True, launch, peer=self._peer)


def _some(tensor: Tensor) -> Tensor:
    return tensor if tensor.numel() else torch.zeros(1, dtype=torch.uint8)
