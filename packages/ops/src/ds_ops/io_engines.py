"""Engines that move bytes between files and memory: native ones, and plain Python behind the same four verbs."""

from __future__ import annotations

import errno as errnos
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, Protocol

import torch

import ds_ops._call as _call
import ds_ops._native as _native_modules
from ds_config.errors import ConfigError, KernelError
from ds_ops.gds import Flight, GdsEngine, find_library

__all__ = ["Backend", "Flight", "IOEngine", "IOSettings", "backends"]


Backend = Literal["auto", "io_uring", "libaio", "threads", "python", "gds"]


_NATIVE_KINDS = {"io_uring": 0, "libaio": 1, "threads": 2}


_END_OF_FILE = -1


@dataclass(frozen=True, slots=True)
class IOSettings:
    """How transfers are cut and queued.

    Attributes:
        block_bytes: Bytes of one request to the kernel; a multiple of 4096.
        queue_depth: Requests in flight per worker.
        workers: Threads that submit and reap.
        backend: `"auto"` takes the first of io_uring, libaio, threads, python that works here. `"gds"` is for tensors on a
            CUDA device, and only for them.
        direct: Open files with O_DIRECT where the file system has it.
        single_submit: One system call a request, instead of one for all that are ready. io_uring and libaio.
        overlap: Refill the queue as requests end; false: when all of it has ended. io_uring and libaio.
    """

    block_bytes: int = 1 << 20
    queue_depth: int = 32
    workers: int = 1
    backend: Backend = "auto"
    direct: bool = True
    single_submit: bool = False
    overlap: bool = True

    def __post_init__(self) -> None:
        wrong = []
        if self.block_bytes < 4096 or self.block_bytes % 4096:
            wrong.append(f"block_bytes must be a positive multiple of 4096, found {self.block_bytes}")
        if not 1 <= self.queue_depth <= 4096:
            wrong.append(f"queue_depth must be between 1 and 4096, found {self.queue_depth}")
        if not 1 <= self.workers <= 64:
            wrong.append(f"workers must be between 1 and 64, found {self.workers}")
        if self.backend not in ("auto", "python", "gds", *_NATIVE_KINDS):
            wrong.append(f"backend must be auto, io_uring, libaio, threads, python or gds, found {self.backend!r}")
        if wrong:
            raise ConfigError("\n".join(wrong), code="io-settings", fix="Change the aio section or the IOSettings.")


def backends() -> dict[str, str]:
    """Return every backend for host memory with the reason for its absence now; an empty string if usable.

    Queries the kernel.
    """
    return {name: _why_not(name) for name in (*_NATIVE_KINDS, "python")}


def _why_not(backend: str) -> str:
    if backend == "python":
        return ""
    native = _native()
    if native is None:
        return "the native module of ds-ops is not installed (see `ds doctor`)"
    code = native.io_probe(_NATIVE_KINDS[backend])
    return f"refused by the kernel or the container: {os.strerror(code)}" if code else ""


def _bytes_of(memory: Any, *, writable: bool) -> memoryview:
    """Return `memory` as a flat view of bytes, without a copy; the exporter stays alive with the view."""
    if isinstance(memory, torch.Tensor):
        if memory.device.type != "cpu" or not memory.is_contiguous():
            raise KernelError(
                f"a transfer needs a contiguous CPU tensor, found device {memory.device}, shape {tuple(memory.shape)}, "
                f"strides {tuple(memory.stride())}",
                code="io-memory",
                fix="Call .contiguous(), or copy to a pinned CPU buffer first.",
            )
        if memory.numel() == 0:
            return memoryview(bytearray())
        memory = memory.detach().reshape(-1).view(torch.uint8).numpy()
    view = memoryview(memory)
    if not view.c_contiguous or (writable and view.readonly):
        raise KernelError(
            f"a transfer needs contiguous{' writable' if writable else ''} memory, found {type(memory).__name__}",
            code="io-memory",
            fix="Pass a bytearray, a contiguous array or a tensor.",
        )
    return view.cast("B") if view.nbytes else memoryview(bytearray())


class _InFlight(Protocol):
    def wait(self, seconds: float) -> bool: ...
    def ended(self) -> bool: ...
    def outcome(self) -> tuple[int, int]: ...


