"""What a checkpointed call keeps of its inputs until backward, and where.

Words: an *input* is a tensor that a checkpointed call was given and needs again to compute a second time. What is kept of it is
a *piece*: all of its elements, or this rank's slice of them (tensor-parallel ranks hold the same input, so each keeps
1/N and backward gathers the rest). A piece lies on the device or on the host, in memory of its own or in a *slot* of
buffers that are made once. Only floating inputs with at least as many elements as the group has ranks are cut or moved;
everything else, and tensors with the attribute `no_checkpointing`, are held as they are.

An input that several calls are given (an attention mask, rotary tables) is kept once.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ds_comm as comm
from ds_accel import Accelerator, PinnedBuffer, PinnedPool, get_accelerator, host_memory, streams
from ds_comm import Group, self_group
from ds_config.errors import PlanError
from ds_config.option_checks import check_options
from ds_parallel._torch import version_of

__all__ = ["ActivationMemory", "ActivationPolicy", "ActivationStore", "Kept"]

_log = logging.getLogger("ds_parallel")


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """What is kept of the inputs of checkpointed calls, as a decision. The default holds them as they are.

    Attributes:
        slices: Each rank of the tensor-parallel group keeps 1/N of an input.
        host: Keep it in host memory.
        slots: So many buffers, made once, for each input of a call; None makes memory when it is needed.
        synchronize: Wait for the device at both ends of every call.
        profile: Time every call.
    """

    slices: bool = False
    host: bool = False
    slots: int | None = None
    synchronize: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        check_options(self, slots=">= 1")

    @property
    def moves(self) -> bool:
        """Whether inputs are not simply held."""
        return self.slices or self.host or self.slots is not None

    def __str__(self) -> str:
        where = [
            *(["1/N on each tensor-parallel rank"] if self.slices else []),
            *(["on the host"] if self.host else []),
            *([f"in {self.slots} buffers"] if self.slots is not None else []),
        ]
        words = ["inputs kept " + (", ".join(where) or "as they are")]
        words += ["device synchronized"] if self.synchronize else []
        words += ["timed"] if self.profile else []
        return ", ".join(words)


class ActivationMemory:
    """Bytes that are kept for backward in memory of our own (inputs that are held as they are do not count).

    Attributes:
        device, host: Now.
        peak_device, peak_host: Most at once.
    """

    def __init__(self) -> None:
        self.device = self.host = self.peak_device = self.peak_host = 0
        self._lock = threading.RLock()  # graphs are freed on autograd's threads, and inside any line of this one

    def add(self, on_host: bool, nbytes: int) -> None:
        """Add `nbytes` (negative: subtract) to the saved bytes on the host or device, and update the peak."""
        with self._lock:
            if on_host:
                self.host += nbytes
                self.peak_host = max(self.peak_host, self.host)
            else:
                self.device += nbytes
                self.peak_device = max(self.peak_device, self.device)


@dataclass(frozen=True, slots=True)
class _SavedInput:
    """An input that is held as it is; writing to it before backward is an error, as it is without checkpointing."""

    tensor: Tensor
    version: int | None


class Kept:
    """A piece of one input.

    Attributes:
        shape, stride, device: Of the input.
        piece: [n or ceil(n / N)], where it is kept.
        sliced: Whether it is one rank's part.
    """

    __slots__ = ("__weakref__", "arrived", "back", "before", "device", "left", "piece", "shape", "sliced", "stride")

    def __init__(self, tensor: Tensor, piece: Tensor, sliced: bool) -> None:
        self.shape, self.stride, self.device = tensor.shape, tensor.stride(), tensor.device
        self.piece, self.sliced = piece, sliced
        self.left: Any = None  # event: the copy to the host is done
        self.back: Tensor | None = None  # the piece on the device again
        self.arrived: Any = None  # event: the copy to the device is done
        self.before: Callable[[], Kept | None] = _nothing  # what was kept before it, which backward needs next


class _BufferSlots:
    """Buffers of one size for the inputs at one position of a call. A slot is free again when the graph that used it is."""

    def __init__(self, count: int, allocate: Callable[[int], Tensor]) -> None:
        self.count, self._allocate = count, allocate
        self._buffer: Tensor | None = None
        self._numel = 0
        self._free: list[int] = []

    def take(self, numel: int) -> tuple[Tensor, Callable[[], None]]:
        """Take a buffer [numel] from the pool, and return with the buffer a function that frees it.

        Raises:
            PlanError: all are in use ("activations-buffers-full"); `numel` exceeds buffers in use ("activations-size").
        """
        idle = self._buffer is None or len(self._free) == self.count
        if numel > self._numel:
            if not idle:
                raise PlanError(
                    f"an input of {numel} elements, the {self.count} buffers made for it have {self._numel} and "
                    f"{self.count - len(self._free)} are in use",
                    code="activations-size",
                    fix="Checkpoint calls whose inputs are alike, or leave contiguous_memory_optimization out.",
                )
            self._buffer = None  # first: both at once may not fit
            self._buffer, self._numel = self._allocate(self.count * numel), numel
            self._free = list(reversed(range(self.count)))
        if self._buffer is None or not self._free:
            raise PlanError(
                f"number_checkpoints = {self.count}, and a call more wants to keep its inputs before a backward is done "
                "with one",
                code="activations-buffers-full",
                fix="Set number_checkpoints to the checkpointed calls of one forward, times the forwards before a backward.",
            )
        slot, free = self._free.pop(), self._free
        start = slot * self._numel
        return self._buffer[start : start + numel], lambda: free.append(slot)


class ActivationStore:
    """Packs inputs and unpacks them again, as a `ActivationPolicy` says.

    Args:
        keeping: What is kept where.
        group: The tensor-parallel ranks; they make the same calls in the same order. None is a group of one.
        accelerator: Whose memory and streams; the process's own by default.
        host_bytes: Most host memory for pieces; half of what is free by default.
    Attributes:
        account: Bytes kept.
    """

    def __init__(
        self,
        keeping: ActivationPolicy,
        group: Group | None = None,
        accelerator: Accelerator | None = None,
        host_bytes: int | None = None,
    ) -> None:
        self.keeping, self.group = keeping, group or self_group("tensor")
        self.account = ActivationMemory()
        self._accelerator, self._host_bytes = accelerator, host_bytes
        self._known: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Kept]]] = {}
        self._slots: dict[tuple[int, torch.dtype, torch.device], _BufferSlots] = {}
        self._pool: PinnedPool | None = None
        self._streams: dict[torch.device, Any] = {}
        self._latest: Callable[[], Kept | None] = _nothing
        self._warned: set[str] = set()
        if keeping.slices and self.group.size == 1:
            self._say(
                "partition_activations has no effect: there is one tensor-parallel rank, which keeps every input whole"
            )

    @property
    def accelerator(self) -> Accelerator:
        """Whose memory and streams."""
        return self._accelerator or get_accelerator()

    def eligible(self, tensor: Tensor) -> bool:
        """Whether an input may be cut or moved."""
        return (
            tensor.is_floating_point()
            and tensor.numel() >= self.group.size
            and tensor.numel() > 0
            and not isinstance(tensor, nn.Parameter)  # it stays anyway
            and not getattr(tensor, "no_checkpointing", False)
            and tensor.layout is torch.strided
            and _dense(tensor)
        )

    def pack(self, tensor: Tensor, position: int) -> Kept | _SavedInput:
        """Keep the input at `position` of a call. Costs a copy of the piece, on a stream of its own if it goes to the host.

        Raises:
            PlanError: see `ActivationPolicy.slots` ("activations-buffers-full", "activations-size").
        """
        if not self.eligible(tensor):
            return _SavedInput(tensor, None if isinstance(tensor, nn.Parameter) else version_of(tensor))
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version_of(tensor):
            again = known[2]()
            if again is not None:
                return again
        sliced = self.keeping.slices and self.group.size > 1
        away = self.keeping.host and self.accelerator.holds(tensor) and self.accelerator.facts.torch_type != "cpu"
        if self.keeping.host and not away:
            self._say("cpu_checkpointing has no effect: the inputs are in host memory already")
        if not (sliced or away or self.keeping.slots is not None):
            return _SavedInput(tensor, version_of(tensor))
        with torch.no_grad():
            entry = self._keep(tensor, position, sliced, away)
        self._remember(tensor, entry)
        return entry

    def unpack(self, entry: Kept | _SavedInput) -> Tensor:
        """Restore a saved input; a partitioned input is all-gathered over the group.

        The all-gather is collective and sends (N-1)/N of the input's bytes.

        Raises:
            PlanError: the input was saved by reference, and was written since ("activations-written").
        """
        if isinstance(entry, _SavedInput):
            if entry.version is not None and version_of(entry.tensor) != entry.version:
                raise PlanError(
                    f"an input of a checkpointed call, {tuple(entry.tensor.shape)}, was written in place after it",
                    code="activations-written",
                    fix="Write to a copy: backward computes the call again from its inputs.",
                )
            return entry.tensor
        with torch.no_grad():
            piece = self._fetch(entry)
            if entry.sliced:
                whole = torch.empty(piece.numel() * self.group.size, dtype=piece.dtype, device=piece.device)
                comm.all_gather_single(whole, piece, group=self.group, unit="checkpointed input")
                piece = whole
            elif piece is entry.piece:
                piece = piece.clone()  # the slot may be used again before the recomputed graph is done with it
            return piece.as_strided(entry.shape, entry.stride)

    # ---- inside

    def _keep(self, tensor: Tensor, position: int, sliced: bool, away: bool) -> Kept:
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        part = -(-flat.numel() // self.group.size) if sliced else flat.numel()
        piece = flat[self.group.rank * part : (self.group.rank + 1) * part] if sliced else flat
        place, free = self._place(tensor, position, part, away)
        entry = Kept(tensor, place, sliced)
        if away:
            with streams.on_device(tensor.device):
                self._send(entry, place[: piece.numel()], piece)
        else:
            place[: piece.numel()].copy_(piece)
        nbytes = part * tensor.element_size()
        self.account.add(away, nbytes)
        weakref.finalize(entry, self._freed, away, nbytes, free).atexit = False
        return entry

    def _place(self, tensor: Tensor, position: int, part: int, away: bool) -> tuple[Tensor, Callable[[], None] | None]:
        tensor_device = tensor.device
        if self.keeping.slots is None:
            if away:
                buffer = self._host(part * tensor.element_size())
                return buffer.view(tensor.dtype, part), lambda: buffer.release(
                    self._mark(tensor_device), in_finalizer=True
                )
            return torch.empty(part, dtype=tensor.dtype, device=tensor.device), None
        key = (position, tensor.dtype, tensor.device)
        if key not in self._slots:
            self._slots[key] = _BufferSlots(self.keeping.slots, self._allocator(tensor, away))
        return self._slots[key].take(part)

    def _allocator(self, tensor: Tensor, away: bool) -> Callable[[int], Tensor]:
        dtype, device = tensor.dtype, tensor.device
        buffers: list[PinnedBuffer] = []  # kept as long as the slots are

        def allocate(numel: int) -> Tensor:
            if not away:
                return torch.empty(numel, dtype=dtype, device=device)
            while buffers:
                buffers.pop().release(self._mark(device))
            buffers.append(self._host(numel * dtype.itemsize))
            return buffers[0].view(dtype, numel)

        return allocate

    def _host(self, nbytes: int) -> PinnedBuffer:
        if self._pool is None:
            limit = host_memory().available // 2 if self._host_bytes is None else self._host_bytes
            self._pool = self.accelerator.pinned(limit, name="activations")
        return self._pool.take(nbytes)

    def _freed(self, away: bool, nbytes: int, free: Callable[[], None] | None) -> None:
        self.account.add(away, -nbytes)
        if free is not None:
            free()

    def _send(self, entry: Kept, place: Tensor, piece: Tensor) -> None:
        """Start the copy to the host on the side stream, after what the current stream has queued; the device goes on meanwhile."""
        accelerator, stream = self.accelerator, self._side(entry.device)
        ready = accelerator.new_event()
        ready.record(accelerator.current_stream())
        with accelerator.on_stream(stream):
            ready.wait(stream)
            streams.copy_into(place, piece)
            entry.left = accelerator.new_event()
            entry.left.record(stream)
        streams.record_use(piece, stream)
        entry.before, self._latest = self._latest, weakref.ref(entry)

    def _fetch(self, entry: Kept) -> Tensor:
        if entry.left is None:
            return entry.piece
        with streams.on_device(entry.device):
            self._start(entry)
            ahead = entry.before()
            if ahead is not None and ahead.device == entry.device:
                self._start(ahead)
            entry.arrived.wait(self.accelerator.current_stream())
        back, entry.back = entry.back, None
        if back is None:
            raise RuntimeError("a piece that was fetched is not there")
        return back

    def _start(self, entry: Kept) -> None:
        """Start the copy back on the side stream; it is valid on a stream that waits for `entry.arrived`."""
        if entry.back is not None:
            return
        accelerator, stream = self.accelerator, self._side(entry.device)
        entry.back = torch.empty(entry.piece.shape, dtype=entry.piece.dtype, device=entry.device)
        ready = accelerator.new_event()
        ready.record(accelerator.current_stream())
        with accelerator.on_stream(stream):
            ready.wait(stream)  # the memory may be one that the device is still using
            entry.left.wait(stream)
            streams.copy_into(entry.back, entry.piece)
            entry.arrived = accelerator.new_event()
            entry.arrived.record(stream)
        streams.record_use(entry.back, stream)

    def _side(self, device: torch.device) -> Any:
        if device not in self._streams:
            with streams.on_device(device):
                self._streams[device] = self.accelerator.new_stream()
        return self._streams[device]

    def _mark(self, device: torch.device) -> Any:
        """Record an event on the copy stream of `device`, which completes when all copies queued so far are done."""
        event = self.accelerator.new_event()
        event.record(self._side(device))
        return event

    def _remember(self, tensor: Tensor, entry: Kept) -> None:
        key = id(tensor)
        self._known[key] = (
            weakref.ref(tensor, lambda _: self._known.pop(key, None)),
            version_of(tensor),
            weakref.ref(entry),
        )

    def _say(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.info(text)


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in any order of dims. Expanded and strided views do not."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _nothing() -> None:
    return None
