"""One rank's data file: safetensors header, then the entries end to end, with a CRC-32 per block. No torch.

The layout is known before the first byte is written, so blocks go out from several threads in any order; checksums are
computed by the thread that writes the block, while others wait for the disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from ds_ckpt.crc import crc32
from ds_ckpt.dtypes import CODE
from ds_ckpt.format import BLOCK_BYTES, FileRecord
from ds_ckpt.plan import Item
from ds_ckpt.storage import Draft, WriteFile

__all__ = ["Written", "header", "write_file"]

_ALIGN: Final = 4096  # entries start on a page: a reader may map them, a writer may bypass the page cache
_BATCH_BUFFERS: Final = 256
_THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank reports of its file: its record, and the block checksums of each entry in file order."""

    file: FileRecord
    crc32: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class _Block:
    entry: int
    number: int
    at: int
    data: memoryview


def header(items: Sequence[Item]) -> bytes:
    """The safetensors header of these entries: eight length bytes, JSON, and spaces up to a page."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "writer": "ds-ckpt"}}
    at = 0
    for item in items:
        entries[item.key] = {
            "dtype": CODE[item.dtype],
            "shape": list(item.shape),
            "data_offsets": [at, at + item.nbytes],
        }
        at += item.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // _ALIGN) * _ALIGN - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def write_file(
    draft: Draft, rank: int, items: Sequence[Item], source: Callable[[Item], memoryview], block_bytes: int = BLOCK_BYTES
) -> Written:
    """Write `rank`'s file and return when it is durable.

    Args:
        source: The bytes of an entry; called once per entry, in order. A view when the tensor is in host memory.
        block_bytes: The manifest's; also the unit of parallel writing.

    Raises:
        OSError: what the storage said (no space, input/output error).
    """
    head = header(items)
    name = draft.file_name(rank)
    nbytes = len(head) + sum(item.nbytes for item in items)
    sums = [[""] * (-(-item.nbytes // block_bytes)) for item in items]
    file = draft.write_file(name, nbytes)
    try:
        file.write(0, [memoryview(head)])
        batches = _batches(_blocks(items, source, len(head), block_bytes), block_bytes)
        if file.parallel:
            _write_parallel(file, batches, sums)
        else:
            for batch in batches:
                _write(file, batch, sums)
        file.close()
    except BaseException:
        file.abandon()
        raise
    record = FileRecord(name, nbytes, len(head), f"{crc32(head):08x}")
    return Written(record, tuple(tuple(s) for s in sums))


def _blocks(items: Sequence[Item], source: Callable[[Item], memoryview], at: int, block_bytes: int) -> Iterator[_Block]:
    for entry, item in enumerate(items):
        data = source(item)
        for number, low in enumerate(range(0, item.nbytes, block_bytes)):
            block = data[low : low + block_bytes]
            yield _Block(entry, number, at + low, block)
        at += item.nbytes


def _batches(blocks: Iterator[_Block], block_bytes: int) -> Iterator[list[_Block]]:
    # Small entries travel together: one system call for up to 256 of them.
    batch: list[_Block] = []
    nbytes = 0
    for block in blocks:
        if batch and (nbytes + block.data.nbytes > block_bytes or len(batch) == _BATCH_BUFFERS):
            yield batch
            batch, nbytes = [], 0
        batch.append(block)
        nbytes += block.data.nbytes
    if batch:
        yield batch


def _write(file: WriteFile, batch: list[_Block], sums: list[list[str]]) -> None:
    for block in batch:
        sums[block.entry][block.number] = f"{crc32(block.data):08x}"
    file.write(batch[0].at, [block.data for block in batch])


def _write_parallel(file: WriteFile, batches: Iterator[list[_Block]], sums: list[list[str]]) -> None:
    # At most twice as many batches as threads are alive, so device tensors are fetched only as they are needed.
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ds-ckpt-write") as pool:
        waiting = []
        try:
            for batch in batches:
                waiting.append(pool.submit(_write, file, batch, sums))
                if len(waiting) >= 2 * _THREADS:
                    waiting.pop(0).result()
            for future in waiting:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
