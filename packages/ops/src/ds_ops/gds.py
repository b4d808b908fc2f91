"""GPUDirect Storage: files to and from device memory without a copy through the host, by NVIDIA's cuFile library.

An engine behind `ds_ops.io.AsyncIO(IOSettings(backend="gds"))`, where the library is installed; nothing is linked to it.
Names and layouts are those of the cuFile API reference (libcufile, `cufile.h`). Every block is one blocking call of the
library on a worker thread. It counts on the file being opened past the page cache; where the file system does not have
that, the library may copy through the host itself (its compatibility mode).
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

import ds_ops._call as _call
from ds_accel import streams
from ds_config.errors import KernelError, UnsupportedError

__all__ = ["FIRST_OWN_ERROR", "CuFile", "DeviceBytes", "Flight", "GdsEngine", "device_bytes", "find_library", "why_not"]

LIBRARIES = ("libcufile.so.0", "libcufile.so")
END_OF_FILE = -1
_OPAQUE_FD = 1  # CU_FILE_HANDLE_TYPE_OPAQUE_FD
FIRST_OWN_ERROR = 5000  # codes of the library start here; below it are errno values


class _Error(ctypes.Structure):
    """CUfileError_t: 0 in `err` is success."""

    _fields_ = (("err", ctypes.c_int), ("cuda", ctypes.c_int))


class _GdsHandle(ctypes.Union):
    _fields_ = (("fd", ctypes.c_int), ("handle", ctypes.c_void_p))


class _Description(ctypes.Structure):
    """CUfileDescr_t."""

    _fields_ = (("type", ctypes.c_int), ("handle", _GdsHandle), ("operations", ctypes.c_void_p))


class CuFile:
    """The library, opened: four verbs. Transfers are blocking and may run on any thread.

    Raises:
        UnsupportedError: "io-gds" if the library is not there or its driver does not start.
    """

    def __init__(self, path: str) -> None:
        try:
            library = ctypes.CDLL(path, use_errno=True)
            self._open, self._register = library.cuFileDriverOpen, library.cuFileHandleRegister
            self._deregister, self._read, self._write = (
                library.cuFileHandleDeregister,
                library.cuFileRead,
                library.cuFileWrite,
            )
        except (OSError, AttributeError) as error:
            raise _unsupported(f"{path} does not load: {error}") from error
        self._open.restype = self._register.restype = _Error
        self._register.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(_Description))
        self._deregister.restype, self._deregister.argtypes = None, (ctypes.c_void_p,)
        for move in (self._read, self._write):
            move.restype = ctypes.c_ssize_t
            # handle, start of the buffer, bytes, offset in the file, offset in the buffer
            move.argtypes = (
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_longlong,
                ctypes.c_longlong,
            )
        if started := self._open().err:
            raise _unsupported(f"the driver of {path} does not start: error {started}")

    def register(self, fd: int) -> int:
        """Register an open file and return its handle, or a negative code."""
        handle, description = ctypes.c_void_p(), _Description(type=_OPAQUE_FD, handle=_GdsHandle(fd=fd))
        failed = self._register(ctypes.byref(handle), ctypes.byref(description)).err
        return -failed if failed else handle.value or 0

    def deregister(self, handle: int) -> None:
        self._deregister(handle)

    def move(self, handle: int, address: int, nbytes: int, offset: int, write: bool) -> int:
        """Read or write bytes and return their number, or a negative code.

        The code is an errno, or one of the library's own from 5000 on.
        """
        ctypes.set_errno(0)
        moved = int((self._write if write else self._read)(handle, address, nbytes, offset, 0))
        return -(ctypes.get_errno() or errno.EIO) if moved == -1 else moved


def _unsupported(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"GPUDirect Storage was asked for, but {why}.",
        code="io-gds",
        fix="Install NVIDIA's cuFile (package libcufile, or nvidia-fs), or use backend auto and memory of the host.",
    )


def find_library() -> CuFile:
    """Load the cuFile library from the loader's search path (`LD_LIBRARY_PATH` counts).

    Raises:
        UnsupportedError: "io-gds", with every name that was tried.
    """
    reasons = []
    for name in LIBRARIES:
        try:
            return CuFile(name)
        except UnsupportedError as error:
            reasons.append(str(error).splitlines()[0])
    raise _unsupported("; ".join(reasons))


def why_not() -> str:
    """Return why GPUDirect Storage cannot be used here; an empty string if usable. Starts the library's driver."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        find_library()
    except UnsupportedError as error:
        return str(error).splitlines()[0]
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBytes:
    """The memory of a tensor. `keep` holds it alive while a transfer is under way."""

    address: int
    nbytes: int
    keep: torch.Tensor


