"""Launches CUDA kernels through the driver: compiled when they are first used, for the device that is there, and kept in the user's cache.

The choosers (`ds_ops.cuda_norms` and its siblings) say which kernel; this finds its image (in this process, on disk, from NVRTC), loads
it and queues it on the current stream. Where anything on this way is missing, `obstacle` says what, and the registry takes torch.

What is known to be needed is compiled ahead, on a thread beside the start of a job (`CudaRuntime.compile_ahead`); the ranks of a machine
begin at different kernels and look on disk before each, so they share the work.
"""

from __future__ import annotations

import functools
import logging
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import torch

import ds_ops._native as _native
from ds_accel import streams
from ds_config.errors import KernelError
from ds_ops.kernel_compilers import KernelCompiler, open_compiler
from ds_ops.kernel_images import KernelImages
from ds_ops.kernel_source import CudaKernel

__all__ = [
    "CudaRuntime",
    "Device",
    "KernelOrigin",
    "divisor",
    "launch",
    "multiprocessors",
    "obstacle",
    "open_runtime",
    "runtime",
    "use_runtime",
]

_log = logging.getLogger(__name__)
_LIBRARY = "libcuda.so.1"
_PROBE = CudaKernel("stream.cu", "convert<true>", "ConvertCall", "PPqiif0q")


@dataclass(frozen=True, slots=True)
class Device:
    """A device, as the driver describes it."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class KernelOrigin:
    """Where a loaded kernel came from: the path of its image, or the compiler that made it in `seconds`.

    unkept: why the image could not be kept; empty if it was.
    """

    kernel: CudaKernel
    device: int
    place: str
    seconds: float = 0.0
    unkept: str = ""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """An image that was made in this process and is not loaded yet; `unkept` as in `KernelOrigin`."""

    image: bytes
    seconds: float
    unkept: str


@dataclass(slots=True)
class CudaRuntime:
    """The driver, a compiler and what was loaded so far. One a process; a test puts an emulator in its place."""

    module: ModuleType
    devices: tuple[Device, ...]
    compiler: KernelCompiler
    images: KernelImages
    origins: list[KernelOrigin] = field(default_factory=list)
    _functions: dict[tuple[str, int], tuple[int, struct.Struct]] = field(default_factory=dict)
    _compiled: dict[tuple[str, str], _Compiled] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    def function(self, kernel: CudaKernel, device: int) -> tuple[int, struct.Struct]:
        """Return the loaded kernel's handle on `device`, and the form of its argument; compile it first, if need be.

        Waits for the thread of `compile_ahead` only while that compiles this very kernel.
        """
        key = (kernel.instance, device)
        if (loaded := self._functions.get(key)) is None:
            with self._lock(kernel):
                if (loaded := self._functions.get(key)) is None:
                    loaded = self._functions[key] = self._load(kernel, device), struct.Struct(kernel.layout)
        return loaded

    def compile_ahead(self, kernels: Sequence[CudaKernel], device: int, *, first: int = 0) -> threading.Thread:
        """Compile the images of `kernels` that are not on disk, one after another on a thread of its own. Returns the thread, started.

        The driver is not touched. A kernel that does not compile says so where it is first used. A process that ends waits for the
        kernel that is being compiled, and for no other.

        Args:
            first: The kernel to begin at, modulo their number: ranks of one machine give their own.
        """
        turn = first % max(1, len(kernels))
        ordered = (*kernels[turn:], *kernels[:turn])
        thread = threading.Thread(target=self._compile_all, args=(ordered, device), name="ds-ops-compile")
        thread.start()
        return thread

    def _compile_all(self, kernels: Sequence[CudaKernel], device: int) -> None:
        for kernel in kernels:
            if not threading.main_thread().is_alive():
                return
            with self._lock(kernel):
                try:
                    architecture = self.compiler.target(self.devices[device].capability)
                    if (kernel.instance, device) not in self._functions and self.images.read(
                        kernel, architecture
                    ) is None:
                        self._compile(kernel, architecture)
                except KernelError as error:
                    _log.debug("%s is not compiled ahead: %s", kernel.instance, error.message)

    def _lock(self, kernel: CudaKernel) -> threading.Lock:
        return self._locks.setdefault(kernel.instance, threading.Lock())

    def _compile(self, kernel: CudaKernel, architecture: str) -> _Compiled:
        start = time.monotonic()
        image = self.compiler.compile(kernel, architecture)
        seconds = time.monotonic() - start
        compiled = _Compiled(image, seconds, self.images.write(kernel, architecture, image))
        self._compiled[kernel.instance, architecture] = compiled
        return compiled

    def _load(self, kernel: CudaKernel, device: int) -> int:
        architecture = self.compiler.target(self.devices[device].capability)
        compiled = self._compiled.pop((kernel.instance, architecture), None)
        if compiled is None and (image := self.images.read(kernel, architecture)) is not None:
            handle, why = self.module.load(device, image, kernel.entry)
            if not why:
                self.origins.append(KernelOrigin(kernel, device, str(self.images.path(kernel, architecture))))
                return int(handle)
        compiled = compiled or self._compile(kernel, architecture)
        self._compiled.pop((kernel.instance, architecture), None)
        handle, why = self.module.load(device, compiled.image, kernel.entry)
        if why:
            raise KernelError(
                f"the driver does not load {kernel.instance} for {architecture}, made by {self.compiler.name}: {why}.",
                code="kernel-compile",
                fix="Use a torch whose CUDA the driver knows, or a newer driver; until then torch's own kernels run.",
            )
        self.origins.append(KernelOrigin(kernel, device, self.compiler.name, compiled.seconds, compiled.unkept))
        return int(handle)

    def place(self, device: torch.device) -> tuple[int, int]:
        """Return the index of `device`, and the handle of its current stream."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        return index, streams.stream_handle(device)


