"""Is a checkpoint undamaged, and do two hold the same? Reads data; no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from ds_ckpt.checkpoint_list import read_manifest
from ds_ckpt.crc import crc32
from ds_ckpt.dtypes import CODE, ITEMSIZE
from ds_ckpt.file_reads import Files
from ds_ckpt.format import entry_key
from ds_ckpt.jsontext import Json, parse
from ds_ckpt.local_storage import CheckpointRef, locate
from ds_ckpt.reader import check_block, read_blocks
from ds_ckpt.records import FileRecord, Manifest, TensorRecord
from ds_ckpt.save_plan import all_blocks, plan_load
from ds_comm.placement import Box, Interval, TensorShard
from ds_config.errors import CheckpointError

__all__ = ["Diff", "VerifyReport", "diff", "verify"]

_THREADS: Final = 4
_MAX_HEADER: Final = 2**30
_COMPARE_BYTES: Final = 16 * 2**20


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """How much a successful `verify` read."""

    num_files: int
    num_blocks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Diff:
    """How two checkpoints differ, by tensor name; `meta` lists the keys whose values differ. Empty means equal.

    `values` are tensors of equal shape and dtype with other elements (compared as bytes, so NaN equals itself).
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    kind: tuple[str, ...]
    values: tuple[str, ...]
    meta: tuple[str, ...]

    def __bool__(self) -> bool:
        return any((self.only_first, self.only_second, self.kind, self.values, self.meta))


def verify(path: str | os.PathLike[str] | CheckpointRef) -> VerifyReport:
    """Read every byte of a checkpoint and check it.

    Raises:
        CheckpointError: "ckpt-damaged", listing everything that is wrong; those of `format.decode` for the manifest.
    """
    at = locate(path)
    manifest = read_manifest(at)
    problems: list[str] = []
    blocks = all_blocks(manifest)
    with (
        Files(at.storage, at.tag, manifest.files) as files,
        ThreadPoolExecutor(_THREADS, thread_name_prefix="ds-ckpt") as pool,
    ):
        broken = set()
        for index, record in enumerate(manifest.files):
            problem = _problem(partial(_check_header, files, (index, record), manifest))
            if problem:
                broken.add(index)
                problems.append(problem)
        readable = [b for b in blocks if b.file not in broken or _opens(files, b.file)]
        problems += [p for p in pool.map(lambda b: _problem(partial(check_block, files, b)), readable) if p]
    if problems:
        raise CheckpointError(
            f"{at.storage.where(at.tag)} is damaged:\n  " + "\n  ".join(problems),
            code="ckpt-damaged",
            fix="Use another checkpoint; blocks that are not listed are sound.",
        )
    return VerifyReport(len(manifest.files), len(blocks), sum(b.nbytes for b in blocks))


def diff(first: str | os.PathLike[str] | CheckpointRef, second: str | os.PathLike[str] | CheckpointRef) -> Diff:
    """Compare two checkpoints as logical tensors, whatever their layouts.

    Cost: equal layouts are compared by their checksums, without reading data; others by reading, 16 MiB at a time.
    """
    a, b = locate(first), locate(second)
    one, two = read_manifest(a), read_manifest(b)
    left = {**one.tensors, **{alias: one.tensors[name] for alias, name in one.aliases.items()}}
    right = {**two.tensors, **{alias: two.tensors[name] for alias, name in two.aliases.items()}}
    both = sorted(left.keys() & right.keys())
    kind = [n for n in both if (left[n].dtype, left[n].shape) != (right[n].dtype, right[n].shape)]
    values = []
    with Files(a.storage, a.tag, one.files) as files_a, Files(b.storage, b.tag, two.files) as files_b:
        for name in both:
            if name in kind or (one.block_bytes == two.block_bytes and _sums(left[name]) == _sums(right[name])):
                continue
            if _stretches_differ(name, (files_a, one), (files_b, two)):
                values.append(name)
    meta = [k for k in sorted(set(one.meta) | set(two.meta)) if one.meta.get(k, _ABSENT) != two.meta.get(k, _ABSENT)]
    return Diff(
        tuple(sorted(left.keys() - right.keys())),
        tuple(sorted(right.keys() - left.keys())),
        tuple(kind),
        tuple(values),
        tuple(meta),
    )


_ABSENT: Final = object()


def _sums(record: TensorRecord) -> Json:
    return [(part.box, [(p.numel, p.crc32) for p in part.pieces]) for part in record.parts]


def _stretches_differ(name: str, first: tuple[Files, Manifest], second: tuple[Files, Manifest]) -> bool:
    record = first[1].tensors[first[1].aliases.get(name, name)]
    return any(_bytes_of(shard, *first) != _bytes_of(shard, *second) for shard in _stretches(name, record))


def _stretches(name: str, record: TensorRecord) -> Iterator[TensorShard]:
    whole = Box.whole(record.shape)
    step = max(1, _COMPARE_BYTES // ITEMSIZE[record.dtype])
    for low in range(0, whole.numel, step):
        yield TensorShard(name, record.shape, record.dtype, whole, Interval(low, min(low + step, whole.numel)))


def _bytes_of(shard: TensorShard, files: Files, manifest: Manifest) -> bytes:
    buffer = bytearray(shard.numel * ITEMSIZE[shard.dtype])
    reads = plan_load([shard], manifest)
    for unread in read_blocks(files, reads, [memoryview(buffer)]):
        check_block(files, next(r for r in reads if (r.file, r.at) == (unread.file, unread.at)))
    return bytes(buffer)


def _problem(check: Callable[[], object]) -> str:
    try:
        check()
    except CheckpointError as error:
        return error.message
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _opens(files: Files, index: int) -> bool:
    return not _problem(lambda: files.check(index))


def _check_header(files: Files, file: tuple[int, FileRecord], manifest: Manifest) -> None:
    """Check that a file's safetensors header has its checksum and describes exactly the manifest's pieces.

    A file of blocks has no such header: its blocks are checked instead.
    """
    index, record = file
    where = files.name(index)
    if not record.header_nbytes:  # a file of blocks
        files.check(index)
        return
    if not 8 <= record.header_nbytes <= min(_MAX_HEADER, record.nbytes):
        raise _bad_header(where, f"a header of {record.header_nbytes} bytes")
    with files.using(index) as source:
        data = bytes(source.view(0, record.header_nbytes))
    if f"{crc32(data):08x}" != record.header_crc32 or int.from_bytes(data[:8], "little") != record.header_nbytes - 8:
        raise _bad_header(where, f"its checksum is not {record.header_crc32}")
    entries = parse(data[8:], where)
    expected = {}
    for name, tensor in manifest.tensors.items():
        for i, part in enumerate(tensor.parts):
            for j, piece in enumerate(part.pieces):
                if piece.file == index and not piece.blocks:
                    start = piece.at - record.header_nbytes
                    key = entry_key(name, tensor, i, j)
                    shape = list(tensor.shape) if key == name else [piece.numel]
                    stop = start + piece.numel * ITEMSIZE[tensor.dtype]
                    expected[key] = {"dtype": CODE[tensor.dtype], "shape": shape, "data_offsets": [start, stop]}
    listed_entries = {key: value for key, value in entries.items() if key != "__metadata__"}
    if listed_entries != expected:
        odd = sorted(key for key in set(listed_entries) | set(expected) if listed_entries.get(key) != expected.get(key))
        raise _bad_header(where, f"it does not describe the manifest's entries: {', '.join(odd[:5])}")


def _bad_header(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the header of {where} is damaged: {what}", code="ckpt-damaged", fix="Use another checkpoint."
    )
