"""Executing load plans: byte ranges into buffers, every block proven by its checksum. No torch.

A block that this rank needs as a whole is checked here. Of a block that it needs in part it reads only that part, and
reports the part's contribution to the block's checksum (see `crc`): when the ranks' parts make up the block, their XOR
must be the recorded value. What the ranks together do not cover is then read by one of them, only to be checked.

Words: a *span* is a range of a block that is needed. Adjacent spans of a file are read as one *stretch*, of up to
`Files.stretch_bytes`; stretches are read, copied and checked on a few threads in any order (see `files`). A block that was encoded is read
and decoded as a whole, wherever a part of it is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final

from ds_ckpt.block_codecs import decode
from ds_ckpt.crc import copy_crc32, crc32, shifted
from ds_ckpt.file_reads import DIRECT_BYTES, Files
from ds_ckpt.save_plan import BlockRead, CopyRun
from ds_config.errors import CheckpointError

__all__ = ["PartialRead", "bad_block", "check_block", "missing_bytes", "read_blocks", "unproven"]

_GAP: Final = 4096  # bytes between two runs that are read through: a disk reads pages anyway
_THREADS: Final = 4
_LARGE: Final = 2**16


@dataclass(frozen=True, slots=True)
class PartialRead:
    """What one rank read of a block: which ranges (merged, in order), and their contribution to its checksum."""

    file: int
    at: int
    ranges: tuple[tuple[int, int], ...]
    crc: int


class _Block:
    """What is known of one block: the checksum of what was read of it so far, and how many bytes are still to come."""

    def __init__(self, files: Files, read: BlockRead) -> None:
        self._files, self.read = files, read
        self.spans = _spans(read.runs, read.nbytes)
        self.ranges: list[tuple[int, int]] = []
        for low, high, _ in self.spans:
            if self.ranges and self.ranges[-1][1] == low:
                low = self.ranges.pop()[0]
            self.ranges.append((low, high))
        self.whole = self.ranges == [(0, read.nbytes)]
        self._crc, self._lock = 0, threading.Lock()
        self._left = sum(high - low for low, high in self.ranges)

    def add(self, low: int, high: int, crc: int) -> None:
        """Add the checksum of bytes low..high to that of the block.

        Raises when the block is complete and its checksum is not the stored checksum.
        """
        with self._lock:
            self._crc ^= shifted(crc, self.read.nbytes - high)
            self._left -= high - low
            over = self._left == 0
        if over and self.whole and self._crc != int(self.read.crc32, 16):
            raise bad_block(self._files, self.read)

    def partial(self) -> PartialRead:
        return PartialRead(self.read.file, self.read.at, tuple(self.ranges), self._crc)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes low..high of a block, at the bytes start..stop of file number `file`, and the runs of their span."""

    block: _Block
    low: int
    high: int
    runs: Sequence[CopyRun]
    file: int
    start: int
    stop: int


_Stretch = list[_Piece]  # pieces that are read at once: in order, of one file, with at most _GAP bytes between them


def read_blocks(files: Files, reads: Sequence[BlockRead], buffers: Sequence[memoryview]) -> list[PartialRead]:
    """Fill `buffers` (one per shard, bytes) and return the parts of blocks that are not proven yet.

    Raises:
        CheckpointError: "ckpt-block-damaged", naming file, byte range and tensor.
    Cost: each byte is read once; up to 4 KiB between needed ranges is read through.
    """
    blocks = [_Block(files, read) for read in reads if not read.codec]
    encoded = [read for read in reads if read.codec]
    failed = threading.Event()
    tasks: list[Future[None]] = []

    def run(take: Callable[[], None]) -> None:
        try:
            take()
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ds-ckpt-read") as pool:
        for stretches in _tasks(blocks, files.stretch_bytes):
            if failed.is_set():
                break
            if len(stretches) == 1:  # asked for here, in the order of the file, and awaited there
                take = partial(_take, stretches[0], _fetch(files, stretches[0]), buffers)
            else:
                take = partial(_take_all, files, stretches, buffers)
            tasks.append(pool.submit(run, take))
        for read in encoded:
            tasks.append(pool.submit(run, partial(_take_encoded, files, read, buffers, failed)))
        for task in tasks:
            task.result()
    return [block.partial() for block in blocks if not block.whole]


