"""Asynchronous file transfers between memory and files, past the page cache where the file system allows it.

Words: a *transfer* moves one contiguous range of memory to or from one file at one offset; it is cut into *blocks* of which
up to `queue_depth` a worker are in flight. A *backend* is how the kernel is asked: io_uring, libaio (kernel AIO), threads
(pread/pwrite), `python` (the same threads without the native module), or `gds` (`ds_ops.gds`: memory of a CUDA device,
without a copy through the host, where NVIDIA's cuFile is installed).

    with AsyncIO() as io:
        saved = io.write_file("shard.bin", tensor, sync=True)   # returns at once
        saved.wait()                                           # raises what went wrong, with file and offset

Memory may be a CPU tensor (contiguous), or anything with the buffer protocol; it must not change before the transfer
ended. Memory aligned to 4096 bytes (`ds_accel`'s pinned pool) is used in place; other memory is staged block by block.
"""

from __future__ import annotations

import errno as errnos
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, Literal, Protocol

import torch

import ds_ops._call as _call
import ds_ops._native as _native_modules
from ds_config.errors import ConfigError, KernelError
from ds_ops.gds import FIRST_OWN_ERROR, Flight, GdsEngine, find_library

__all__ = ["AsyncIO", "Backend", "FileTransferError", "IOSettings", "Transfer", "backends"]

Backend = Literal["auto", "io_uring", "libaio", "threads", "python", "gds"]
_NATIVE_KINDS = {"io_uring": 0, "libaio": 1, "threads": 2}
_END_OF_FILE = -1


class FileTransferError(KernelError, OSError):
    """A transfer did not happen as asked; `errno`, `filename` and `offset` say what, where and from which byte."""

    offset: int = 0

    def __str__(self) -> str:  # OSError's own text would hide the message
        return KernelError.__str__(self)


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
    """Every backend for memory of the host with the reason why it does not work on this machine now, or an empty text. Asks the kernel."""
    return {name: _why_not(name) for name in (*_NATIVE_KINDS, "python")}


def _why_not(backend: str) -> str:
    if backend == "python":
        return ""
    native = _native()
    if native is None:
        return "the native module of ds-ops is not installed (see `ds doctor`)"
    code = native.io_probe(_NATIVE_KINDS[backend])
    return f"refused by the kernel or the container: {os.strerror(code)}" if code else ""


