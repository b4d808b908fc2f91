"""`deepspeed.io`: files that `torch.save` writes to, which count what they do; the fast one by asynchronous transfers of pinned memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed._ours.base.raising import refused

_BASE = ("close", "fileno", "flush", "write", "bytes", "write_secs", "write_GB/s")
_FAST = (
    "aio_write_secs", "aio_bytes", "aio_GB/s", "slow_bytes", "slow_write_secs", "fill_buffer_count", "fill_buffer_secs",
    "fill_buffer_GB/s", "save_storage", "save_storage_bytes",
)  # fmt: skip
_NO_FILE = -1  # what `fileno` answers, so that torch.save writes through `write`


class _CountingFile:
    """A path and counts of what was done with it."""

    def __init__(self, file_path: str, counts: Sequence[str] = ()) -> None:
        self._file_path = file_path
        self._stats: dict[str, Any] = dict.fromkeys((*_BASE, *counts), 0)

    def file_path(self) -> str:
        """Return the path."""
        return self._file_path

    def fileno(self) -> int:
        """Return -1: writes must come through `write`."""
        self._stats["fileno"] += 1
        return _NO_FILE

    def flush(self) -> None:
        """Count the call; what is written reaches the file at `close` at the latest."""
        self._stats["flush"] += 1

    def close(self) -> None:
        """Count the call."""
        self._stats["close"] += 1

    def _count(self, nbytes: int, began: float | None = None) -> int:
        self._stats["write"] += 1
        self._stats["bytes"] += nbytes
        self._stats["write_secs"] += 0 if began is None else time.perf_counter() - began
        return nbytes

    def _dump_state(self) -> None:
        stats = self._stats
        for speed, size, seconds in (
            ("write_GB/s", "bytes", "write_secs"),
            ("aio_GB/s", "aio_bytes", "aio_write_secs"),
            ("fill_buffer_GB/s", "aio_bytes", "fill_buffer_secs"),
        ):
            if stats.get(seconds):
                stats[speed] = stats[size] / stats[seconds] / 1024**3
        stats["path"] = self._file_path
        print(f"stats = {stats}")


class PyFileWriter(_CountingFile):
    """Python's own file, counted."""

    def __init__(self, file_path: str) -> None:
        super().__init__(file_path)
        self._file = open(file_path, "wb")  # noqa: SIM115  closed by `close`

    def write(self, buffer: Any) -> int:
        """Write bytes; how many."""
        began = time.perf_counter()
        self._file.write(buffer)
        return self._count(memoryview(buffer).nbytes, began)

    def flush(self) -> None:
        """Hand over what was written to the system."""
        super().flush()
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        super().close()
        self._file.close()


class MockFileWriter(_CountingFile):
    """An empty file, and counts of what would be in it: how long a save takes without a disk."""

    def __init__(self, file_path: str) -> None:
        super().__init__(file_path, ("save_storage", "save_storage_bytes"))
        Path(file_path).write_bytes(b"")

    def write(self, buffer: Any) -> int:
        """Count bytes."""
        return self._count(memoryview(buffer).nbytes)

    def save_torch_storage_object_list(self, storage_obj_list: Sequence[Any], save_size: bool) -> int:
        """Count storages, each with its size before it where `save_size`."""
        pieces = list(_storage_bytes(storage_obj_list, save_size))
        self._stats["save_storage"] += len(storage_obj_list)
        self._stats["save_storage_bytes"] += sum(piece.numel() for piece in pieces)
        return sum(self._count(piece.numel()) for piece in pieces)


@dataclass
class FastFileWriterConfig:
    """What a `FastFileWriter` works with.

    Attributes:
        dnvme_handle: `AsyncIOBuilder().load().aio_handle(...)`, or one of GDSBuilder's.
        pinned_tensor: Bytes that writes go through; their number is a multiple of twice the handle's alignment.
        double_buffer: Fill one half while the other one is written.
        num_parallel_writers, writer_rank: Of a list of storages write this part only.
        global_rank: A note.
    """

    dnvme_handle: Any
    pinned_tensor: Tensor
    double_buffer: bool = True
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0