def _tasks(blocks: Sequence[_Block], limit: int) -> Iterator[list[_Stretch]]:
    """Group the stretches to read into tasks, in file order: a task per long stretch, short stretches batched."""
    short: list[_Stretch] = []
    num_bytes = 0
    for stretch in _stretches(blocks, limit):
        nbytes = stretch[-1].stop - stretch[0].start
        if nbytes >= DIRECT_BYTES:
            yield [stretch]
            continue
        short.append(stretch)
        num_bytes += nbytes
        if num_bytes >= limit:
            yield short
            short, num_bytes = [], 0
    if short:
        yield short


def _stretches(blocks: Sequence[_Block], limit: int) -> Iterator[_Stretch]:
    """Cut the spans of all blocks at multiples of `limit` of their files, and join adjacent spans."""
    open_: _Stretch = []
    for piece in _pieces(blocks, limit):
        if open_:
            last = open_[-1]
            same = (last.file, last.start // limit) == (piece.file, piece.start // limit)
            if not same or not 0 <= piece.start - last.stop < _GAP:
                yield open_
                open_ = []
        open_.append(piece)
    if open_:
        yield open_


def _pieces(blocks: Sequence[_Block], limit: int) -> Iterator[_Piece]:
    for block in blocks:
        file, at = block.read.file, block.read.at
        for low, high, runs in block.spans:
            while low < high:
                stop = min(high, (at + low) // limit * limit + limit - at)
                yield _Piece(block, low, stop, runs, file, at + low, at + stop)
                low = stop


def _fetch(files: Files, stretch: _Stretch) -> AbstractContextManager[memoryview]:
    return files.start(stretch[0].file, stretch[0].start, stretch[-1].stop - stretch[0].start)


def _take_encoded(files: Files, read: BlockRead, buffers: Sequence[memoryview], failed: threading.Event) -> None:
    """Read a whole block, decode and check it, and put its runs where they belong. Costs its memory, encoded and not."""
    if failed.is_set():
        return
    view = memoryview(_decoded(files, read))
    for run in read.runs:
        buffers[run.shard][run.to : run.to + run.nbytes] = view[run.at : run.at + run.nbytes]


def _decoded(files: Files, read: BlockRead) -> bytes | memoryview:
    with files.using(read.file) as file:
        try:
            data = decode(read.codec, file.view(read.at, read.stored_nbytes), read.nbytes)
        except CheckpointError as error:
            if error.code != "ckpt-block-damaged":
                raise
            raise bad_block(files, read) from error
    if crc32(data) != int(read.crc32, 16):
        raise bad_block(files, read)
    return data


def _take_all(files: Files, stretches: Sequence[_Stretch], buffers: Sequence[memoryview]) -> None:
    for stretch in stretches:
        _take(stretch, _fetch(files, stretch), buffers)


def _take(stretch: _Stretch, fetched: AbstractContextManager[memoryview], buffers: Sequence[memoryview]) -> None:
    """Put the bytes of a stretch where they belong, and check them."""
    first = stretch[0].start
    with fetched as view:
        for piece in stretch:
            part = view[piece.start - first : piece.stop - first]
            piece.block.add(piece.low, piece.high, _place(part, (piece.low, piece.high), piece.runs, buffers))


def _place(view: memoryview, span: tuple[int, int], runs: Sequence[CopyRun], buffers: Sequence[memoryview]) -> int:
    """Put each run's bytes of a stretch where they belong; the checksum of the stretch."""
    low, high = span
    if len(runs) == 1 and runs[0].at <= low and high <= runs[0].at + runs[0].nbytes:
        to = runs[0].to + low - runs[0].at
        return copy_crc32(buffers[runs[0].shard][to : to + high - low], view)
    for run in runs:
        first, last = max(run.at, low), min(run.at + run.nbytes, high)
        if first < last:
            to = run.to + first - run.at
            buffers[run.shard][to : to + last - first] = view[first - low : last - low]
    return crc32(view)


def _spans(runs: Sequence[CopyRun], nbytes: int) -> list[tuple[int, int, list[CopyRun]]]:
    """Runs grouped into disjoint ranges to read, in order: (low, high, runs inside).

    Small gaps and block edges are read through; a large run is a range of its own, so that it is copied and checked at once.
    """
    spans: list[tuple[int, int, list[CopyRun]]] = []
    for run in runs:
        stop = run.at + run.nbytes
        if spans:
            low, high, group = spans[-1]
            apart = min(run.nbytes, high - low) >= _LARGE and len(group) == 1
            if run.at < high or (run.at - high < _GAP and not (run.at == high and apart)):
                group.append(run)
                spans[-1] = (low, max(high, stop), group)
                continue
        spans.append((run.at, stop, [run]))
    if spans[0][0] < _GAP:
        spans[0] = (0, spans[0][1], spans[0][2])
    if nbytes - spans[-1][1] < _GAP:
        spans[-1] = (spans[-1][0], nbytes, spans[-1][2])
    return spans


def unproven(
    partials: Iterable[PartialRead], expected: Mapping[tuple[int, int], tuple[int, int]]
) -> list[tuple[int, int]]:
    """Blocks (file, at) whose checksum the ranks' parts do not confirm: not covered exactly once, or with another checksum.

    Args:
        partials: Of all ranks. Replicas that read the same ranges count once.
        expected: (file, at) -> (block bytes, checksum).
    """
    parts: dict[tuple[int, int], set[tuple[tuple[tuple[int, int], ...], int]]] = {}
    for p in partials:
        parts.setdefault((p.file, p.at), set()).add((p.ranges, p.crc))
    out = []
    for key, block_parts in sorted(parts.items()):
        nbytes, want = expected[key]
        at, crc = 0, 0
        for low, high in sorted(r for ranges, _ in block_parts for r in ranges):
            if low != at:
                break
            at = high
        for _, part in block_parts:
            crc ^= part
        if at != nbytes or crc != want or sum(h - l for ranges, _ in block_parts for l, h in ranges) != nbytes:  # noqa: E741
            out.append(key)
    return out


def check_block(files: Files, read: BlockRead) -> None:
    """Read all of a block only to check it. Raises CheckpointError "ckpt-block-damaged"."""
    if read.codec:
        _decoded(files, read)
        return
    crc, low, limit = 0, 0, files.stretch_bytes
    while low < read.nbytes:
        high = min(read.nbytes, (read.at + low) // limit * limit + limit - read.at)
        with files.fetch(read.file, read.at + low, high - low) as view:
            crc = crc32(view, crc)
        low = high
    if crc != int(read.crc32, 16):
        raise bad_block(files, read)


def missing_bytes(reads: Sequence[BlockRead], sizes: Sequence[int]) -> list[int]:
    """Return the bytes of each shard that a plan does not fill; all zero for a plan that may be executed."""
    left = list(sizes)
    for read in reads:
        for run in read.runs:
            left[run.shard] -= run.nbytes
    return left


def bad_block(files: Files, read: BlockRead) -> CheckpointError:
    """Build the error that names a damaged block."""
    return CheckpointError(
        f"{files.name(read.file)} is damaged: bytes {read.at}..{read.at + (read.stored_nbytes or read.nbytes)}, part of {read.name!r}, "
        f"do not have the checksum {read.crc32}",
        code="ckpt-block-damaged",
        fix="Use another checkpoint; `ds ckpt verify` lists all damaged blocks.",
    )
