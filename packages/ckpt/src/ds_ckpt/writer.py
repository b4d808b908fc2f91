"""One rank's data file, written through page-aligned slabs, several at a time. No torch.

Words: the file is a *stream* of bytes: safetensors header, then the entries end to end. A *slab* is up to `SLAB_BYTES` of
the stream, at a multiple of that, in page-aligned memory that is kept between saves (so its pages are there). A
*segment* is the part of a slab that belongs to one checksum block of one entry.

The owner of the tensors calls `fill`: copies segments into free slabs and checksums them on the way. The writer calls
`drain`: begins the writing of slabs, as many as there are, and gives them back when they are written. The pool of slabs is
all that is between the two: with a pool as large as the state, `fill` is a snapshot and never waits; with a small one it
proceeds at the speed of the disk, in bounded memory. `through` does both on one thread, where no training goes on meanwhile: each
slab's writing begins when it is copied, and handing slabs from thread to thread would cost a tenth of the disk's speed.

Bytes of a device are on their way when a copy returns (`PendingBytes`): `fill` queues all of them and waits once, at its end, and the writer makes
the checksum of each slab when it has arrived. A slab that bytes are on their way to is never given back.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ds_ckpt.crc import crc32, shifted
from ds_ckpt.dtypes import CODE, ITEMSIZE
from ds_ckpt.format import BLOCK_BYTES
from ds_ckpt.protocols import Draft, WriteFile
from ds_ckpt.records import FileRecord
from ds_ckpt.save_plan import Item
from ds_config.errors import CheckpointError

__all__ = ["SLAB_BYTES", "Copy", "FileStream", "PendingBytes", "Slab", "SlabPool", "Written", "safetensors_header"]

SLAB_BYTES: Final = 4 * 2**20
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14
_PAGE: Final = 4096  # the header ends on a page: entries can be mapped, and slabs written past the page cache
_MOST_AHEAD: Final = 3  # slabs that `through` lets a device fill while it makes the checksum of one
Slab = mmap.mmap | memoryview  # `SLAB_BYTES` of memory that begins on a page
_UnderWay = deque[tuple[Callable[[], None], Slab]]  # writes that have begun, oldest first, with their memory


class PendingBytes(Protocol):
    """Bytes on their way from a device to a slab."""

    def wait(self) -> None:
        """Block until they have arrived."""

    def checksum(self) -> int:
        """Wait, and return their CRC32."""


# Fill the view with the entry's bytes from the given byte on; return their checksum, or who knows it when they have arrived.
Copy = Callable[[memoryview, Item, int], int | PendingBytes]


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank reports of its file: its record, and the block checksums of each entry in file order."""

    file: FileRecord
    crc32: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class _FileSegment:
    entry: int
    block: int
    start: int  # byte of the entry
    at: int  # byte of the slab
    nbytes: int
    after: int  # bytes of the block behind this segment


@dataclass(frozen=True, slots=True)
class _Range:
    at: int
    nbytes: int
    segments: tuple[_FileSegment, ...]


@dataclass(frozen=True, slots=True)
class _FilledSlab:
    """A range of the file in its slab, some of it perhaps on its way."""

    part: _Range
    slab: Slab
    transfers: tuple[tuple[_FileSegment, PendingBytes], ...] = ()


# The next slab to write, None after the last: it may end writes that are under way, and has ended all at the end.
_Source = Callable[[_UnderWay], _FilledSlab | None]


