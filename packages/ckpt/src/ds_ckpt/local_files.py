"""Files of a local disk: how one is written, past the page cache where that is large, and how one is read."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import ds_monitor
from ds_ckpt.protocols import ReadFile, truncated
from ds_config.errors import CheckpointError
from ds_ops.io import AsyncIO, IOSettings, Transfer
from ds_ops.mapped import MappedFile

__all__ = ["Disk", "LocalWriteFile", "no_file", "open_to_read"]

_DIRECT_BYTES: Final = 2**20  # smaller files gain nothing from bypassing the page cache
_HERE: Final = -100  # AT_FDCWD
_EXCHANGE: Final = 2  # RENAME_EXCHANGE
_QUEUE: Final = IOSettings(block_bytes=2**20, queue_depth=32)


class Disk:
    """The system calls a local save makes, one method each, so that a test can make any of them fail or be the last."""

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def lock(self, path: str) -> int:
        """Open the directory with an exclusive lock and return its descriptor; -1 where the file system has no locks.

        Raises:
            BlockingIOError: another process has the lock.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EBADF):
                return -1  # EBADF: NFS locks what is open for writing, and a directory never is
            raise
        return fd

    def open_new(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserve the file's space: a full disk is known before the first write, and parallel writes need no lock."""
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                raise

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def begin_write(self, io: AsyncIO, path: str, data: memoryview, offset: int) -> Transfer:
        """Start to write part of a file past the page cache; `end_write` waits for it."""
        return io.write(path, data, offset)

    def end_write(self, transfer: Transfer) -> None:
        transfer.wait()

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def exchange(self, one: str, other: str) -> bool:
        """Let two folders change their names in one step; False where the system or the file system does not do so."""
        try:
            call = ctypes.CDLL(None).renameat2
        except AttributeError:
            return False
        return int(call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)) == 0

    def link(self, old: str, new: str) -> None:
        """Give a file a second name; a copy where the file system has no such links."""
        try:
            os.link(old, new, follow_symlinks=False)
        except OSError:
            shutil.copy2(old, new, follow_symlinks=False)

    def remove_tree(self, path: str) -> None:
        """Remove a folder with everything in it; of a link, the link alone."""
        if os.path.islink(path):
            os.unlink(path)
        else:
            shutil.rmtree(path)


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Give an OSError of a call on a descriptor the name of its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


class LocalWriteFile:
    """Large files go past the page cache where the file system lets them (O_DIRECT), several writes at a time."""

    def __init__(self, disk: Disk, path: str, nbytes: int) -> None:
        self._disk, self._path = disk, path
        self._fd = disk.open_new(path)
        self._io: AsyncIO | None = None
        try:
            if nbytes >= _DIRECT_BYTES:
                with _named(path):
                    disk.allocate(self._fd, nbytes)
                self._io = AsyncIO(_QUEUE)
        except BaseException:
            self.abandon()
            raise

    def write(self, offset: int, data: memoryview) -> Callable[[], None] | None:
        if self._io is not None and data.nbytes:
            return partial(self._end, self._disk.begin_write(self._io, self._path, data, offset))
        while data.nbytes:
            with _named(self._path):
                done = self._disk.write(self._fd, data, offset)
            if done <= 0:
                raise OSError(errno.EIO, "the device took no bytes", self._path)
            data, offset = data[done:], offset + done
        return None

    def _end(self, transfer: Transfer) -> None:
        with _named(self._path):
            self._disk.end_write(transfer)

    def put(self, offset: int, data: memoryview) -> None:
        """`write`, and wait."""
        ended = self.write(offset, data)
        if ended is not None:
            ended()

    def close(self) -> None:
        try:
            with _named(self._path):
                if self._io is not None:
                    self._io.close()
                self._disk.sync(self._fd)
        finally:
            fd, self._fd = self._fd, -1
            self._disk.close(fd)

    def abandon(self) -> None:
        io, self._io = self._io, None
        fd, self._fd = self._fd, -1
        try:
            if io is not None:
                io.close()
        except OSError as late:  # this file is not needed; what failed first is being raised
            ds_monitor.event("ckpt.abandoned", path=self._path, why=str(late))
        finally:
            if fd >= 0:
                os.close(fd)


class _MappedReadFile:
    def __init__(self, path: str, where: str) -> None:
        self._file, self._path, self._where = MappedFile(path), path, where
        self.nbytes = self._file.nbytes

    def view(self, offset: int, nbytes: int) -> memoryview:
        if offset + nbytes > self.nbytes:
            raise truncated(self._where, offset, nbytes)
        return self._file.view(offset, nbytes)

    def on_disk(self, offset: int, nbytes: int) -> str | None:
        return None if self._file.cached(offset, nbytes) else self._path

    def close(self) -> None:
        self._file.close()


class _PlainReadFile:
    """For file systems and kernels that cannot map a file safely."""

    def __init__(self, path: str, where: str) -> None:
        self._fd, self._where = os.open(path, os.O_RDONLY | os.O_CLOEXEC), where
        self.nbytes = os.fstat(self._fd).st_size

    def view(self, offset: int, nbytes: int) -> memoryview:
        buffer = memoryview(bytearray(nbytes))
        at = 0
        while at < nbytes:
            got = os.preadv(self._fd, [buffer[at:]], offset + at)
            if got <= 0:
                raise truncated(self._where, offset, nbytes)
            at += got
        return buffer.toreadonly()

    def close(self) -> None:
        os.close(self._fd)


def open_to_read(path: str, where: str) -> ReadFile:
    """Open a file, mapped into memory where that is safe.

    Args:
        where: What errors call it.
    Raises:
        CheckpointError: it is no file ("ckpt-not-a-file").
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise no_file(where)
    try:
        return _MappedReadFile(path, where)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
    return _PlainReadFile(path, where)


def no_file(where: str) -> CheckpointError:
    """Build the error of a file that is none."""
    return CheckpointError(
        f"{where} is a pipe or a device, not a file",
        code="ckpt-not-a-file",
        fix="Use another checkpoint; this folder was changed by hand.",
    )
