"""Copies between host and device, events, streams and page-locked memory. No other file calls torch for these.

Words: work on a device is queued on a *stream* and runs later, in the stream's order; the host goes on. An *event* marks a place in a
stream: another stream waits for it (`wait`), the host asks (`query`) or waits (`synchronize`). A copy from *page-locked* memory of the
host is queued like a kernel, so the host must not write to that memory before an event after the copy has happened.

Every function here says on which stream its result is valid and what it waits for. `StreamsBackend` is torch's behaviour;
`use_backend` puts another one in its place, which is how tests run the same code on a device whose work comes late (`ds_testing.device`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "DeviceEvent",
    "StreamsBackend",
    "backend",
    "copy_into",
    "copy_to",
    "copy_to_device",
    "current_device",
    "current_stream",
    "host_memory",
    "is_capturing",
    "is_device_memory",
    "lock_pages",
    "new_event",
    "new_stream",
    "on_device",
    "on_stream",
    "page_locked",
    "pin",
    "record_event",
    "record_use",
    "relax_capture",
    "stream_handle",
    "synchronize_stream",
    "unlock_pages",
    "use_backend",
    "wait_stream",
]


class DeviceEvent(Protocol):
    """A place in a stream, which happens when all work that was queued before it is done."""

    def record(self, stream: Any = None) -> None:
        """Mark the present end of `stream`, by default of the current one."""

    def wait(self, stream: Any = None) -> None:
        """Make `stream`, by default the current one, wait for the event; the host goes on."""

    def query(self) -> bool:
        """Whether the event has happened. Does not wait."""

    def synchronize(self) -> None:
        """Block the host until the event has happened."""


class CompletedEvent:
    """The event of a device whose operations are done when they return."""

    def record(self, stream: Any = None) -> None:
        """Do nothing: an event of a synchronous device is complete from the start."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: a synchronous device has no queued work to wait for."""

    def synchronize(self) -> None:
        """Do nothing: a synchronous device has no queued work to wait for."""

    def query(self) -> bool:
        """Return True: all work of a synchronous device is complete."""
        return True


