"""Memory that processes of one host share: a file descriptor under a name that others may attach to."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_config.errors import CommError, KernelError

__all__ = ["SharedSegment", "pid_namespace_id"]


_HUGE_FROM_BYTES = 8 << 20  # below, half-empty huge pages and the mount cost more than they give


class SharedSegment:
    """A file without a name of `nbytes` zero bytes; `SharedSegment.attach(token, nbytes)` opens that of another process.

    The file is a memfd. From 8 MiB on, where the system keeps memfds from huge pages
    (`/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `never`, as it is by default), it is on a tmpfs that this process
    mounts in namespaces of its own, where it may: tensors are in huge pages then, which touches them first some 60 times
    and reads them up to 1.4 times as fast (docs/benchmarks/comm.md). With `small_pages` it stays a memfd whatever its size: for memory
    that takes over what other memory held, whose pages the system can then hand on.

    Raises:
        CommError: the token's process has ended, belongs to another user, or is in another namespace ("shm-attach").
    """

    __slots__ = ("_map", "fd", "nbytes")

    def __init__(self, nbytes: int, fd: int | None = None, *, small_pages: bool = False) -> None:
        self.nbytes = nbytes
        self._map: mmap.mmap | None = None
        if fd is None:
            huge = not small_pages and nbytes >= _HUGE_FROM_BYTES and _memfds_are_small()
            fd = _huge_file() if huge else -1
            if fd < 0:
                fd = os.memfd_create("ds-shm", os.MFD_CLOEXEC)
                os.fchmod(fd, 0o600)  # as huge files are
            os.ftruncate(fd, nbytes)
        self.fd = fd

    @property
    def token(self) -> str:
        """What another rank of this host needs to attach; valid while this process keeps the segment open."""
        return f"{os.getpid()}:{self.fd}:{_identity(os.fstat(self.fd))}"

    @classmethod
    def attach(cls, token: str, nbytes: int) -> SharedSegment:
        """Open the segment of `token` in this process."""
        pid, fd, identity = token.split(":")
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _attach_error(token, str(error)) from error
        status = os.fstat(opened)
        if _identity(status) != identity or status.st_size != nbytes:
            os.close(opened)
            raise _attach_error(token, f"it names another file of {status.st_size} bytes, expected {nbytes}")
        return cls(nbytes, opened)

    def tensor(self, numel: int, dtype: torch.dtype, offset_bytes: int = 0) -> Tensor:
        """Return [numel] of `dtype` at `offset_bytes` as a view of the shared memory. Keeps the mapping alive."""
        width = torch.empty((), dtype=dtype, device="cpu").element_size()
        if offset_bytes % width or offset_bytes < 0 or offset_bytes + numel * width > self.nbytes:
            raise KernelError(
                f"{numel} elements of {dtype} at byte {offset_bytes} do not fit a segment of {self.nbytes} bytes",
                code="shm-bounds",
                fix="Make the segment larger, or align the offset to the element size.",
            )
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.nbytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset_bytes)

    def close(self) -> None:
        """Give the descriptor back; tensors and channels made before keep their mapping."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def _identity(file: os.stat_result) -> str:
    return f"{file.st_dev}.{file.st_ino}"


def _huge_file() -> int:
    """Open a file of huge pages and return its descriptor.

    The result is negative where this system does not let its users mount.
    """
    return int(_call.native().shm_huge_file())


def _memfds_are_small() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return setting.exists() and "[never]" in setting.read_text()


def pid_namespace_id() -> str:
    """Return an identifier of this boot and PID namespace.

    A token of this process is valid in processes that return the same text.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.exists() else os.uname().nodename
    return f"{name}/{os.stat('/proc/self/ns/pid').st_ino}"


def _attach_error(token: str, why: str) -> CommError:
    return CommError(
        f"cannot attach to shared memory {token} of another rank: {why}",
        code="shm-attach",
        fix="Ranks that share memory must be one user's processes in one PID namespace; use gloo otherwise.",
    )