def safetensors_header(entries: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Build the header of a safetensors file: eight length bytes, JSON, and spaces up to a page.

    Args:
        entries: (key, dtype, shape) in file order; widest elements first keeps every entry aligned.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt", "writer": "ds-ckpt"}}
    at = 0
    for key, dtype, shape in entries:
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        table[key] = {"dtype": CODE[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // _PAGE) * _PAGE - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


class SlabPool:
    """Slabs of host memory, made when first needed, at most `limit_bytes` of them, reused for ever.

    Thread-safe. `acquire` waits for a slab when all are in use: that is the back-pressure.
    """

    def __init__(self, limit_bytes: int = 8 * SLAB_BYTES) -> None:
        self._limit = max(1, -(-limit_bytes // SLAB_BYTES))
        self._allocated = 0
        self._free: list[Slab] = []
        self._page_locked: Callable[[int], memoryview] | None = None
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return self._allocated * SLAB_BYTES

    @staticmethod
    def room(nbytes: int) -> int:
        """Return the bytes of slab memory that a stream of `nbytes` fills."""
        return -(-nbytes // SLAB_BYTES) * SLAB_BYTES

    def at_least(self, nbytes: int) -> None:
        """Raise the limit so that `nbytes` of slabs can be in use at once."""
        with self._changed:
            self._limit = max(self._limit, -(-nbytes // SLAB_BYTES))
            self._changed.notify_all()

    def lock_pages(self, allocate: Callable[[int], memoryview]) -> None:
        """Make slabs by `allocate` from now on: page-locked memory of so many bytes, which a device copies to by itself.

        Free slabs of other memory are dropped. A second call does nothing.
        """
        with self._changed:
            if self._page_locked is None:
                self._page_locked = allocate
                self._allocated -= len(self._free)
                self._free.clear()

    def acquire(self, stop: Callable[[], bool]) -> Slab | None:
        """Wait for a free slab and return the slab; None when `stop()` says that the writer has ended."""
        with self._changed:
            while not stop():
                if (slab := self._take()) is not None:
                    return slab
                self._changed.wait(0.05)
        return None

    def acquire_now(self) -> Slab | None:
        """Take a free slab without waiting; None when all slabs are in use."""
        with self._changed:
            return self._take()

    def wait(self) -> Slab:
        """Wait for a free slab without limit; for callers that know that a slab will be released."""
        with self._changed:
            while (slab := self._take()) is None:
                self._changed.wait()
        return slab

    def release(self, slab: Slab) -> None:
        with self._changed:
            self._free.append(slab)
            self._changed.notify()

    def _take(self) -> Slab | None:
        if self._free:
            return self._free.pop()
        return self._new() if self._allocated < self._limit else None

    def _new(self) -> Slab:
        if self._page_locked is not None:
            locked = self._page_locked(SLAB_BYTES)
            self._allocated += 1
            return locked
        slab = self._map(self._allocated)
        self._allocated += 1
        for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _POPULATE_WRITE):
            if advice is not None:
                with contextlib.suppress(OSError):  # kernels that do not know it: the pages come when they are touched
                    slab.madvise(advice)
        return slab

    def _map(self, number: int) -> mmap.mmap:
        # A pool of other memory differs in this alone. `number` counts the slabs made before.
        return mmap.mmap(-1, SLAB_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class FileStream:
    """One file on its way from tensors to storage: `fill` and `drain` in two threads, or `through` in one, once."""

    def __init__(self, items: Sequence[Item], pool: SlabPool, block_bytes: int = BLOCK_BYTES) -> None:
        self._items, self._pool, self._block_bytes = items, pool, block_bytes
        self._head = safetensors_header([(item.key, item.dtype, item.shape) for item in items])
        self.nbytes = len(self._head) + sum(item.nbytes for item in items)
        self._queue: queue.SimpleQueue[_FilledSlab | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self.filled = threading.Event()
        self._error: BaseException | None = None
        self._sums = [[0] * (-(-item.nbytes // block_bytes)) for item in items]

    def fill(self, copy: Copy) -> None:
        """Copy every entry into slabs; returns when the tensors may change. Returns early when `drain` has failed.

        An error of the copying is raised here and by `drain`.
        """
        transfers: list[PendingBytes] = []
        try:
            for part in self._ranges() if self._items else ():
                slab = self._pool.acquire(self._stopped.is_set)
                if slab is None:
                    return
                filled = self._copy(part, slab, copy)
                transfers += [transfer for _, transfer in filled.transfers]
                self._queue.put(filled)
            for transfer in transfers:
                transfer.wait()
        except BaseException as error:
            self._error = error
            self._stopped.set()
            raise
        finally:
            self._queue.put(None)
            self.filled.set()
            if self._stopped.is_set():
                self.stop()  # takes back a slab that was queued after the last one was taken

    def through(self, copy: Copy, draft: Draft, rank: int) -> Written:
        """Copy and write, here; returns when the file is durable. Raises what `copy` and the storage say."""
        ranges = deque(self._ranges() if self._items else ())
        ahead: deque[_FilledSlab] = deque()

        def copied(under_way: _UnderWay) -> _FilledSlab | None:
            while ranges and (not ahead or (ahead[-1].transfers and len(ahead) < _MOST_AHEAD)):
                while (slab := self._pool.acquire_now()) is None and under_way and not ahead:
                    self._end(under_way, 1)
                if slab is None and not ahead:  # other streams have them
                    slab = self._pool.acquire(self._stopped.is_set)
                if slab is None:
                    break
                ahead.append(self._copy(ranges.popleft(), slab, copy))
            if not ahead:
                self._end(under_way, len(under_way))
                return None
            return self._summed(ahead.popleft())

        try:
            return self._write(draft, rank, copied)
        finally:
            for filled in ahead:
                self._give_back(filled)

    def drain(self, draft: Draft, rank: int) -> Written:
        """Write what `fill` delivers and return when it is durable.

        Raises:
            OSError: what the storage said. CheckpointError: "ckpt-failed", when `fill` gave up.
        """
        try:
            return self._write(draft, rank, self._next)
        finally:
            self.stop()

    def _write(self, draft: Draft, rank: int, source: _Source) -> Written:
        name = draft.file_name(rank)
        file = draft.write_file(name, self.nbytes)
        try:
            total = self._write_all(file, source)
            if total != self.nbytes:
                raise CheckpointError(
                    f"only {total} of {self.nbytes} bytes of {name} could be copied: {self._error!r}",
                    code="ckpt-failed",
                    fix="See the cause of this error.",
                ) from self._error
            file.close()
        except BaseException:
            file.abandon()
            raise
        record = FileRecord(name, self.nbytes, len(self._head), f"{crc32(self._head):08x}")
        return Written(record, tuple(tuple(f"{c:08x}" for c in sums) for sums in self._sums))

    def give_up(self, error: BaseException) -> None:
        """End both sides before `fill` was called, because of `error`, which `drain` raises as it would one of the copying."""
        self._error = error
        self.stop()
        self.filled.set()

    def stop(self) -> None:
        """End both sides: `fill` returns, `drain` raises, slabs on their way go back to the pool."""
        self._stopped.set()
        while True:
            try:
                entry = self._queue.get_nowait()
            except queue.Empty:
                break
            if entry is not None:
                self._give_back(entry)
        self._queue.put(None)  # a wait for a slab ends: none comes

    def _copy(self, part: _Range, slab: Slab, copy: Copy) -> _FilledSlab:
        """Fill a slab, or begin to; if that raises, the slab is given back."""
        view, transfers = memoryview(slab), []
        try:
            head = self._head[part.at : part.at + SLAB_BYTES]
            view[: len(head)] = head
            for s in part.segments:
                crc = copy(view[s.at : s.at + s.nbytes], self._items[s.entry], s.start)
                if isinstance(crc, int):
                    self._add_sum(s, crc)
                else:
                    transfers.append((s, crc))
        except BaseException:
            self._give_back(_FilledSlab(part, slab, tuple(transfers)))
            raise
        return _FilledSlab(part, slab, tuple(transfers))

    def _summed(self, filled: _FilledSlab) -> _FilledSlab:
        """Wait until a slab is full, and add the checksums of what arrived."""
        try:
            for segment, transfer in filled.transfers:
                self._add_sum(segment, transfer.checksum())
        except BaseException:
            self._give_back(filled)
            raise
        return filled

    def _add_sum(self, segment: _FileSegment, crc: int) -> None:
        self._sums[segment.entry][segment.block] ^= shifted(crc, segment.after)

    def _give_back(self, filled: _FilledSlab) -> None:
        """Give a slab back that is not written, when nothing is on its way to it any more."""
        try:
            for _, transfer in filled.transfers:
                transfer.wait()
        except Exception:  # the device failed: what it still writes nobody knows, so nobody gets this memory
            return
        self._pool.release(filled.slab)

    def _write_all(self, file: WriteFile, source: _Source) -> int:
        # Writes end in the order in which they began, nearly: the oldest is waited for when nothing new is there.
        total = 0
        under_way: _UnderWay = deque()
        try:
            while (entry := source(under_way)) is not None:
                part, slab = entry.part, entry.slab
                try:
                    ended = file.write(part.at, memoryview(slab)[: part.nbytes])
                except BaseException:
                    self._pool.release(slab)
                    raise
                total += part.nbytes
                if ended is None:
                    self._pool.release(slab)
                else:
                    under_way.append((ended, slab))
        finally:
            self._stopped.set()
            self._end(under_way, len(under_way))
        return total

    def _next(self, under_way: _UnderWay) -> _FilledSlab | None:
        """Return the next slab that `fill` delivered, full; None at the end, after all writes have ended."""
        entry = self._delivered(under_way)
        return None if entry is None else self._summed(entry)

    def _delivered(self, under_way: _UnderWay) -> _FilledSlab | None:
        while under_way:
            try:
                entry = self._queue.get_nowait()
            except queue.Empty:
                self._end(under_way, 1)
            else:
                if entry is None:
                    self._end(under_way, len(under_way))
                return entry
        return self._queue.get()

    def _end(self, under_way: _UnderWay, count: int) -> None:
        """Wait for the `count` oldest writes, all of them, and give back their slabs; then raise the first error."""
        errors = []
        for _ in range(count):
            ended, slab = under_way.popleft()
            try:
                ended()
            except Exception as error:
                errors.append(error)
            self._pool.release(slab)
        if errors:
            self._stopped.set()
            raise errors[0]

    def _ranges(self) -> Iterator[_Range]:
        """Cut the stream into ranges at multiples of SLAB_BYTES."""
        segments: list[_FileSegment] = []
        at, position = 0, len(self._head)
        while position - at >= SLAB_BYTES:  # slabs that hold nothing but header
            yield _Range(at, SLAB_BYTES, ())
            at += SLAB_BYTES
        for entry, item in enumerate(self._items):
            start = 0
            while start < item.nbytes:
                block = start // self._block_bytes
                block_stop = min((block + 1) * self._block_bytes, item.nbytes)
                stop = min(block_stop, start + at + SLAB_BYTES - position)
                segments.append(_FileSegment(entry, block, start, position - at, stop - start, block_stop - stop))
                position += stop - start
                start = stop
                if position == at + SLAB_BYTES:
                    yield _Range(at, SLAB_BYTES, tuple(segments))
                    at, segments = position, []
        if position > at:
            yield _Range(at, position - at, tuple(segments))