class Transfer:
    """One transfer under way; made by `AsyncIO`, ended when `wait` returned."""

    __slots__ = ("_flight", "_told", "nbytes", "offset", "path", "write")

    def __init__(self, flight: _Flight, path: str, span: tuple[int, int], write: bool) -> None:
        self._flight, self.path, self.write = flight, path, write
        self.offset, self.nbytes = span
        self._told = False  # a failure is raised to whoever waits first, and not again at close

    def done(self) -> bool:
        """Whether the transfer ended, well or badly. Never blocks."""
        return self._flight.ended()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every byte is transferred.

        Raises:
            FileTransferError: the kernel reported an error ("io-failed"), or the file ended early ("io-end-of-file").
            TimeoutError: not ended within `timeout_s`; the transfer goes on.
        """
        if not self._flight.wait(-1.0 if timeout_s is None else timeout_s):
            raise TimeoutError(f"{self!r} did not end within {timeout_s} s")
        code, at = self._flight.outcome()
        if code:
            self._told = True
            raise _failure(self, code, at)

    def forgettable(self) -> bool:
        """Ended, and nobody has to hear of it any more."""
        return self.done() and (self._told or not self._flight.outcome()[0])

    def __repr__(self) -> str:
        verb = "write" if self.write else "read"
        return f"{verb} of {self.nbytes} bytes at offset {self.offset} of {self.path}"


class AsyncIO:
    """Submits transfers and keeps their memory alive until they end.

    Raises:
        ConfigError: the backend asked for does not work here ("io-backend").
        UnsupportedError: GPUDirect Storage was asked for and is not there ("io-gds").
        KernelError: the kernel gave no resources for it ("io-setup").
    """

    def __init__(self, settings: IOSettings = IOSettings()) -> None:
        self.settings = settings
        self.backend = _choose(settings.backend)
        self._active: list[Transfer] = []
        self._lock = threading.Lock()
        self._engine: _Engine | None = _open_engine(self.backend, settings)

    def read(self, path: str | os.PathLike[str], into: torch.Tensor | Any, offset: int = 0) -> Transfer:
        """Fill `into` with the bytes of `path` from `offset` on. A file that ends earlier is an error."""
        return self._start(path, into, offset, _Mode())

    def write(
        self, path: str | os.PathLike[str], data: torch.Tensor | Any, offset: int = 0, *, sync: bool = False
    ) -> Transfer:
        """Put `data` at `offset` of `path`; other bytes of the file stay. `sync` also waits for the device."""
        return self._start(path, data, offset, _Mode(write=True, sync=sync))

    def write_file(self, path: str | os.PathLike[str], data: torch.Tensor | Any, *, sync: bool = False) -> Transfer:
        """Make `path` hold exactly `data`: a longer file is cut."""
        return self._start(path, data, 0, _Mode(write=True, sync=sync, truncate=True))

    def wait_all(self) -> None:
        """Wait for every transfer; then raise the first failure (others are in its `__notes__`)."""
        with self._lock:
            pending, self._active = [t for t in self._active if not t.forgettable()], []
        failures: list[FileTransferError] = []
        for transfer in pending:
            try:
                transfer.wait()
            except FileTransferError as error:
                failures.append(error)
        if failures:
            for other in failures[1:]:
                failures[0].add_note(str(other))
            raise failures[0]

    def close(self) -> None:
        """Wait for what is under way and end the workers. Failures nobody waited for are raised."""
        try:
            self.wait_all()
        finally:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()

    def __enter__(self) -> AsyncIO:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except FileTransferError as late:
            error.add_note(str(late))

    def _start(self, path: str | os.PathLike[str], memory: Any, offset: int, mode: _Mode) -> Transfer:
        if self._engine is None:
            raise KernelError("a closed AsyncIO was used", code="io-closed", fix="Make a new one, or close it later.")
        if offset < 0:
            raise KernelError(
                f"offset {offset} of {os.fspath(path)} is negative", code="io-offset", fix="Count from 0."
            )
        view, name = self._engine.view(memory, not mode.write), os.fspath(path)
        files = _open_files(name, mode, self.settings.direct, self._engine)
        try:
            flight = self._engine.submit(
                view, files.direct, files.buffered, files.alignment, offset, mode.write, mode.truncate, mode.sync
            )
        except BaseException:
            files.close()
            raise
        transfer = Transfer(flight, name, (offset, view.nbytes), mode.write)
        with self._lock:
            # What ended well is forgotten here; a failure stays until somebody waits for it.
            self._active = [t for t in self._active if not t.forgettable()]
            self._active.append(transfer)
        return transfer


# ---- memory and files


@dataclass(frozen=True, slots=True)
class _Mode:
    write: bool = False
    sync: bool = False
    truncate: bool = False


@dataclass(frozen=True, slots=True)
class _Files:
    """Descriptors of one file; the engine closes them. `direct` is -1 where O_DIRECT does not work."""

    direct: int
    buffered: int
    alignment: int

    def close(self) -> None:
        for fd in (self.direct, self.buffered):
            if fd >= 0:
                os.close(fd)


def _open_files(path: str, mode: _Mode, direct: bool, engine: _Engine) -> _Files:
    flags = (os.O_RDWR | os.O_CREAT) if mode.write else os.O_RDONLY
    try:
        buffered = os.open(path, flags | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _open_failure(error, path, mode.write) from None
    alignment = engine.direct_alignment(buffered) if direct else 0
    if not alignment:
        return _Files(-1, buffered, 1)
    try:
        return _Files(os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT), buffered, alignment)
    except OSError:  # a file system without O_DIRECT says EINVAL; buffered transfers are right everywhere
        return _Files(-1, buffered, 1)


def _bytes_of(memory: Any, *, writable: bool) -> memoryview:
    """`memory` as a flat view of bytes: no copy, and the exporter stays alive with the view."""
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


def _open_failure(error: OSError, path: str, write: bool) -> FileTransferError:
    number = error.errno or errnos.EIO
    verb = "write" if write else "read"
    return _error(f"cannot open {path} to {verb}: {os.strerror(number)}", number, path, 0)


def _failure(transfer: Transfer, code: int, at: int) -> FileTransferError:
    if code == _END_OF_FILE:
        text = f"{transfer!r}: the file ends at byte {at}, {transfer.offset + transfer.nbytes - at} bytes early"
        return _error(text, errnos.EIO, transfer.path, at, code="io-end-of-file")
    if code >= FIRST_OWN_ERROR:
        return _error(f"{transfer!r} failed at byte {at}: cuFile error {code}", errnos.EIO, transfer.path, at)
    text = f"{transfer!r} failed at byte {at}: {os.strerror(code)}"
    return _error(text, code, transfer.path, at)


def _error(text: str, number: int, path: str, at: int, code: str = "io-failed") -> FileTransferError:
    fixes = {
        errnos.ENOSPC: "Free space on that file system, or choose another directory.",
        errnos.ENOENT: "Create the directory, or correct the path.",
        errnos.EIO: "The file is damaged, shorter than expected, or the device fails; check it before retrying.",
    }
    error = FileTransferError(text, code=code, fix=fixes.get(number, "See the operating system's error above."))
    error.errno, error.filename, error.offset = number, path, at
    return error


# ---- engines: native, and plain Python behind the same four verbs


class _Flight(Protocol):
    def wait(self, seconds: float) -> bool: ...
    def ended(self) -> bool: ...
    def outcome(self) -> tuple[int, int]: ...


class _Engine(Protocol):
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
    ) -> _Flight: ...

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


def _open_engine(backend: str, settings: IOSettings) -> _Engine:
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
    ) -> _Flight:
        flight: _Flight = self._engine.submit(memory, direct_fd, buffered_fd, alignment, offset, write, truncate, sync)
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
    ) -> _Flight:
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
