"""A scratch file without a name: nothing of it is left when the process ends, in whatever way."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from ds_config.errors import PlanError
from ds_config.sizes import bytes_text
from ds_ops.io import AsyncIO, FileTransferError, IOSettings, Transfer

__all__ = ["Moving", "Scratch"]


_REPEATS = 20


@dataclass(slots=True)
class Moving:
    """A transfer under way between memory and the scratch file of `folder`.

    Attributes:
        again: Starts the same transfer once more.
    """

    transfer: Transfer
    folder: str
    again: Callable[[], Transfer]

    def done(self) -> bool:
        """Whether it ended, well or badly."""
        return self.transfer.done()

    def wait(self) -> None:
        """Return when every byte is transferred.

        Raises:
            FileTransferError: it failed; the message names the folder ("io-failed", "io-end-of-file").
        """
        for repeat in count():
            try:
                self.transfer.wait()
                return
            except FileTransferError as error:
                # io_uring cancels what waits for a kernel thread when a signal keeps it from starting one.
                if error.errno != errno.ECANCELED or repeat == _REPEATS:
                    raise self._told(error) from error
            self.transfer = self.again()

    def _told(self, error: FileTransferError) -> FileTransferError:
        text = f"scratch file in {self.folder}: {error.message}"
        told = FileTransferError(text, code=error.code or "io-failed", fix=error.fix or "")
        told.errno, told.filename, told.offset = error.errno, self.folder, error.offset
        return told


class Scratch:
    """One file of one rank, which grows by extents.

    Args:
        folder: Made if it is not there.
    Raises:
        PlanError: the folder cannot be made or written ("offload-folder").
    """

    def __init__(self, folder: str, settings: IOSettings) -> None:
        self.folder, self.nbytes = folder, 0
        try:
            os.makedirs(folder, exist_ok=True)
            self._fd = _nameless(folder)
        except OSError as error:
            raise PlanError(
                f"no scratch file in {folder}: {error.strerror}",
                code="offload-folder",
                fix="Set nvme_path to a folder that may be written.",
            ) from error
        self._close = weakref.finalize(self, os.close, self._fd)
        self._io = AsyncIO(settings)

    @property
    def path(self) -> str:
        """Opens the file again, though it has no name."""
        return f"/proc/self/fd/{self._fd}"

    def reserve(self, nbytes: int) -> int:
        """Room for `nbytes` more, on the device itself. Returns where.

        Raises:
            PlanError: the file system is full ("offload-space").
        """
        start = self.nbytes
        try:
            if nbytes:
                os.posix_fallocate(self._fd, start, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            free = os.statvfs(self.folder)
            raise PlanError(
                f"the scratch file in {self.folder} holds {bytes_text(start)} and has no room for {bytes_text(nbytes)} more: "
                f"{error.strerror}, {bytes_text(free.f_bavail * free.f_frsize)} are free",
                code="offload-space",
                fix="Free space there, or set nvme_path to a folder of another file system.",
            ) from error
        self.nbytes += nbytes
        return start

    def read(self, into: Tensor, offset: int) -> Moving:
        """Start to fill `into` from `offset` on."""
        return self._moving(lambda: self._io.read(self.path, into, offset))

    def write(self, data: Tensor, offset: int) -> Moving:
        """Start to write `data` at `offset`; it must not change before the transfer ended."""
        return self._moving(lambda: self._io.write(self.path, data, offset))

    def _moving(self, start: Callable[[], Transfer]) -> Moving:
        return Moving(start(), self.folder, start)

    def close(self) -> None:
        """Wait for transfers and free the file's space. Failures that nobody waited for are of no interest any more."""
        if self._close.alive:
            with contextlib.suppress(FileTransferError):
                self._io.close()
            self._close()


def _nameless(folder: str) -> int:
    """A descriptor of a fresh file in `folder` that has no name there."""
    tmpfile = getattr(os, "O_TMPFILE", 0)
    if tmpfile:
        with contextlib.suppress(OSError):  # not every file system has it
            return os.open(folder, tmpfile | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fd, name = tempfile.mkstemp(prefix="ds-zero-", dir=folder)
    os.unlink(name)
    return fd