def device_bytes(memory: object, kind: str) -> DeviceBytes:
    """Return the bytes of a contiguous tensor on a device of this kind, after synchronizing its current stream.

    Raises:
        KernelError: "io-memory".
    """
    if not isinstance(memory, torch.Tensor) or memory.device.type != kind or not memory.is_contiguous():
        description = _call.describe(memory) if isinstance(memory, torch.Tensor) else type(memory).__name__
        raise KernelError(
            f"backend gds moves contiguous {kind} tensors; found {description}.",
            code="io-memory",
            fix="Call .contiguous(), move it to the device, or use another backend for memory of the host.",
        )
    if memory.device.type == "cuda":
        streams.synchronize_stream(memory.device)
    return DeviceBytes(_call.address(memory), memory.nbytes, memory.detach())


class Flight:
    """One transfer under way on threads of Python."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._outcome = (0, 0)

    def end(self, outcome: tuple[int, int]) -> None:
        self._outcome = outcome
        self._done.set()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(None if seconds < 0 else seconds)

    def ended(self) -> bool:
        return self._done.is_set()

    def outcome(self) -> tuple[int, int]:
        return self._outcome


@dataclass(slots=True, eq=False)
class _GdsTransfer:
    """One transfer, cut into blocks. The thread that ends its last block ends it."""

    flight: Flight
    memory: DeviceBytes
    fds: tuple[int, ...]
    handle: int
    offset: int
    write: bool
    last: Callable[[], None]
    left: int
    failed: tuple[int, int] | None = None


class GdsEngine:
    """`queue_depth` threads that each move one block at a time."""

    def __init__(self, block_bytes: int, queue_depth: int, library: CuFile, kind: str = "cuda") -> None:
        self._block, self._library, self._kind = block_bytes, library, kind
        self._pool = ThreadPoolExecutor(min(queue_depth, 64), thread_name_prefix="ds-gds")
        self._lock = threading.Lock()

    def view(self, memory: object, writable: bool) -> DeviceBytes:
        return device_bytes(memory, self._kind)

    def direct_alignment(self, fd: int) -> int:
        return 4096  # the library stages what is not aligned; the file should be open past the page cache

    def close(self) -> None:
        self._pool.shutdown()

    def submit(
        self,
        memory: DeviceBytes,
        direct_fd: int,
        buffered_fd: int,
        alignment: int,
        offset: int,
        write: bool,
        truncate: bool,
        sync: bool,
    ) -> Flight:
        def last() -> None:
            if truncate and write:
                os.ftruncate(buffered_fd, offset + memory.nbytes)
            if sync and write:
                os.fdatasync(buffered_fd)

        handle = self._library.register(direct_fd if direct_fd >= 0 else buffered_fd)
        starts = range(0, memory.nbytes, self._block) if handle >= 0 else range(0)
        fds = tuple(fd for fd in (direct_fd, buffered_fd) if fd >= 0)
        job = _GdsTransfer(Flight(), memory, fds, handle, offset, write, last, max(len(starts), 1))
        if handle < 0:
            job.failed = (-handle, offset)
        if not starts:
            self._end_block(job, None)
        for start in starts:
            self._pool.submit(self._run, job, start)
        return job.flight

    def _run(self, job: _GdsTransfer, start: int) -> None:
        if job.memory.keep.is_cuda:  # the library works on the calling thread's device
            torch.cuda.set_device(job.memory.keep.device)
        at, end = start, min(start + self._block, job.memory.nbytes)
        failed = None
        # Blocks before one that failed go on: the first byte that failed is what is reported.
        while at < end and not failed and not (job.failed and job.failed[1] <= job.offset + at):
            moved = self._library.move(job.handle, job.memory.address + at, end - at, job.offset + at, job.write)
            if moved == -errno.EINTR:
                continue
            if moved <= 0:
                failed = (-moved or (errno.ENOSPC if job.write else END_OF_FILE), job.offset + at)
            at += max(moved, 0)
        self._end_block(job, failed)

    def _end_block(self, job: _GdsTransfer, failed: tuple[int, int] | None) -> None:
        with self._lock:
            if failed and (job.failed is None or failed[1] < job.failed[1]):
                job.failed = failed
            job.left -= 1
            if job.left:
                return
        outcome = job.failed or (0, 0)
        try:
            if not job.failed:
                job.last()
        except OSError as error:
            outcome = (error.errno or errno.EIO, job.offset + job.memory.nbytes)
        finally:
            if job.handle >= 0:
                self._library.deregister(job.handle)
            for fd in job.fds:
                os.close(fd)
        job.flight.end(outcome)
