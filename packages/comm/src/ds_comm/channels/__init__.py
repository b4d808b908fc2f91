"""One-way connections between two ranks for tensors that follow each other: what the stages of a pipeline send.

    channels = Channels(group)                       # collective over the group, once
    to_next = channels.sender(group.rank + 1)
    work = to_next.send((hidden, mask))              # dtypes and shapes are told with the first message of a kind
    ...
    from_last = channels.receiver(group.rank - 1)
    hidden, mask = from_last.recv()                  # new tensors

Words: a *channel* goes from one rank to one other and is known by its `tag`; its two ends are a *sender* and a *receiver*. The
*signature* of a message is the dtype and shape of each tensor. It travels once for each kind of message, as JSON; what
follows is tensors and nothing else.

No order of sends and receives on different channels can block: a send returns at once, and who waits goes on with what the
process has still to send. Messages of one channel arrive in order. Every wait is an operation of the recorder.

Ranks of one host use memory that both see, whatever the backend of the group; others use messages of gloo, over a group of their own where
the given one carries tensors of devices alone. Tensors of a device travel through host memory: the sender waits for its current stream and copies
them out, the receiver copies them to its own device. What 64 KiB cost either way is in docs/benchmarks/comm.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_accel import get_accelerator
from ds_comm._torch import is_alive
from ds_comm.channels.messages import MessageReceiver, MessageSender
from ds_comm.channels.rings import Rings
from ds_comm.channels.signature import MessageSignature
from ds_comm.groups import GroupLike, as_group, destroy_group, destroy_when_dropped, duplicate_group
from ds_comm.metadata import metadata_device
from ds_comm.node_topology import neighbours
from ds_comm.work import Work
from ds_config.errors import CommError
from ds_config.rehearsing import is_rehearsal

__all__ = ["Channels", "Coming", "Receiver", "Sender"]


class Sender(Protocol):
    """The end that sends."""

    def send(self, tensors: Sequence[Tensor]) -> Work:
        """Start sending `tensors`, which must not change before the returned Work has been waited for.

        Args:
            tensors: Of any number, shapes, strides and dtypes, on the CPU or valid on the current stream of a device, which is waited for. What
                requires a gradient is sent without its graph.
        Returns:
            A Work; wait for every one. Complete at once where memory is shared, not full, and opened by the receiver.
        Cost: shared memory: one copy in; `depth` messages of the first kind fit.
        """


class Receiver:
    """The end that receives.

    Attributes:
        device: Where tensors go that were on a device of the sender; None: the accelerator's current one.
    """

    def __init__(self, source: Any, device: torch.device | None = None) -> None:
        """Wrap `source`, whose `post`, `ready` and `take` prepare for, poll for and receive the next message."""
        self._source, self.device = source, device
        self._coming: deque[Coming] = deque()

    def recv(self) -> tuple[Tensor, ...]:
        """Receive the next message into new tensors: on the CPU, or valid on the current stream of the device, as they were sent."""
        return self.post().wait()

    def post(self) -> Coming:
        """Make ready for the next message and return at once. Messages come in the order of posting, however one waits."""
        self._coming.append(coming := Coming(self))
        self._source.post()
        return coming

    def _take(self) -> None:
        first = self._coming.popleft()
        tensors: tuple[Tensor, ...] = self._source.take()
        signature: MessageSignature | None = self._source.signature
        if signature is not None and signature.on_device:
            if self.device is None:
                accelerator = get_accelerator()
                self.device = accelerator.device(accelerator.current_index())
            tensors = signature.placed(tensors, self.device)
        first._tensors = tensors
        if self._coming:
            self._source.post()

    def _ready(self, coming: Coming) -> bool:
        while coming._tensors is None and self._source.ready():
            self._take()
        return coming._tensors is not None


class Coming:
    """A message that was posted for."""

    __slots__ = ("_receiver", "_tensors")

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._tensors: tuple[Tensor, ...] | None = None

    def wait(self, timeout: timedelta | None = None) -> tuple[Tensor, ...]:
        """Wait for this message and return its tensors.

        Raises:
            CommError: the other rank ended ("comm-peer-left", "shm-peer-died") or, where no watchdog runs, did not come
                ("comm-timeout").
        """
        while self._tensors is None:
            self._receiver._take()
        return self._tensors

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Between hosts this may be false until `wait`: gloo does not tell."""
        return self._receiver._ready(self)


class Channels:
    """All channels of this rank in a group. Construction is collective over the group; channels open when first used.

    Args:
        depth: Messages under way on each channel before a send has to wait for the receiver, where memory is shared.
        shared: False: use the group's messages also where ranks could share memory.
        timeout_s: How long an end waits for the other where no watchdog does.
        device: Where this rank receives what was on a device of the sender; None: the accelerator's current one.
    """

    def __init__(
        self,
        group: GroupLike = None,
        *,
        depth: int = 2,
        shared: bool = True,
        timeout_s: float = 600.0,
        device: torch.device | None = None,
    ) -> None:
        self.group, self._device = as_group(group), device
        self._neighbours = neighbours(self.group, unit="channels")
        first = self._neighbours[0]
        apart = not shared or not all(first.shares(other) for other in self._neighbours)
        # Heads and signatures are numbers of the host, and what a device sends is copied there: not for a backend of devices.
        beside = apart and metadata_device(self.group) != torch.device("cpu") and not is_rehearsal()
        self._messages = duplicate_group(self.group, "channels") if beside else self.group
        self._duplicates = [self._messages] if beside else []
        destroy_when_dropped(self, self._duplicates)
        self._rings = Rings(self.group, self._neighbours, depth, timeout_s)
        self._shared = shared
        self._senders: dict[tuple[int, int, str], Sender] = {}
        self._receivers: dict[tuple[int, int, str], Receiver] = {}

    def sender(self, to: int, tag: int = 0, *, unit: str = "") -> Sender:
        """Return this rank's end of channel `tag` to rank `to` of the group; the same object every time."""
        key = self._peer(to), tag, unit
        if key not in self._senders:
            memory = self._in_memory(to)
            self._senders[key] = (
                self._rings.sender(to, tag, unit) if memory else MessageSender(self._messages, to, tag, unit)
            )
        return self._senders[key]

    def receiver(self, source: int, tag: int = 0, *, unit: str = "") -> Receiver:
        """Return this rank's end of channel `tag` from rank `source` of the group; the same object every time."""
        key = self._peer(source), tag, unit
        if key not in self._receivers:
            memory = self._in_memory(source)
            ring = self._rings.receiver(source, tag, unit) if memory else None
            self._receivers[key] = Receiver(ring or MessageReceiver(self._messages, source, tag, unit), self._device)
        return self._receivers[key]

    def close(self) -> None:
        """Forget all ends. What was sent and not received is lost."""
        self._senders.clear()
        self._receivers.clear()
        self._rings.close()
        while self._duplicates:
            messages = self._duplicates.pop()
            if messages.link is not None and is_alive(messages.link):
                destroy_group(messages)

    def _in_memory(self, peer: int) -> bool:
        return self._shared and self._neighbours[self.group.rank].shares(self._neighbours[peer])

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.group.size or rank == self.group.rank:
            raise CommError(
                f"a channel with rank {rank} of group {self.group.name!r} of {self.group.size}, on its rank {self.group.rank}",
                code="comm-rank",
                fix="Name another rank within the group.",
            )
        return rank