class IOEngine(Protocol):
    def view(self, memory: Any, writable: bool) -> Any: ...

    def submit(
        self,
        memory: Any,
        direct_fd: int,
        buffered_fd: int,
        alignment: int,
        offset: int,
        write: bool,
        truncate: bool,
        sync: bool,
    ) -> _InFlight: ...

    def direct_alignment(self, fd: int) -> int: ...
    def close(self) -> None: ...


def _native() -> ModuleType | None:
    return _native_modules.load("_cpu").module


def _choose(wanted: Backend) -> str:
    if wanted == "auto":  # stops at the first that works: to ask for libaio alone takes 30 ms
        return next(name for name in (*_NATIVE_KINDS, "python") if not _why_not(name))
    if wanted != "gds" and (why := _why_not(wanted)):  # gds says so itself, when its library is opened
        raise ConfigError(
            f"I/O backend {wanted!r} was asked for: {why}",
            code="io-backend",
            fix=f"Use {', '.join(name for name, other in backends().items() if not other)}, or auto.",
        )
    return wanted


def _open_engine(backend: str, settings: IOSettings) -> IOEngine:
    if backend == "python":
        return _PythonEngine(settings)
    if backend == "gds":
        return GdsEngine(settings.block_bytes, settings.queue_depth * settings.workers, find_library())
    try:
        return _NativeEngine(backend, settings)
    except OSError as error:
        raise KernelError(
            f"{backend} with queue depth {settings.queue_depth} and {settings.workers} workers was refused: {error}",
            code="io-setup",
            fix="Lower queue_depth or workers, raise fs.aio-max-nr or RLIMIT_MEMLOCK, or use the threads backend.",
        ) from error


class _NativeEngine:
    """The C++ engine; see native/include/ds/io.h for what it promises."""

    def __init__(self, backend: str, settings: IOSettings) -> None:
        self._native = _call.native()
        self._engine = self._native.IoEngine(
            _NATIVE_KINDS[backend],
            settings.block_bytes,
            settings.queue_depth,
            settings.workers,
            settings.single_submit,
            settings.overlap,
        )

    def view(self, memory: Any, writable: bool) -> memoryview:
        return _bytes_of(memory, writable=writable)

    def submit(
        self,
        memory: memoryview,
        direct_fd: int,
        buffered_fd: int,
        alignment: int,
        offset: int,
        write: bool,
        truncate: bool,
        sync: bool,
    ) -> _InFlight:
        flight: _InFlight = self._engine.submit(
            memory, direct_fd, buffered_fd, alignment, offset, write, truncate, sync
        )
        return flight

    def direct_alignment(self, fd: int) -> int:
        return int(self._native.io_direct_alignment(fd))

    def close(self) -> None:
        self._engine.close()


class _PythonEngine:
    """preadv and pwrite on a thread pool: the fallback where nothing could be compiled. Buffered only."""

    def __init__(self, settings: IOSettings) -> None:
        self._block = settings.block_bytes
        self._pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="ds-io")

    def view(self, memory: Any, writable: bool) -> memoryview:
        return _bytes_of(memory, writable=writable)

    def direct_alignment(self, fd: int) -> int:
        return 0

    def close(self) -> None:
        self._pool.shutdown()

    def submit(
        self,
        memory: memoryview,
        direct_fd: int,
        buffered_fd: int,
        alignment: int,
        offset: int,
        write: bool,
        truncate: bool,
        sync: bool,
    ) -> _InFlight:
        flight = Flight()
        tail: Sequence[bool] = (write and truncate, write and sync)
        self._pool.submit(self._run, flight, memory, buffered_fd, offset, write, tail)
        return flight

    def _run(self, flight: Flight, memory: memoryview, fd: int, offset: int, write: bool, tail: Sequence[bool]) -> None:
        at = 0
        try:
            try:
                while at < memory.nbytes:
                    part = memory[at : at + self._block]
                    moved = os.pwrite(fd, part, offset + at) if write else os.preadv(fd, [part], offset + at)
                    if moved == 0:
                        flight.end((errnos.ENOSPC if write else _END_OF_FILE, offset + at))
                        return
                    at += moved
                if tail[0]:
                    os.ftruncate(fd, offset + memory.nbytes)
                if tail[1]:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            flight.end((error.errno or errnos.EIO, offset + at))
        else:
            flight.end((0, 0))
