"""Executing load plans: byte ranges into buffers, every block proven by its checksum. No torch.

A block that this rank needs as a whole is checked here. Of a block that it needs in part it reads only that part, and
reports the part's contribution to the block's checksum (see `crc`): when the ranks' parts make up the block, their XOR
must be the recorded value. What the ranks together do not cover is then read by one of them, only to be checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from ds_ckpt.crc import copy_crc32, crc32, shifted
from ds_ckpt.format import Manifest
from ds_ckpt.plan import BlockRead, Run
from ds_ckpt.protocols import ReadFile, Storage
from ds_config.errors import CheckpointError

__all__ = ["Files", "Partial", "bad_block", "check_block", "missing_bytes", "read_blocks", "unproven"]

_GAP: Final = 4096  # bytes between two runs that are read through: a disk reads pages anyway
_THREADS: Final = 4
_STRETCH: Final = 4 * 2**20  # bytes that a file is asked for at a time: its read-ahead
_LARGE: Final = 2**16


@dataclass(frozen=True, slots=True)
class Partial:
    """What one rank read of a block: which ranges (merged, in order), and their contribution to its checksum."""

    file: int
    at: int
    ranges: tuple[tuple[int, int], ...]
    crc: int


class Files:
    """The data files of one checkpoint, opened on first use, with their sizes checked; a context manager."""

    def __init__(self, storage: Storage, tag: str, manifest: Manifest) -> None:
        self._storage, self._tag, self._manifest = storage, tag, manifest
        self._open: dict[int, ReadFile] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def get(self, index: int) -> ReadFile:
        """File number `index`. Raises CheckpointError "ckpt-not-found" or "ckpt-file-truncated" (wrong size)."""
        if index not in self._open:
            record = self._manifest.files[index]
            file = self._storage.open(self._tag, record.name)
            self._stack.callback(file.close)
            if file.nbytes != record.nbytes:
                raise CheckpointError(
                    f"{self.name(index)} has {file.nbytes} bytes, the manifest says {record.nbytes}",
                    code="ckpt-file-truncated",
                    fix="The file was cut or replaced; use another checkpoint.",
                )
            self._open[index] = file
        return self._open[index]

    def name(self, index: int) -> str:
        return f"{self._storage.where(self._tag)}/{self._manifest.files[index].name}"


def read_blocks(files: Files, reads: Sequence[BlockRead], buffers: Sequence[memoryview]) -> list[Partial]:
    """Fill `buffers` (one per shard, bytes) and return the parts of blocks that are not proven yet.

    Raises:
        CheckpointError: "ckpt-block-damaged", naming file, byte range and tensor.
    Cost: each byte is read once; up to 4 KiB between needed ranges is read through.
    """
    for index in sorted({read.file for read in reads}):
        files.get(index)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ds-ckpt-read") as pool:
        results = list(pool.map(lambda read: _read_block(files, read, buffers), reads))
    return [partial for partial in results if partial is not None]


def _read_block(files: Files, read: BlockRead, buffers: Sequence[memoryview]) -> Partial | None:
    file = files.get(read.file)
    crc = 0
    ranges: list[tuple[int, int]] = []
    for low, high, runs in _spans(read.runs, read.nbytes):
        crc ^= shifted(_take(file, (read.at, low, high), runs, buffers), read.nbytes - high)
        if ranges and ranges[-1][1] == low:
            low = ranges.pop()[0]
        ranges.append((low, high))
    if ranges == [(0, read.nbytes)]:
        if crc != int(read.crc32, 16):
            raise bad_block(files, read)
        return None
    return Partial(read.file, read.at, tuple(ranges), crc)


def _take(file: ReadFile, span: tuple[int, int, int], runs: Sequence[Run], buffers: Sequence[memoryview]) -> int:
    """Read bytes low..high of the block at `at` (span: at, low, high), put each run where it belongs; the checksum."""
    at, start, stop = span
    crc = 0
    for low in range(start, stop, _STRETCH):
        high = min(low + _STRETCH, stop)
        view = file.view(at + low, high - low)
        if len(runs) == 1 and (runs[0].at, runs[0].nbytes) == (start, stop - start):
            to = runs[0].to + low - start
            crc = copy_crc32(buffers[runs[0].shard][to : to + high - low], view, crc)
            continue
        crc = crc32(view, crc)
        for run in runs:
            first, last = max(run.at, low), min(run.at + run.nbytes, high)
            if first < last:
                to = run.to + first - run.at
                buffers[run.shard][to : to + last - first] = view[first - low : last - low]
    return crc


def _spans(runs: Sequence[Run], nbytes: int) -> list[tuple[int, int, list[Run]]]:
    """Runs grouped into disjoint ranges to read, in order: (low, high, runs inside).

    Small gaps and block edges are read through; a large run is a range of its own, so that it is copied and checked at once.
    """
    spans: list[tuple[int, int, list[Run]]] = []
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


def unproven(partials: Iterable[Partial], expected: Mapping[tuple[int, int], tuple[int, int]]) -> list[tuple[int, int]]:
    """Blocks (file, at) that the ranks' parts do not prove: not covered exactly once, or with another checksum.

    Args:
        partials: Of all ranks. Replicas that read the same ranges count once.
        expected: (file, at) -> (block bytes, checksum).
    """
    parts: dict[tuple[int, int], set[tuple[tuple[tuple[int, int], ...], int]]] = {}
    for p in partials:
        parts.setdefault((p.file, p.at), set()).add((p.ranges, p.crc))
    out = []
    for key, found in sorted(parts.items()):
        nbytes, want = expected[key]
        at, crc = 0, 0
        for low, high in sorted(r for ranges, _ in found for r in ranges):
            if low != at:
                break
            at = high
        for _, part in found:
            crc ^= part
        if at != nbytes or crc != want or sum(h - l for ranges, _ in found for l, h in ranges) != nbytes:  # noqa: E741
            out.append(key)
    return out


def check_block(files: Files, read: BlockRead) -> None:
    """Read all of a block only to check it. Raises CheckpointError "ckpt-block-damaged"."""
    file, crc = files.get(read.file), 0
    for low in range(0, read.nbytes, _STRETCH):
        crc = crc32(file.view(read.at + low, min(_STRETCH, read.nbytes - low)), crc)
    if crc != int(read.crc32, 16):
        raise bad_block(files, read)


def missing_bytes(reads: Sequence[BlockRead], sizes: Sequence[int]) -> list[int]:
    """Bytes of each shard that a plan does not fill; all zero for a plan that may be executed."""
    left = list(sizes)
    for read in reads:
        for run in read.runs:
            left[run.shard] -= run.nbytes
    return left


def bad_block(files: Files, read: BlockRead) -> CheckpointError:
    """The error that names a damaged block."""
    return CheckpointError(
        f"{files.name(read.file)} is damaged: bytes {read.at}..{read.at + read.nbytes}, part of {read.name!r}, "
        f"do not have the checksum {read.crc32}",
        code="ckpt-block-damaged",
        fix="Use another checkpoint; `ds ckpt verify` lists all damaged blocks.",
    )
