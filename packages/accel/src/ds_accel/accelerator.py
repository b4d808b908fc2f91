"""One class for every device: its facts, and verbs that go through the device's torch module.

What a device does not have is a value that does nothing (no streams: a null context) where that keeps programs right, and an
`UnsupportedError` that names device and verb where it would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

import ds_accel.streams as streams
from ds_accel.device_facts import Capability, DeviceFacts
from ds_accel.device_memory import MemoryStats, device_memory, host_memory, reset_host_peak
from ds_accel.device_timer import DeviceTimer, device_timer, host_timer
from ds_accel.pinned import PinnedPool
from ds_accel.probes import comm_backend, graphs, supports, triton
from ds_accel.rng import RngStreams
from ds_config.errors import UnsupportedError

__all__ = ["Accelerator"]


class Accelerator:
    """A kind of device on this machine. Making one starts nothing; `get_accelerator()` returns the process's own.

    Attributes:
        facts: What differs between devices, as data.
        module: The device's torch module (`torch.cuda`, ...), for what has no verb here.
    """

    def __init__(self, facts: DeviceFacts, module: Any) -> None:
        self.facts, self.module = facts, module

    def __repr__(self) -> str:
        return f"Accelerator({self.name!r})"

    # --- identity

    @property
    def name(self) -> str:
        """What users call it ("cuda" on ROCm too)."""
        return self.facts.name

    @property
    def variant(self) -> str:
        """ "rocm" where torch's "cuda" is AMD's, else the name."""
        return "rocm" if self.facts.torch_type == "cuda" and torch.version.hip is not None else self.name

    @property
    def comm_backend(self) -> str:
        """The torch.distributed backend for tensors of this device.

        Raises:
            UnsupportedError: neither the facts nor torch know one ("accel-no-backend").
        """
        backend = comm_backend(self.facts)
        registered = dist.Backend.default_device_backend_map if dist.is_available() else {}
        backend = backend or registered.get(self.facts.torch_type, "")
        if not backend:
            raise UnsupportedError(
                f"no torch.distributed backend is known for {self.name}.",
                code="accel-no-backend",
                fix="Name one in Facts.backends, or register it with torch.distributed.Backend.register_backend.",
            )
        return backend

    @property
    def compile_backend(self) -> str:
        """The torch.compile backend."""
        return self.facts.compile_backend

    # --- devices

    def device(self, index: int | None = None) -> torch.device:
        """Return the torch.device of `index`, or of the device type when `index` is None.

        The CPU is one device, whatever the index.
        """
        if index is None or self.facts.torch_type == "cpu":
            return torch.device(self.facts.torch_type)
        return torch.device(self.facts.torch_type, index)

    def device_count(self) -> int:
        """Count the devices that this process sees, without initializing any of them."""
        return int(self._verb("device_count")())

    def current_index(self) -> int:
        """Return the index of the device on which new tensors are allocated.

        Initializes the device; 0 where there is only one.
        """
        current = getattr(self.module, "current_device", int)()
        return current if isinstance(current, int) else 0  # torch.cpu answers "cpu"

    def set_device(self, index: int) -> None:
        """Send new tensors of the kind to `index`; does nothing where there is only one device.

        Raises:
            UnsupportedError: there is no such device ("accel-index").
        """
        if not self._indexed:
            return
        count = self.device_count()
        if not 0 <= index < count:
            raise UnsupportedError(
                f"{self.name} device {index} was asked for, this process sees {count}.",
                code="accel-index",
                fix=f"Start fewer ranks on this host, or change {self.facts.visible_env or 'the visible devices'}.",
            )
        self._verb("set_device")(index)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this kind of device."""
        return tensor.device.type == self.facts.torch_type

    # --- order of work

    def synchronize(self, index: int | None = None) -> None:
        """Wait until everything that was given to device `index` (None: the current one) is done."""
        verb = self._verb("synchronize")
        verb() if index is None or not self._indexed else verb(index)

    def new_stream(self) -> Any:
        """Create a stream on the current device; return None where the device has no streams."""
        return streams.backend().new_stream(self.module)

    def current_stream(self) -> Any:
        """Return the stream on which work is queued now; None where the device has no streams."""
        return streams.backend().current_stream(self.module)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Send work to `stream` inside; does nothing for None."""
        return streams.backend().on_stream(self.module, stream)

    def new_event(self) -> Any:
        """Create an event without timing (record, wait, query, synchronize).

        Where the device has no events or is synchronous, the event is always complete.
        """
        return streams.backend().new_event(self.module)

    def timer(self) -> DeviceTimer:
        """Create a timer of the work on the current stream.

        Reads the device's clock where the device has readable timing events, else the host's clock.
        """
        if self.facts.host_timers or not hasattr(self.module, "Event"):
            return host_timer(self.synchronize)
        return device_timer(self.module)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Name a stretch of work for the vendor's profiler; does nothing where there is none."""
        markers = getattr(self.module, self.facts.ranges, None) if self.facts.ranges else None
        if markers is None:
            yield
            return
        markers.range_push(name)
        try:
            yield
        finally:
            markers.range_pop()

    # --- memory

    def memory(self, index: int | None = None) -> MemoryStats:
        """Return the bytes in use on device `index` (None: the current device).

        On the CPU, the numbers are those of this process.
        """
        if self.module is torch.cpu:
            host = host_memory()
            return MemoryStats(host.rss, host.peak_rss, host.rss, host.peak_rss, host.available, host.total)
        return device_memory(self.module, self.current_index() if index is None else index)

    def reset_peak_memory(self, index: int | None = None) -> None:
        """Start the peaks of `memory` anew from what is in use now."""
        reset = getattr(self.module, "reset_peak_memory_stats", None)
        if reset is not None:
            reset(self.current_index() if index is None else index)
        elif self.module is torch.cpu:
            reset_host_peak()

    def empty_cache(self) -> None:
        """Return what the device's allocator keeps for reuse; does nothing where it keeps nothing."""
        getattr(self.module, "empty_cache", _nothing)()

    def pinned(self, limit_bytes: int, *, name: str = "pinned") -> PinnedPool:
        """Create a pool of host memory for copies to and from this device, bounded to `limit_bytes`."""
        return PinnedPool(limit_bytes, pinned=self.facts.pinned, name=name)

    # --- random numbers

    def rng(self, seed: int, index: int | None = None) -> RngStreams:
        """Create named random streams on device `index` (None: the current device)."""
        where = self.current_index() if index is None else index
        return RngStreams(seed, self.device(where if self._indexed else None), self.module)

    def manual_seed(self, seed: int) -> None:
        """Seed the global generators of the host and of every device of the kind."""
        torch.manual_seed(seed)
        getattr(self.module, "manual_seed_all", getattr(self.module, "manual_seed", _ignore))(seed)

    # --- what it can

    def supports(self, dtype: torch.dtype) -> Capability:
        """Whether tensors of `dtype` can be computed with here, and why. May start the device, to read its capability."""
        return supports(self.facts, self.module, str(dtype).removeprefix("torch."))

    def graphs(self) -> Capability:
        """Whether work can be recorded once and replayed, and why."""
        return graphs(self.facts, self.module)

    def triton(self) -> Capability:
        """Whether Triton kernels can run, and why. May start the device, to read its capability."""
        return triton(self.facts, self.module)

    def new_graph(self) -> Any:
        """Create an empty graph, which `capture` records and its `replay()` runs.

        Raises:
            UnsupportedError: the device has no graphs ("accel-no-graphs").
        """
        verdict = self.graphs()
        if not verdict:
            raise UnsupportedError(f"{verdict.reason}.", code="accel-no-graphs", fix="Run the work directly.")
        return getattr(self.module, self.facts.graph_class)()

    def capture(self, graph: Any, *, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Record the work inside into `graph`; `pool` is the memory pool of an earlier graph to share.

        Raises:
            UnsupportedError: the device has no graphs ("accel-no-graphs").
        """
        capture = getattr(self.module, "graph", None)
        if capture is None:
            raise UnsupportedError(
                f"{self.name} cannot record graphs.", code="accel-no-graphs", fix="Run the work directly."
            )
        context: AbstractContextManager[Any] = capture(graph, pool=pool, stream=stream)
        return context

    # --- inside

    @property
    def _indexed(self) -> bool:
        """Whether the functions of the module take a device index; the CPU and mps are one device."""
        return self.module is not torch.cpu and hasattr(self.module, "current_device")

    def _verb(self, name: str) -> Callable[..., Any]:
        verb = getattr(self.module, name, None)
        if verb is None:
            raise UnsupportedError(
                f"{self.name}: {getattr(self.module, '__name__', self.module)} has no {name}().",
                code="accel-missing-verb",
                fix="Run ds_accel.contract.run on this device: it lists everything its module lacks.",
            )
        function: Callable[..., Any] = verb
        return function


def _nothing() -> None:
    return None


def _ignore(_value: object) -> None:
    return None
