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
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from ds_config.errors import KernelError
from ds_ops.gds import FIRST_OWN_ERROR
from ds_ops.io_engines import _END_OF_FILE, Backend, IOEngine, IOSettings, _choose, _InFlight, _open_engine, backends

__all__ = ["AsyncIO", "Backend", "FileTransferError", "IOSettings", "Transfer", "backends"]


class FileTransferError(KernelError, OSError):
    """A transfer did not happen as asked; `errno`, `filename` and `offset` say what, where and from which byte."""

    offset: int = 0

    def __str__(self) -> str:  # OSError's own text would hide the message
        return KernelError.__str__(self)


_USUAL = IOSettings()


class Transfer:
    """One transfer under way; made by `AsyncIO`, ended when `wait` returned."""

    __slots__ = ("_flight", "_raised", "nbytes", "offset", "path", "write")

    def __init__(self, flight: _InFlight, path: str, span: tuple[int, int], write: bool) -> None:
        self._flight, self.path, self.write = flight, path, write
        self.offset, self.nbytes = span
        self._raised = False  # a failure is raised by the first wait, and not again at close

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
            self._raised = True
            raise _failure(self, code, at)

    def forgettable(self) -> bool:
        """Return whether the transfer has ended and its failure, if any, was raised."""
        return self.done() and (self._raised or not self._flight.outcome()[0])

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

    def __init__(self, settings: IOSettings = _USUAL) -> None:
        self.settings = settings
        self.backend = _choose(settings.backend)
        self._active: list[Transfer] = []
        self._lock = threading.Lock()
        self._engine: IOEngine | None = _open_engine(self.backend, settings)

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
        """Wait for what is under way and end the workers. Failures that no wait has raised are raised."""
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
            # What ended well is forgotten here; a failure stays until a wait raises it.
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
class _Descriptors:
    """Descriptors of one file; the engine closes them. `direct` is -1 where O_DIRECT does not work."""

    direct: int
    buffered: int
    alignment: int

    def close(self) -> None:
        for fd in (self.direct, self.buffered):
            if fd >= 0:
                os.close(fd)


def _open_files(path: str, mode: _Mode, direct: bool, engine: IOEngine) -> _Descriptors:
    flags = (os.O_RDWR | os.O_CREAT) if mode.write else os.O_RDONLY
    try:
        buffered = os.open(path, flags | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _open_failure(error, path, mode.write) from None
    alignment = engine.direct_alignment(buffered) if direct else 0
    if not alignment:
        return _Descriptors(-1, buffered, 1)
    try:
        return _Descriptors(os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT), buffered, alignment)
    except OSError:  # a file system without O_DIRECT says EINVAL; buffered transfers are right everywhere
        return _Descriptors(-1, buffered, 1)


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