class StreamsBackend:
    """Streams, events and copies as torch has them, by the device's torch module (`torch.cuda`, ...).

    Where a device has no streams or events, a stream is None and an event is complete from the start.
    """

    def is_device_memory(self, tensor: Tensor) -> bool:
        """Whether work on `tensor` is queued on a stream."""
        return tensor.device.type not in ("cpu", "meta")

    def needs_copy(self, source: Tensor, device: torch.device) -> bool:
        """Whether `source` has to be copied before work on `device` can read it."""
        return source.device != device

    def new_stream(self, module: Any) -> Any:
        """Create a stream on the current device of `module`."""
        return module.Stream() if hasattr(module, "Stream") else None

    def current_stream(self, module: Any, device: torch.device | None = None) -> Any:
        """Return the stream of this thread on which work for `device` (None: the current one) is queued."""
        if not hasattr(module, "current_stream"):
            return None
        return module.current_stream() if device is None or device.index is None else module.current_stream(device)

    def on_stream(self, module: Any, stream: Any) -> AbstractContextManager[Any]:
        """Send this thread's work to `stream`, while inside."""
        if stream is None or not hasattr(module, "stream"):
            return nullcontext()
        context: AbstractContextManager[Any] = module.stream(stream)
        return context

    def new_event(self, module: Any) -> DeviceEvent:
        """Create an event without timing."""
        kind = getattr(module, "Event", None)
        event: DeviceEvent = CompletedEvent() if kind is None or module is torch.cpu else kind()
        return event

    def copy_to(self, source: Tensor, device: torch.device, dtype: torch.dtype | None, fresh: bool) -> Tensor:
        """Queue a copy of `source` on `device`."""
        return source.to(device, dtype or source.dtype, non_blocking=True, copy=fresh)

    def copy_into(self, out: Tensor, source: Tensor) -> None:
        """Queue a copy of `source` into `out`."""
        out.copy_(source, non_blocking=True)

    def record_use(self, tensor: Tensor, stream: Any) -> None:
        """Tell the allocator that `stream` uses the memory of `tensor`."""
        tensor.record_stream(stream)

    def page_locked(self, size: Sequence[int], dtype: torch.dtype, zero: bool) -> Tensor:
        """Allocate page-locked memory of the host."""
        return (torch.zeros if zero else torch.empty)(size, dtype=dtype, pin_memory=True, device="cpu")

    def lock_pages(self, module: Any, address: int, nbytes: int) -> bool:
        """Page-lock memory where it lies; False where the device cannot."""
        runtime = getattr(module, "cudart", None)
        if runtime is None or not module.is_initialized():
            return False
        if int(runtime().cudaHostRegister(address, nbytes, _PORTABLE)) == 0:
            return True
        with suppress(RuntimeError):  # the runtime would tell the next kernel of the refusal
            torch.empty(1, device=torch.device("cuda", module.current_device())).add_(1)
        return False

    def unlock_pages(self, module: Any, address: int) -> None:
        """End `lock_pages`, after the copies that the device has queued."""
        with suppress(RuntimeError):  # of an error of the device: it copies nothing any more
            module.synchronize()
        module.cudart().cudaHostUnregister(address)

    def pin(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the host to page-locked memory."""
        return tensor.pin_memory()

    def host_memory(self, memory: Tensor) -> Tensor:
        """Return `memory`, which is the host's whatever the device is."""
        return memory


_PORTABLE = 1  # cudaHostRegisterPortable: for every device of the process
_backend = [StreamsBackend()]


def backend() -> StreamsBackend:
    """Return what stands for the streams of this process: torch's, unless a test runs on another one."""
    return _backend[0]


@contextmanager
def use_backend(other: StreamsBackend) -> Iterator[None]:
    """Put `other` in the place of torch's streams, while inside. For tests."""
    before, _backend[0] = _backend[0], other
    try:
        yield
    finally:
        _backend[0] = before


# ---- copies


def copy_to(source: Tensor, device: torch.device, dtype: torch.dtype | None = None, *, fresh: bool = False) -> Tensor:
    """Queue a copy of `source` to `device` on the current stream; return the copy, valid on that stream.

    Waits for nothing where `source` is page-locked or on a device; a copy to the host is readable there after `record_event` only. torch
    keeps page-locked memory of its own until the copy is done, so `source` may be dropped at once, but not written to.

    Args:
        dtype: Of the copy; None: that of `source`.
        fresh: Copy also where `source` is there already in this format; else it is returned itself.
    """
    return backend().copy_to(source, device, dtype, fresh)


def copy_to_device(source: Tensor, device: torch.device) -> tuple[Tensor, DeviceEvent | None]:
    """Queue a copy of `source` to `device` on the current stream, and an event after the copy. Waits for nothing.

    Returns:
        The copy, valid on that stream; and the event before which `source` must not be written. `source` itself and None where it is there.
    """
    if not backend().needs_copy(source, device):
        return source, None
    return backend().copy_to(source, device, None, True), record_event(device)


def copy_into(out: Tensor, source: Tensor) -> None:
    """Queue a copy of `source` into `out` on the current stream; `out` is valid on that stream, on the host after an event of it.

    Waits for nothing where the host's side is page-locked. Neither side may be written, nor an `out` of the host read, before then.
    """
    backend().copy_into(out, source)


# ---- events and streams


def new_event(device: torch.device) -> DeviceEvent:
    """Create an event of the kind of `device`; it has happened until somebody records it."""
    return backend().new_event(_module(device))


def record_event(device: torch.device) -> DeviceEvent:
    """Record a new event at the end of the current stream of `device`. Waits for nothing."""
    event = backend().new_event(_module(device))
    stream = current_stream(device)
    event.record() if stream is None else event.record(stream)
    return event


def new_stream(device: torch.device) -> Any:
    """Create a stream of `device` beside its current one, without any order between both; None where it has none.

    Whatever device is current: a stream of another one would order nothing of this one's work.
    """
    with on_device(device):
        return backend().new_stream(_module(device))


def current_stream(device: torch.device) -> Any:
    """Return the stream on which this thread's work for `device` is queued; None where it has none."""
    return backend().current_stream(_module(device), device)


def on_stream(stream: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Queue this thread's work for `device` on `stream`, while inside; does nothing for None.

    What is computed inside is valid on `stream`; others wait for an event of it.
    """
    return backend().on_stream(_module(device), stream)


def wait_stream(waiter: Any, awaited: Any) -> None:
    """Let work that is queued on `waiter` from now on run after all that is queued on `awaited`. The host waits for nothing."""
    if waiter is not None and awaited is not None:
        waiter.wait_stream(awaited)


def record_use(tensor: Tensor, stream: Any) -> None:
    """Keep the memory of `tensor` from being used again before what `stream` does with it is done; nothing for None.

    Needed where a tensor is used on another stream than the one on which it was made, and dropped without an event between both.
    """
    if stream is not None and backend().is_device_memory(tensor):
        backend().record_use(tensor, stream)


def synchronize_stream(device: torch.device) -> None:
    """Block the host until the current stream of `device` is done; returns at once where it has none."""
    stream = current_stream(device)
    if stream is not None:
        stream.synchronize()


def stream_handle(device: torch.device) -> int:
    """Return the driver's handle of the current stream of a CUDA `device`, for a native kernel: its results are valid on that stream."""
    return int(current_stream(device).cuda_stream)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` records a graph, so that nobody may ask how far the device is."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def relax_capture(library: Any = None) -> bool:
    """Let this thread ask events while another one captures a CUDA graph, which would fail else; whether it may now.

    A capture in the global mode, torch's default, forbids every thread to ask how far the device is, unless the thread has said that its calls
    have nothing to do with the capture. Call it once on a thread that only asks. Nothing where there is no CUDA.

    Args:
        library: The driver's, with `cuThreadExchangeStreamCaptureMode`; by default the one of this process.
    """
    try:
        exchange = (library or ctypes.CDLL("libcuda.so.1")).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no CUDA, or ROCm
        return False
    mode = ctypes.c_int(_RELAXED)
    return int(exchange(ctypes.byref(mode))) == 0


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def current_device() -> torch.device:
    """Return the device of this thread's work, for a thread that it starts: a new one begins with device 0. Starts no device."""
    accelerator = torch.accelerator.current_accelerator()
    module = torch.cpu if accelerator is None else torch.get_device_module(accelerator)
    started = getattr(module, "is_initialized", lambda: False)()
    return torch.device(accelerator.type, module.current_device()) if accelerator and started else torch.device("cpu")


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make `device` the current one of this thread, while inside; a new thread begins with device 0. Nothing for the CPU."""
    select = getattr(_module(device), "device", None)
    if device.type == "cpu" or device.index is None or select is None:
        yield
        return
    with select(device):
        yield


# ---- memory


def is_device_memory(tensor: Tensor) -> bool:
    """Whether `tensor` is memory of a device, whose content is valid on a stream and not at once."""
    return backend().is_device_memory(tensor)


def page_locked(size: Sequence[int], dtype: torch.dtype, *, zero: bool = False) -> Tensor:
    """Allocate page-locked memory of the host, uninitialized unless `zero`. Cost: a driver call that locks page by page.

    Raises:
        RuntimeError: the system has none to lock, or there is no device.
    """
    return backend().page_locked(size, dtype, zero)


def lock_pages(address: int, nbytes: int, device: torch.device) -> bool:
    """Page-lock `nbytes` of the host at `address`, the start of a page, where they lie; whether they are locked. See `ds_accel.locked_pages`.

    Waits for nothing. Copies between them and `device` are queued from then on. Cost: as `page_locked`.
    """
    with on_device(device):
        return backend().lock_pages(_module(device), address, nbytes)


def unlock_pages(address: int, device: torch.device) -> None:
    """End `lock_pages`. Waits for all that was given to `device`, which may copy to or from there."""
    with on_device(device):
        backend().unlock_pages(_module(device), address)


def host_memory(memory: Tensor) -> Tensor:
    """Return `memory`, after it was said to be the host's: for plain memory that copies of a device go to and come from."""
    return backend().host_memory(memory)


def pin(tensor: Tensor) -> Tensor:
    """Copy a tensor of the host to page-locked memory, at once; valid on the host."""
    return backend().pin(tensor)


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type, torch.cpu)
