"""Host memory for copies to and from a device: a pool with a bound, and an account of every byte.

Words: a *block* is memory that the pool got from the system; a *buffer* is a block in use. Where the device gains from it
(`facts.pinned`) blocks are page-locked by torch; elsewhere they are plain memory that starts on a page, so that direct file
I/O can use it too.

Page-locked memory is taken away from the whole machine, and torch's allocator rounds it up to powers of two. So blocks are
powers of two there, are used whole, and are kept for reuse; the bound counts blocks, not requests.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import ds_accel.streams as streams
from ds_config.errors import DsError
from ds_monitor import gauge

__all__ = ["PAGE_BYTES", "PinnedBuffer", "PinnedMemoryError", "PinnedPool", "PoolStats"]

PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20
_MAX_WASTE = 1.25  # a cached block serves a request of at least its size / 1.25


class PinnedMemoryError(DsError, RuntimeError):
    """Host memory for copies was refused, or used against its rules."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The account of a pool, in bytes, `num_in_use` in buffers.

    Attributes:
        limit: What the pool may hold.
        in_use_bytes: Bytes of blocks in use.
        waiting: In blocks that were given back with an event that has not happened yet.
        cached: In blocks that are free for reuse.
        peak: Most that in use + waiting was.
        num_in_use: Buffers in use.
    """

    limit: int
    in_use_bytes: int
    waiting: int
    cached: int
    peak: int
    num_in_use: int

    @property
    def reserved(self) -> int:
        """What the pool has from the system now."""
        return self.in_use_bytes + self.waiting + self.cached


class PinnedBuffer:
    """A block in use; return it with `release` or by leaving a `with`.

    Attributes:
        nbytes: What was asked for; the tensor has exactly this many bytes.
    """

    def __init__(self, pool: PinnedPool, block: torch.Tensor, nbytes: int) -> None:
        self._pool, self._block, self.nbytes = pool, block, nbytes
        self._lost = weakref.finalize(self, pool._forget, block.numel())
        self._lost.atexit = False

    @property
    def tensor(self) -> torch.Tensor:
        """[nbytes], uint8, on the host, starts on a page. Contents are whatever was there.

        Raises:
            PinnedMemoryError: the buffer was given back ("pinned-released").
        """
        if not self._lost.alive:
            raise PinnedMemoryError(
                f"a pinned buffer of {self.nbytes} bytes was used after its release.",
                code="pinned-released",
                fix="Keep the buffer until the last use of its tensor, and release it once.",
            )
        return self._block[: self.nbytes]

    def view(self, dtype: torch.dtype, numel: int | None = None) -> torch.Tensor:
        """Return a [numel] tensor of `dtype` over the first bytes of the buffer; as many as fit when `numel` is None.

        Raises:
            PinnedMemoryError: `numel` elements need more than `nbytes` ("pinned-size").
        """
        count = self.nbytes // dtype.itemsize if numel is None else numel
        if count * dtype.itemsize > self.nbytes:
            raise PinnedMemoryError(
                f"{count} elements of {dtype} need {count * dtype.itemsize} bytes, the buffer has {self.nbytes}.",
                code="pinned-size",
                fix="Take a larger buffer.",
            )
        return self.tensor[: count * dtype.itemsize].view(dtype)

    def release(self, after: Any = None, *, in_finalizer: bool = False) -> None:
        """Give the block back.

        Args:
            in_finalizer: The garbage collector may be the caller, inside any line of any thread: wait for no lock and report
                to no sink. The pool counts the block at its next use.
            after: An event of the device (`query() -> bool`) that happens when the last copy from or into the buffer is
                done; the block is not used again before. None: nothing is under way.
        Raises:
            PinnedMemoryError: it was given back before ("pinned-released").
        """
        block = self.tensor  # raises for a second release
        del block
        self._lost.detach()
        self._pool._give_back(self._block, after)
        if not in_finalizer:
            self._pool._count_returned()

    def __enter__(self) -> PinnedBuffer:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._lost.alive:
            self.release()


class PinnedPool:
    """Allocates host memory up to a bound. Safe to use from several threads.

    Args:
        limit_bytes: What all blocks together may take.
        pinned: Whether blocks are page-locked (see `DeviceFacts.pinned`).
        name: For messages and for the gauge `accel/<name>/bytes`.
        allocate: Makes a block of exactly this many bytes, 1-D uint8; another one in tests.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        pinned: bool,
        name: str = "pinned",
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.limit_bytes, self.pinned, self.name = limit_bytes, pinned, name
        self._allocate = allocate or (_locked_block if pinned else _page_block)
        self._lock = threading.RLock()
        self._returned: deque[tuple[int, torch.Tensor | None, Any]] = deque()  # since `_collect`: bytes, block, event
        self._cached: list[torch.Tensor] = []
        self._waiting: list[tuple[Any, torch.Tensor]] = []
        self._in_use = self._peak = self._num_lent = 0

    def take(self, nbytes: int) -> PinnedBuffer:
        """Allocate `nbytes` of host memory: a cached block that fits well, or a new one.

        Raises:
            PinnedMemoryError: the bound would be passed even without the kept blocks ("pinned-limit"); the system has no
                memory to lock ("pinned-alloc").
        Cost: reuse takes microseconds; a new page-locked block is a driver call that locks page by page, so take blocks at
            the start and keep them.
        """
        if nbytes < 1:
            raise ValueError(f"a pinned buffer of {nbytes} bytes")
        size = self.block_bytes(nbytes)
        with self._lock:
            self._collect()
            block = self._fitting(size)
            if block is None:
                self._make_room(size, nbytes)
                block = self._new_block(size)
            self._in_use += block.numel()
            self._num_lent += 1
            self._changed()
            return PinnedBuffer(self, block, nbytes)

    def block_bytes(self, nbytes: int) -> int:
        """Return the bytes that a new block for `nbytes` takes from the limit.

        Blocks are whole pages, and a power of two when page-locked.
        """
        pages = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        return 1 << (pages - 1).bit_length() if self.pinned else pages

    def trim(self) -> int:
        """Return every kept block to the system; the number of bytes."""
        with self._lock:
            self._collect()
            freed = sum(block.numel() for block in self._cached)
            self._cached.clear()
            self._changed()
        return freed

    def stats(self) -> PoolStats:
        """Return the pool's present counts: bytes in use, waiting and cached, and the peak."""
        with self._lock:
            self._collect()
            cached = sum(block.numel() for block in self._cached)
            return PoolStats(self.limit_bytes, self._in_use, self._waiting_bytes(), cached, self._peak, self._num_lent)

    def _fitting(self, size: int) -> torch.Tensor | None:
        fits = [i for i, block in enumerate(self._cached) if size <= block.numel() <= size * _MAX_WASTE]
        if not fits:
            return None
        return self._cached.pop(min(fits, key=lambda i: self._cached[i].numel()))

    def _make_room(self, size: int, nbytes: int) -> None:
        """Return kept blocks to the system, largest first, until `size` fits under the bound."""
        used = self._in_use + self._waiting_bytes()
        if used + size > self.limit_bytes:
            rounded = f" (a block of {size})" if size != nbytes else ""
            raise PinnedMemoryError(
                f"pool {self.name!r}: asked for {nbytes} bytes{rounded}, {used} of {self.limit_bytes} are in use "
                f"by {self._num_lent} buffers, {self._waiting_bytes()} of them in copies that are not done.",
                code="pinned-limit",
                fix="Raise the pool's bound, release buffers earlier, or take smaller ones.",
            )
        self._cached.sort(key=torch.Tensor.numel)
        while self._cached and used + sum(map(torch.Tensor.numel, self._cached)) + size > self.limit_bytes:
            self._cached.pop()

    def _new_block(self, size: int) -> torch.Tensor:
        try:
            return self._allocate(size)
        except (RuntimeError, OSError, MemoryError) as error:
            raise PinnedMemoryError(
                f"pool {self.name!r}: the system gave no block of {size} bytes ({error}).",
                code="pinned-alloc",
                fix="Lower the pool's bound, or raise the memory or the locked-memory limit (ulimit -l) of the process.",
            ) from error

    def _give_back(self, block: torch.Tensor, after: Any) -> None:
        self._returned.append((block.numel(), block, after))

    def _count_returned(self) -> None:
        with self._lock:
            self._collect()
            self._changed()

    def _forget(self, size: int) -> None:
        """Remove a buffer that was dropped without release from the counts.

        Views of the buffer may still exist, so its block is never used again.
        """
        self._returned.append((size, None, None))

    def _collect(self) -> None:
        while self._returned:
            size, returned, after = self._returned.popleft()
            self._in_use -= size
            self._num_lent -= 1
            if returned is not None and after is None:
                self._cached.append(returned)
            elif returned is not None:
                self._waiting.append((after, returned))
        still: list[tuple[Any, torch.Tensor]] = []
        for event, block in self._waiting:
            if event.query():
                self._cached.append(block)
            else:
                still.append((event, block))
        self._waiting = still

    def _waiting_bytes(self) -> int:
        return sum(block.numel() for _, block in self._waiting)

    def _changed(self) -> None:
        used = self._in_use + self._waiting_bytes()
        self._peak = max(self._peak, used)
        gauge(f"accel/{self.name}/bytes", used)


def _page_block(nbytes: int) -> torch.Tensor:
    # Anonymous mappings start on a page, come zeroed and lazily, and go back to the system when the tensor is freed.
    if nbytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return streams.host_memory(torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8))
    # A transfer past the page cache pins every page of its memory: huge ones are 1.5x as fast (docs/benchmarks/io.md).
    region = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(region)) % _HUGE_PAGE_BYTES
    return streams.host_memory(torch.frombuffer(region, dtype=torch.uint8)[first : first + nbytes])


def _locked_block(nbytes: int) -> torch.Tensor:
    return streams.page_locked((nbytes,), torch.uint8)
