"""A file as memory, whose read errors are errors.

Reading a mapped page that the device cannot deliver, or that the file no longer has, kills a process with SIGBUS. Here the
pages of a range are asked for first (MADV_POPULATE_READ), which says so instead, and reads ahead in the range's size.
Copying out of such a view moves each byte once: from the page cache to where it is wanted.
"""

from __future__ import annotations

import errno
import mmap
import os

import ds_ops._native as _native

__all__ = ["MappedFile"]

_POPULATE_READ = 22  # MADV_POPULATE_READ; Python has no name for it


class MappedFile:
    """The bytes of one file, for reading.

    Raises:
        OSError: it cannot be opened; ENOTSUP where this kernel (before 5.14) or file system cannot map it safely.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.nbytes = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, self.nbytes, prot=mmap.PROT_READ) if self.nbytes else None
        except OSError as error:
            raise self._error(errno.ENOTSUP, "cannot be mapped") from error
        finally:
            os.close(fd)
        if self._map is not None:
            self._map.madvise(mmap.MADV_RANDOM)  # to find out whether it works, one page is enough: no read-ahead
            if _populate(self._map, 0, 1) == errno.EINVAL:
                raise self._error(errno.ENOTSUP, "cannot be mapped safely by this kernel")
            self._map.madvise(mmap.MADV_NORMAL)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return `nbytes` from `offset` on, present in memory.

        Copy soon: pages may be dropped again under memory pressure.

        Raises:
            OSError: EIO: the device failed, or the file was truncated after it was opened.
            ValueError: the range is not inside the file at the time of opening.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset}..{offset + nbytes} of {self._path}, which has {self.nbytes}")
        if self._map is None or not nbytes:
            return memoryview(b"")
        if _populate(self._map, offset, nbytes):
            raise self._error(
                errno.EIO, f"bytes {offset}..{offset + nbytes} cannot be read (device error, or cut file)"
            )
        return memoryview(self._map)[offset : offset + nbytes]

    def cached(self, offset: int, nbytes: int) -> bool:
        """Whether these bytes are in the page cache, as far as 16 samples show. True where that cannot be known. Reads nothing."""
        native = _native.load("_cpu").module
        if native is None or self._map is None:
            return True
        return bool(native.resident(memoryview(self._map)[offset : offset + nbytes]))

    def close(self) -> None:
        """Drop the mapping: no further views; its memory is freed with the last view that is referenced."""
        self._map, self.nbytes = None, 0

    def _error(self, number: int, what: str) -> OSError:
        return OSError(number, what, self._path)


def _populate(mapped: mmap.mmap, offset: int, nbytes: int) -> int:
    native = _native.load("_cpu").module
    if native is not None:
        return int(native.populate(memoryview(mapped)[offset : offset + nbytes]))
    try:
        low = offset // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(_POPULATE_READ, low, offset + nbytes - low)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
