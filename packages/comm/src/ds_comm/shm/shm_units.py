"""Memory that the ranks of one host share for what is gathered and reduced again and again: a gather is a barrier, a reduction one pass.

Words: a *unit* is what is gathered at once; it has a number. *home* is its full buffer, once per host; each rank writes its own chunk of
it only. A rank reads it through its *overlay* of home: reads see home, and a write stays with the rank that made it (a private mapping:
the page is copied on write) until it is adopted into home or dropped. A *slot* is a buffer of every rank for a reduction that all ranks
can read; there are two, used alternately.

Note "two slots". Reductions are numbered, in one order on all ranks. Before a rank fills a slot for number k it has finished number
k-1: every rank has posted k-1, and a rank posts k-1 after it finished k-2. So nobody still reads what the slot held.

Nothing here has a name in the file system, a thread or a descriptor that stays open; the memory goes with the last tensor.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_comm.groups import Group
from ds_comm.metadata import all_gather_json, broadcast_json
from ds_comm.node_topology import neighbours
from ds_comm.shm.shm_sequence import ShmSequence
from ds_comm.shm.symmetric_arena import arena_refusal
from ds_ops.shm_collectives import SharedSegment

__all__ = ["ReductionBuffers", "ShmUnitMemory", "host_refusal"]


_PAGE = mmap.PAGESIZE
# Buffers that one pass reads together do not start at the same place of a page; see docs/benchmarks/ops.md.
_STAGGER, _STAGGERS = 1024, 4
# One 8-byte word per page, see proc_pid_pagemap(5). In its top byte: 0x80 present, 0x40 swapped, 0x20 a page of the file.
_TOP = 7 if sys.byteorder == "little" else 0
_NOT_OURS = bytes(top for top in range(256) if not top & 0xC0 or top & 0x20)


@dataclass(frozen=True, slots=True)
class ReductionBuffers:
    """One reduction's buffers.

    Attributes:
        number: In the order of reductions; 1 for the first.
        local: What this rank fills. [numel]
        all: Those of all ranks, `local` included.
    """

    number: int
    local: Tensor
    all: tuple[Tensor, ...]


def host_refusal(group: Group) -> str:
    """Return why the ranks of `group` cannot share memory; empty if they can. Collective over the group."""
    refusal = "" if os.path.exists("/proc/self/pagemap") else f"rank {group.ranks[group.rank]} cannot see its own pages"
    refusals = all_gather_json(refusal, group, unit="host")
    return next((why for why in refusals if why), "") or arena_refusal(group)


class ShmUnitMemory:
    """The shared memory of several units on one host. Construction is collective over the group.

    Args:
        fulls: (elements, dtype) of the full buffers, by number of the unit.
        slot_bytes: Of a slot.
    Attributes:
        nbytes: Bytes of the segment; memory is taken page by page when first written.
        pending: Finishes the reduction that is under way on this rank; None: none is.
    """

    def __init__(self, group: Group, fulls: Mapping[int, tuple[int, torch.dtype]], slot_bytes: int) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        places, end = [], ShmSequence.nbytes_for(group.size)
        for place, (numel, dtype) in enumerate(fulls.values()):
            places.append(end + place % _STAGGERS * _STAGGER)
            end += -(-(numel * dtype.itemsize + _STAGGER * _STAGGERS) // _PAGE) * _PAGE
        self._overlaid = end
        slots = []
        for number in range(2 * group.size if slot_bytes else 0):
            slots.append(end + number % _STAGGERS * _STAGGER)
            end += -(-(slot_bytes + _STAGGER * _STAGGERS) // _PAGE) * _PAGE
        self.nbytes = end
        segment, pids = self._attach(end)
        self._posted = ShmSequence(segment, 0, group, pids)
        spans = [(number, n, d, at) for (number, (n, d)), at in zip(fulls.items(), places, strict=True)]
        self._homes = {number: segment.tensor(n, d, at) for number, n, d, at in spans}
        self._overlay = _Overlay(segment.fd, self._overlaid)
        self._fulls = {number: self._overlay.tensor(n, d, at) for number, n, d, at in spans}
        self._slots = [segment.tensor(slot_bytes, torch.uint8, at) for at in slots]
        self._rows: dict[tuple[int, int, torch.dtype], tuple[Tensor, ...]] = {}
        self._ranges = {number: (at, n * d.itemsize) for number, n, d, at in spans}
        self.pending: Callable[[], None] | None = None
        self._number = 0
        self._marks: dict[int, int] = {}
        self.barrier("begin")
        segment.close()

    def _attach(self, nbytes: int) -> tuple[SharedSegment, list[int]]:
        # Each parameter's old pages are free when the next is copied here. Huge pages would have to be found elsewhere: twice the
        # setup, a tenth more memory, and no shorter steps.
        owned = SharedSegment(nbytes, small_pages=True) if self.rank == 0 else None
        pids = [one.pid for one in neighbours(self.group, unit="host")]
        token = broadcast_json(owned.token if owned else "", self.group, unit="host")
        return owned or SharedSegment.attach(token, nbytes), pids

    def full(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the shared storage and the overlay of a unit; both [numel], zero at first."""
        return self._homes[number], self._fulls[number]

    def barrier(self, what: str) -> None:
        """Return when every rank came: what they wrote to home before is visible in every overlay after.

        A few microseconds when all are ready. Raises CommError when one ended or came with something else.
        """
        self._posted.wait(self._posted.advance(what), what)

    # ---- reductions

    def open_slot(self, numel: int, dtype: torch.dtype, finish: Callable[[], None]) -> ReductionBuffers:
        """Open the buffers of the next reduction, [numel] each, uninitialized; fill this rank's buffer, then `post`.

        Args:
            finish: Finishes this reduction on this rank; called before the next slot is opened, if not called earlier.
        """
        self.finish_pending()
        self.pending = finish
        self._number += 1
        rows = self._rows_of(self._number % 2, numel, dtype)
        return ReductionBuffers(self._number, rows[self.rank], rows)

    def _rows_of(self, parity: int, numel: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        rows = self._rows.get((parity, numel, dtype))
        if rows is None:
            slots = self._slots[parity * self.size : (parity + 1) * self.size]
            rows = self._rows[parity, numel, dtype] = tuple(
                slot[: numel * dtype.itemsize].view(dtype) for slot in slots
            )
        return rows

    def finish_pending(self) -> None:
        """Finish the reduction that is under way, if one is."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()

    def finish_ready(self) -> None:
        """Finish the reduction that is under way, if every rank has posted its part: memory comes back early. 1 us."""
        if self.pending is None:
            return
        mark = self._marks.get(self._number)
        if mark is not None and self._posted.reached(mark):
            self.finish_pending()

    def post(self, slot: ReductionBuffers, what: str) -> None:
        """Publish that this rank filled its part of a slot.

        `what` describes the data, the same on all ranks.
        """
        self._marks[slot.number] = self._posted.advance(what)

    def wait(self, slot: ReductionBuffers, what: str) -> None:
        """Return when every rank has posted its part of a slot."""
        mark = self._marks.get(slot.number)
        if mark is not None:
            self._posted.wait(mark, what)

    def pulled(self, slot: ReductionBuffers) -> None:
        """Drop this rank's record of a slot that it has finished reading."""
        self._marks.pop(slot.number, None)
        if slot.number == self._number:
            self.pending = None

    # ---- edits

    def edited(self) -> list[int]:
        """Numbers of the units of whose overlay this rank has written a page. Cost: 8 bytes read per page of all units."""
        pages = self._overlay.written()
        if not pages:
            return []
        return [
            number
            for number, (at, nbytes) in self._ranges.items()
            if any(at // _PAGE <= page <= (at + nbytes - 1) // _PAGE for page in pages)
        ]

    def forget(self, number: int) -> None:
        """Drop this rank's edits of a unit: its overlay is home again."""
        at, nbytes = self._ranges[number]
        self._overlay.forget(at, nbytes)


class _Overlay:
    """A private mapping of the first `nbytes` of a file."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._first = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) // _PAGE
        self._words = bytearray(-(-nbytes // _PAGE) * 8)

    def tensor(self, numel: int, dtype: torch.dtype, at: int) -> Tensor:
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=at)

    def written(self) -> list[int]:
        """Pages that are ours and not the file's."""
        file = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.preadv(file, [self._words], self._first * 8)
        finally:
            os.close(file)
        tops = self._words[_TOP::8]
        if not tops.translate(None, _NOT_OURS):
            return []
        return [page for page, top in enumerate(tops) if top not in _NOT_OURS]

    def forget(self, at: int, nbytes: int) -> None:
        start = at // _PAGE * _PAGE
        self._map.madvise(mmap.MADV_DONTNEED, start, at + nbytes - start)
