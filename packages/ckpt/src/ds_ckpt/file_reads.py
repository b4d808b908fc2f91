"""The data files of one checkpoint, as a reader has them: opened when needed, closed when others are, read past the page cache.

What is in the page cache is copied out of it. What is not is read past it, into slabs of aligned memory, `_AHEAD_BYTES` ahead: through
the cache the device would wait for the processor, and here it was half as fast. But where ranks of one host read the same bytes,
one of them had better leave them in the cache for the others.
"""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Final

from ds_ckpt.protocols import SHARED, CheckpointStorage, OnDisk, ReadFile, Remote
from ds_ckpt.records import FileRecord
from ds_ckpt.writer import SLAB_BYTES, SlabPool
from ds_config.errors import CheckpointError
from ds_ops.io import AsyncIO, IOSettings, Transfer

__all__ = ["DIRECT_BYTES", "STRETCH_BYTES", "Files"]

STRETCH_BYTES: Final = SLAB_BYTES
DIRECT_BYTES: Final = 2**18  # shorter stretches gain nothing from bypassing the page cache
_AHEAD_BYTES: Final = 8 * SLAB_BYTES
_QUEUE: Final = IOSettings(block_bytes=2**20, queue_depth=32)
_PAGE: Final = 4096
_VIEWED_BYTES: Final = 2**27  # of all open files together, about


class _OpenFile:
    """An open file, how many use it now, and whether it is worth reading past the page cache.

    What was looked at stays in this process's memory as long as the file is open, if it is mapped: `viewed` bytes. A handle that has seen
    `_VIEWED_BYTES` is `over`: the next one who comes opens the file anew, and the last one who goes closes this.
    """

    def __init__(self, file: ReadFile, cold: bool) -> None:
        self.file, self.cold, self.users = file, cold, 0
        self.viewed, self.over = 0, False


class Files:
    """The data files of one checkpoint, opened when they are needed, with their sizes checked; a context manager.

    The files that were used last stay open, `limit` of them: a checkpoint may have more than a process may open. `direct`: read what is
    not in the page cache past it. Costs `_AHEAD_BYTES` of memory when there is any.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        tag: str,
        records: Sequence[FileRecord],
        *,
        direct: bool = True,
        limit: int = 0,
    ) -> None:
        self._storage, self._tag, self._records, self._direct = storage, tag, records, direct
        # Bytes to read at once, at most, and not across a multiple of it.
        self.stretch_bytes = storage.range_bytes if isinstance(storage, Remote) else STRETCH_BYTES
        self._limit = limit or _most_open()
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()
        self._viewed = 0
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._io: AsyncIO | None = None
        self._pool = SlabPool(_AHEAD_BYTES)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        for handle in self._open.values():
            handle.file.close()
        self._open.clear()

    @contextmanager
    def using(self, index: int) -> Iterator[ReadFile]:
        """Open the file number `index` for the duration of the context.

        Raises:
            CheckpointError: "ckpt-not-found" or "ckpt-file-truncated" (wrong size).
        """
        with self._handle(index) as handle:
            yield handle.file

    def check(self, index: int) -> None:
        """Raises CheckpointError as `using`: the file is not there, or not of its size."""
        with self._handle(index):
            pass

    @contextmanager
    def _handle(self, index: int) -> Iterator[_OpenFile]:
        with self._lock:
            handle = self._open.get(index)
            if handle is not None:
                handle.users += 1
                self._open.move_to_end(index)
        if handle is None:
            opened = self._opened(index)  # outside of the lock: a store may take its time
            with self._lock:
                handle = self._open.setdefault(index, opened)
                handle.users += 1
            if handle is not opened:
                opened.file.close()
            self._close_idle()
        try:
            yield handle
        finally:
            with self._lock:
                handle.users -= 1
                last = handle.over and not handle.users
            if last:
                handle.file.close()

    def _close_idle(self) -> None:
        with self._lock:
            many = len(self._open) - self._limit
            idle = [i for i, handle in self._open.items() if not handle.users][: max(0, many)]
            closing = [self._open.pop(i) for i in idle]
            self._viewed -= min(self._viewed, sum(handle.viewed for handle in closing))
        for handle in closing:
            handle.file.close()

    def _saw(self, handle: _OpenFile, nbytes: int) -> None:
        """Count what was looked at; when it is much, close every file as soon as it is not used."""
        with self._lock:
            handle.viewed += nbytes
            self._viewed += nbytes
            closing = []
            if self._viewed > _VIEWED_BYTES:
                self._viewed = 0
                closing = [h for h in self._open.values() if not h.users]
                for h in self._open.values():
                    h.over = True
                self._open.clear()
        for h in closing:
            h.file.close()

    def _opened(self, index: int) -> _OpenFile:
        record = self._records[index]
        file = self._storage.open(SHARED if record.shared else self._tag, record.name)
        if file.nbytes != record.nbytes:
            actual_nbytes = file.nbytes
            file.close()
            raise CheckpointError(
                f"{self.name(index)} has {actual_nbytes} bytes, the manifest says {record.nbytes}",
                code="ckpt-file-truncated",
                fix="The file was cut or replaced; use another checkpoint.",
            )
        cold = self._direct and isinstance(file, OnDisk) and file.on_disk(0, file.nbytes) is not None
        return _OpenFile(file, cold)

    def name(self, index: int) -> str:
        record = self._records[index]
        return f"{self._storage.where(SHARED if record.shared else self._tag)}/{record.name}"

    @contextmanager
    def fetch(self, index: int, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Read at most `stretch_bytes` that cross no multiple of that number; the view is valid inside the context."""
        with self.start(index, offset, nbytes) as view:
            yield view

    def start(self, index: int, offset: int, nbytes: int) -> AbstractContextManager[memoryview]:
        """Begin to read, as `fetch`; inside the returned context the bytes are there.

        Waits while too much is under way. The context must be entered; it may be, from another thread.
        """
        with self._handle(index) as handle:
            path = None
            if handle.cold and nbytes >= DIRECT_BYTES and isinstance(handle.file, OnDisk):
                path = handle.file.on_disk(offset, nbytes)
            if path is None:
                return self._present(index, offset, nbytes)
            low, high = offset // _PAGE * _PAGE, min(-(-(offset + nbytes) // _PAGE) * _PAGE, handle.file.nbytes)
            slab = self._pool.wait()
            try:
                transfer = self._engine().read(path, memoryview(slab)[: high - low], low)
            except BaseException:
                self._pool.release(slab)
                raise
            return _landing(transfer, memoryview(slab)[offset - low :][:nbytes], lambda: self._pool.release(slab))

    @contextmanager
    def _present(self, index: int, offset: int, nbytes: int) -> Iterator[memoryview]:
        with self._handle(index) as handle:
            yield handle.file.view(offset, nbytes)
            self._saw(handle, nbytes)

    def _engine(self) -> AsyncIO:
        with self._lock:
            if self._io is None:
                self._io = self._stack.enter_context(AsyncIO(_QUEUE))
            return self._io


def _most_open() -> int:
    """Return the number of files to keep open: an eighth of this process's limit, at most 256."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, min(256, (soft if soft != resource.RLIM_INFINITY else 2048) // 8))


@contextmanager
def _landing(transfer: Transfer, data: memoryview, release: Callable[[], None]) -> Iterator[memoryview]:
    try:
        transfer.wait()
        yield data
    finally:
        release()