def open_runtime() -> CudaRuntime:
    """Open the driver and a compiler.

    Raises:
        KernelError: "kernel-missing" without the module, a driver or a device; "kernel-compile" without a compiler.
    """
    loaded = _native.load("_cuda")
    reason = loaded.reason
    if loaded.module is not None:
        reason = loaded.module.open_driver(_LIBRARY)
        if torch.version.hip:
            reason = "this torch is built for ROCm, whose devices run no CUDA kernel"
    if reason or loaded.module is None:
        raise KernelError(f"CUDA kernels cannot run here: {reason}.", code="kernel-missing", fix="Run `ds doctor`.")
    module = loaded.module
    devices = tuple(Device(name, (major, minor), count) for name, major, minor, count in module.devices())
    compiler = open_compiler(module, module.driver_version())
    return CudaRuntime(module, devices, compiler, KernelImages.of(compiler.identity))


@functools.cache
def _opened() -> CudaRuntime:
    return open_runtime()


_replacement: list[CudaRuntime] = []


def runtime() -> CudaRuntime:
    """Return this process's runtime, opened on first use. Raises as `open_runtime`."""
    return _replacement[-1] if _replacement else _opened()


@contextmanager
def use_runtime(replacement: CudaRuntime) -> Iterator[CudaRuntime]:
    """Put another runtime in the place of the process's own, while inside: for tests."""
    _replacement.append(replacement)
    obstacle.cache_clear()
    try:
        yield replacement
    finally:
        _replacement.pop()
        obstacle.cache_clear()


@functools.cache
def obstacle() -> str:
    """Return why no CUDA kernel can run in this process; an empty string if they can.

    A small kernel is compiled, and loaded on the current device: a device that is too old for the compiler, or for whose images the driver
    is too old, is found out here and not in the middle of a step. Other devices are looked at only: a context takes some hundred MiB, and
    ranks that load on a device which is not theirs would all take them from the first one.
    """
    try:
        here = runtime()
        for device in here.devices:
            here.compiler.target(device.capability)
        here.function(_PROBE, torch.cuda.current_device() if torch.cuda.is_available() else 0)
    except KernelError as error:
        return error.message
    return ""


def launch(kernel: CudaKernel, device: torch.device, blocks: int, *arguments: object) -> None:
    """Queue `blocks` blocks of `kernel` on the current stream of `device`, where the result is valid; nothing waits.

    arguments: the fields of the kernel's call, addresses of memory that lives until the stream has passed this point.

    Raises:
        KernelError: "kernel-compile" if the kernel cannot be made; "kernel-launch" if the driver refuses the launch.
    """
    if blocks == 0:
        return
    if not 0 < blocks < 1 << 31:
        raise KernelError(
            f"{kernel.instance}: {blocks} blocks are more than one launch may have.",
            code="kernel-launch",
            fix="Use smaller tensors a call.",
        )
    here = runtime()
    index, stream = here.place(device)
    handle, form = here.function(kernel, index)
    why = here.module.launch(index, handle, blocks, kernel.threads, form.pack(*arguments), stream)
    if why:
        raise KernelError(
            f"{kernel.instance}: the driver refuses the launch of {blocks} blocks of {kernel.threads} threads: {why}.",
            code="kernel-launch",
            fix="An error of an earlier kernel may show here: run with CUDA_LAUNCH_BLOCKING=1, then report it.",
        )


def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors `device` has."""
    here = runtime()
    return here.devices[here.place(device)[0]].multiprocessors


@functools.lru_cache(maxsize=4096)
def divisor(d: int) -> tuple[int, int]:
    """Return (factor, shift) with a // d == a * factor >> shift for 0 <= a < 2^31, as native/cuda/device.h takes it.

    Source: Granlund and Montgomery 1994, theorem 4.2.
    """
    shift = 31 + max(d - 1, 0).bit_length()
    return -(-(1 << shift) // d), shift