class FastFileWriter(_CountingFile):
    """A file that is written through pinned memory. What is written lies there when `close` has returned.

    Raises:
        ConfigError: the memory or the part does not fit; a ValueError, too ("compat-argument").
    """

    def __init__(self, file_path: str, config: FastFileWriterConfig) -> None:
        super().__init__(file_path, _FAST)
        self._handle, memory = config.dnvme_handle, config.pinned_tensor.view(torch.uint8)
        halves = 2 if config.double_buffer else 1
        if not memory.numel() or memory.dim() != 1 or memory.numel() % (halves * self._handle.get_alignment()):
            raise refused("pinned-bytes", memory.numel(), memory.dim(), halves * self._handle.get_alignment())
        if not 0 <= config.writer_rank < config.num_parallel_writers:
            raise refused("writer-rank", config.writer_rank, config.num_parallel_writers)
        self._part = (config.writer_rank, config.num_parallel_writers)
        self._halves = list(memory.chunk(halves))
        self._filled = self._offset = 0
        self._closed = self._in_flight = False
        Path(file_path).write_bytes(b"")

    def write(self, buffer: Any) -> int:
        """Write bytes; how many."""
        view = memoryview(buffer)
        if not view.nbytes:
            return self._count(0)
        return self._write(torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8))

    def save_torch_storage_object_list(self, storage_obj_list: Sequence[Any], save_size: bool) -> int:
        """Write this writer's part of the bytes of storages, each with its number of elements before it where `save_size`; how many.

        Args:
            storage_obj_list: (storage, dtype) each, as `torch.save` has them.
        """
        pieces = list(_storage_bytes(storage_obj_list, save_size))
        total, (rank, writers) = sum(piece.numel() for piece in pieces), self._part
        share, rest = divmod(total, writers)
        start = share * rank + min(rank, rest)
        stop, at, written = start + share + (rank < rest), 0, 0
        for piece in pieces:
            first, last = max(start - at, 0), min(stop - at, piece.numel())
            written += self._write(piece[first:last]) if first < last else 0
            at += piece.numel()
        self._stats["save_storage"] += len(storage_obj_list)
        self._stats["save_storage_bytes"] += written
        return written

    def close(self) -> None:
        """Write what is left, and wait for all of it."""
        super().close()
        if not self._closed:
            self._closed = True
            self._drain()
            self._wait()

    def _write(self, data: Tensor) -> int:
        if self._closed:
            raise refused("write-after-close", self._file_path)
        began, done = time.perf_counter(), 0
        while done < data.numel():
            half = self._halves[0]
            size = min(half.numel() - self._filled, data.numel() - done)
            filling = time.perf_counter()
            half[self._filled : self._filled + size].copy_(data[done : done + size])
            self._stats["fill_buffer_secs"] += time.perf_counter() - filling
            self._stats["fill_buffer_count"] += 1
            self._filled, done = self._filled + size, done + size
            if self._filled == half.numel():
                self._drain()
        return self._count(data.numel(), began)

    def _drain(self) -> None:
        """Begin to write the half that is being filled, when the write of the other one has ended."""
        self._wait()
        if not self._filled:
            return
        half, self._halves = self._halves[0], self._halves[::-1]
        self._handle.async_pwrite(half[: self._filled], self._file_path, self._offset)
        self._offset, self._filled, self._in_flight = self._offset + self._filled, 0, True
        if len(self._halves) == 1:
            self._wait()

    def _wait(self) -> None:
        if self._in_flight:
            began, self._in_flight = time.perf_counter(), False
            self._handle.wait()
            self._stats["aio_write_secs"] += time.perf_counter() - began
            self._stats["aio_bytes"] = self._offset


def _storage_bytes(storages: Sequence[Any], save_size: bool) -> Iterator[Tensor]:
    """Yield the bytes of storages, on the host, each after its number of elements."""
    for storage, dtype in storages:
        data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
            getattr(storage, "_untyped_storage", storage)
        )
        if save_size:
            yield torch.tensor([data.numel() // dtype.itemsize], device="cpu").view(torch.uint8)
        yield data.cpu()
