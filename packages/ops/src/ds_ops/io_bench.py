"""Measures transfers over a grid of settings and picks the best: what `ds io bench` and `ds io tune` run.

A *case* is one point of the grid. All cases move the same file, in an order that alternates, several times; the median
counts. Reads are done after the file was synced and dropped from the page cache, so that a buffered read is not a copy.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ds_ops.host_arena import zeros_huge
from ds_ops.io import AsyncIO, Backend, IOSettings

__all__ = ["IOBandwidth", "IOCase", "IOGrid", "aligned_bytes", "best_section", "cases", "measure", "table", "uncached"]


@dataclass(frozen=True, slots=True)
class IOGrid:
    """The values to combine, and how much to move."""

    backends: tuple[Backend, ...] = ("io_uring", "libaio", "threads")
    block_bytes: tuple[int, ...] = (1 << 20, 8 << 20)
    queue_depths: tuple[int, ...] = (8, 32)
    workers: tuple[int, ...] = (1, 2)
    write: bool = True
    read: bool = True
    total_bytes: int = 256 << 20
    loops: int = 3
    direct: bool = True


@dataclass(frozen=True, slots=True)
class IOCase:
    """One direction with one set of settings."""

    write: bool
    settings: IOSettings


@dataclass(frozen=True, slots=True)
class IOBandwidth:
    """A case and its median bandwidth, bytes a second."""

    case: IOCase
    bytes_per_s: float

    def as_dict(self) -> dict[str, object]:
        """Convert the measurement to plain values for JSON."""
        return {
            "direction": "write" if self.case.write else "read",
            **asdict(self.case.settings),
            "bytes_per_s": self.bytes_per_s,
        }


def cases(grid: IOGrid) -> list[IOCase]:
    """List every combination of the grid, writes first. Pure."""
    directions = [True] * grid.write + [False] * grid.read
    return [
        IOCase(write, IOSettings(block, depth, workers, backend, grid.direct))
        for write, backend, block, depth, workers in itertools.product(
            directions, grid.backends, grid.block_bytes, grid.queue_depths, grid.workers
        )
    ]


def measure(grid: IOGrid, folder: str | os.PathLike[str]) -> list[IOBandwidth]:
    """Run every case `grid.loops` times in `folder`, one after another. Takes total_bytes of memory and of disk; cleans up.

    Raises:
        FileTransferError: the folder is missing or full.
    """
    path = Path(folder) / f".ds-io-bench-{os.getpid()}"
    data = aligned_bytes(grid.total_bytes)
    todo = cases(grid)
    seconds: dict[IOCase, list[float]] = {case: [] for case in todo}
    try:
        with AsyncIO(replace(todo[0].settings, backend="auto")) as io:
            io.write_file(path, data, sync=True).wait()
        for _ in range(grid.loops):
            for case in todo:
                seconds[case].append(_once(case, path, data))
    finally:
        path.unlink(missing_ok=True)
    return [IOBandwidth(case, grid.total_bytes / statistics.median(times)) for case, times in seconds.items()]


def _once(case: IOCase, path: Path, data: torch.Tensor) -> float:
    with AsyncIO(case.settings) as io, uncached(path):
        start = time.perf_counter()
        transfer = io.write(path, data) if case.write else io.read(path, data)
        transfer.wait()
        return time.perf_counter() - start


@contextmanager
def uncached(path: Path) -> Iterator[None]:
    """Sync `path` and drop it from the page cache before the body."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        yield
    finally:
        os.close(fd)


def aligned_bytes(nbytes: int) -> torch.Tensor:
    """Allocate [nbytes] uint8 at a multiple of 4096, in huge pages if large: O_DIRECT needs no copy.

    Memory that was pinned page by page cost a third of the bandwidth.
    """
    (memory,) = zeros_huge([nbytes + 4096], torch.uint8)
    # numpy gives the address without private names; the view keeps the whole alive.
    start = -memory.numpy().ctypes.data % 4096
    return memory[start : start + nbytes].fill_(1)


def table(rows: Sequence[IOBandwidth]) -> str:
    """Format one line a case, best first in each direction. Bandwidth in GB/s (1e9 bytes)."""
    head = f"{'':<6} {'backend':<9} {'block':>8} {'depth':>6} {'workers':>8} {'GB/s':>7}"
    lines = [head]
    for row in sorted(rows, key=lambda r: (not r.case.write, -r.bytes_per_s)):
        s = row.case.settings
        direction = "write" if row.case.write else "read"
        lines.append(
            f"{direction:<6} {s.backend:<9} {_size(s.block_bytes):>8} {s.queue_depth:>6} {s.workers:>8} "
            f"{row.bytes_per_s / 1e9:>7.2f}"
        )
    return "\n".join(lines)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def best_section(rows: Sequence[IOBandwidth]) -> dict[str, int]:
    """Choose the `aio` section: settings whose slower direction, relative to the best, is fastest."""
    top = {w: max((r.bytes_per_s for r in rows if r.case.write is w), default=0.0) for w in (True, False)}
    share: dict[IOSettings, float] = {}
    for row in rows:
        part = row.bytes_per_s / top[row.case.write]
        share[row.case.settings] = min(part, share.get(row.case.settings, 1.0))
    best = max(share, key=lambda s: share[s])
    return {"block_size": best.block_bytes, "queue_depth": best.queue_depth, "intra_op_parallelism": best.workers}
