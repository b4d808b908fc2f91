"""Fill tensors from a checkpoint that any layout wrote.

`load`, on every rank of the group: 1. read the index; 2. check names, shapes, dtypes; 3. read the leaves that this rank needs, and look whether
the files are there, of their sizes; 4. read the byte ranges; 5. check the blocks that were read in parts, each by one rank. Between steps the
ranks agree: an error on one is raised on all. An error of the last two leaves the tensors partly filled: load again before using them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import torch

import ds_monitor
from ds_ckpt.checkpoint_index import CheckpointIndex
from ds_ckpt.checkpoint_list import read_top, resolve
from ds_ckpt.coordinator import TRANSFER_S, Coordinator
from ds_ckpt.crc import crc32
from ds_ckpt.file_reads import Files
from ds_ckpt.jsontext import Json, from_json
from ds_ckpt.load_validation import LoadOptions, check_load
from ds_ckpt.local_storage import CheckpointRef, locate
from ds_ckpt.manifest_merge import join
from ds_ckpt.reader import PartialRead, check_block, missing_bytes, read_blocks, unproven
from ds_ckpt.records import FileRecord, Manifest
from ds_ckpt.save_plan import BlockRead, all_blocks, of_shards, plan_load
from ds_ckpt.shard_tensors import Local, byte_view, check_local, staged_groups, staging
from ds_config.errors import CheckpointError

__all__ = ["load"]

_SHARED: Final = 1.25  # times each byte is read, by all ranks, from which on the page cache is worth its cost
_T = TypeVar("_T")
_STAGING_BYTES: Final = 2**28  # host memory for tensors that cannot be read into where they are


def load(
    path: str | os.PathLike[str] | CheckpointRef,
    shards: Iterable[Local],
    *,
    group: Any = None,
    options: LoadOptions | None = None,
) -> dict[str, Json]:
    """Fill `shards` in place from a checkpoint, whatever layout wrote it, and return its meta. Collective over `group`.

    Every block that any rank touches is proven by its checksum; each rank reads only the bytes it holds.

    Raises:
        CheckpointError: on every rank when it is raised on one: "ckpt-not-found", "ckpt-mismatch" (missing, unexpected,
            other shape or dtype; all of them listed), "ckpt-block-damaged" (names file, bytes and tensor), "ckpt-replaced" (by
            another save of that name, meanwhile), and those of `format.decode`. The tensors are then partly filled, if
            `options.begins` was called.
    """
    ranks = Coordinator.of(group)
    chosen = options or LoadOptions()
    with ds_monitor.span("ckpt.load", checkpoint=str(path)):
        at = locate(path)
        over = at.storage.hold(at.tag, TRANSFER_S) if ranks.rank == 0 else None
        try:
            return _load(ranks, at, shards, chosen)
        finally:
            if over is not None:
                over()


def _load(ranks: Coordinator, at: CheckpointRef, shards: Iterable[Local], options: LoadOptions) -> dict[str, Json]:
    local: list[Local] = []
    tops: list[Manifest | CheckpointIndex] = []

    def look() -> None:
        local.extend(check_local(shards))
        tops.append(read_top(at))

    ranks.settle(look)
    top = tops[0]
    if ranks.spread(top.crc32, lambda mine, theirs: mine if mine == theirs else None) is None:
        raise CheckpointError(
            f"ranks see different checkpoints at {at.storage.where(at.tag)}",
            code="ckpt-not-shared",
            fix="Load from a directory that all ranks share, and do not overwrite it meanwhile.",
        )
    known = {**{name: name for name in top.tensors}, **top.aliases}
    order = sorted(known)
    requested = _asked(ranks, order, {item.shard.name for item in local})
    manifests: list[Manifest] = []
    reads: list[BlockRead] = []
    local_shards = [item.shard for item in local]

    def plan() -> None:
        # Names first: leaves are read for what is there.
        present = [shard for shard in local_shards if shard.name in known]  # the others have no elements
        bare = top if isinstance(top, Manifest) else join(top, [], whole=False)
        check_load(local_shards, requested, bare, options)
        manifests.append(_unless_replaced(at, top.crc32, lambda: resolve(at, top, present)))
        reads.extend(plan_load(present, manifests[0]))

    ranks.settle(plan)
    manifest, local = manifests[0], [item for item in local if item.shard.name in known]
    wanted = sum(run.nbytes for read in reads for run in read.runs)
    most = ranks.spread(wanted, max) * ranks.size
    stored = sum(manifest.tensors[name].nbytes for name in {known[name] for name in requested})
    with Files(at.storage, at.tag, manifest.files, direct=most <= _SHARED * stored) as files:
        partials: list[PartialRead] = []

        def check() -> None:
            for index in sorted({each.file for each in reads}):
                files.check(index)

        ranks.settle(lambda: _unless_replaced(at, top.crc32, check))
        if options.begins is not None:
            options.begins()

        def read() -> None:
            partials.extend(_unless_replaced(at, top.crc32, lambda: _read(files, manifest, local, reads)))

        ranks.settle(read, patience_s=TRANSFER_S)
        _prove(ranks, at, manifest, partials)
    return dict(from_json(top.meta))


def _unless_replaced(at: CheckpointRef, crc: str, read: Callable[[], _T]) -> _T:
    """Read a part of the checkpoint whose index has the checksum `crc`; an error that comes of another save of the same name says so."""
    try:
        return read()
    except CheckpointError as error:
        if not _is_replaced(at, crc):
            raise
        raise CheckpointError(
            f"{at.storage.where(at.tag)} was replaced or removed while it was read",
            code="ckpt-replaced",
            fix="Load again; to save while others load, give each save a name of its own.",
        ) from error


def _is_replaced(at: CheckpointRef, crc: str) -> bool:
    try:
        return read_top(at).crc32 != crc
    except CheckpointError as error:
        return error.code not in ("ckpt-store", "ckpt-io")  # a store that does not answer says nothing of it


def _asked(ranks: Coordinator, order: Sequence[str], local_names: set[str]) -> set[str]:
    """Names of the checkpoint that any rank asks for: one bit a name travels."""
    mask = sum(1 << i for i, name in enumerate(order) if name in local_names)
    merged = int(ranks.spread(f"{mask:x}", lambda a, b: f"{int(a, 16) | int(b, 16):x}"), 16)
    bits = f"{merged:b}"[::-1]
    return {name for name, bit in zip(order, bits, strict=False) if bit == "1"}


def _read(files: Files, manifest: Manifest, local: Sequence[Local], reads: Sequence[BlockRead]) -> list[PartialRead]:
    """Fill the shards, as many at a time as `_STAGING_BYTES` are enough for; what is not proven yet."""
    out: list[PartialRead] = []
    dtypes = [manifest.tensors[manifest.aliases.get(i.shard.name, i.shard.name)].dtype for i in local]
    for chosen in staged_groups(local, dtypes, _STAGING_BYTES):
        targets = [
            staging(local[i], dtypes[i]) if i in chosen else (torch.empty(0, device="cpu"), False)
            for i in range(len(local))
        ]
        buffers = [byte_view(target) for target, _ in targets]
        now = reads if len(chosen) == len(local) else of_shards(reads, chosen)
        if any(missing_bytes(now, [b.nbytes for b in buffers])):
            lacking = [local[i].shard.name for i, n in enumerate(missing_bytes(now, [b.nbytes for b in buffers])) if n]
            raise CheckpointError(
                f"the manifest has no place for all elements of {', '.join(lacking[:10])}",
                code="ckpt-manifest-invalid",
                fix="The checkpoint is damaged; `ds ckpt verify` says more. Use another one.",
            )
        out += read_blocks(files, now, buffers)
        for i in sorted(chosen):
            target, staged = targets[i]
            if staged:
                local[i].data.detach().copy_(target.reshape(local[i].data.shape))
    return out


def _prove(ranks: Coordinator, at: CheckpointRef, manifest: Manifest, partials: Sequence[PartialRead]) -> None:
    """Check each block that ranks read in parts: a single rank receives the checksums of all parts. Collective."""
    touched = {(p.file, p.at) for p in partials}
    blocks = {(b.file, b.at): b for b in all_blocks(manifest) if (b.file, b.at) in touched}
    messages: dict[int, list[Json]] = {}
    for p in partials:
        record, block = manifest.files[p.file], blocks[(p.file, p.at)]
        file = [record.name, record.nbytes, record.header_nbytes, record.header_crc32, record.shared]
        row = [file, p.at, block.name, block.nbytes, block.crc32, p.ranges, p.crc]
        messages.setdefault(crc32(f"{record.name}@{p.at}".encode()) % ranks.size, []).append(row)
    came = ranks.route({rank: json.dumps(rows).encode() for rank, rows in messages.items()})

    def prove() -> None:
        rows = [row for data in came.values() for row in json.loads(data)]
        names = sorted({row[0][0] for row in rows})
        numbers = {name: i for i, name in enumerate(names)}
        records = {row[0][0]: FileRecord(*row[0]) for row in rows}
        expected = {}
        parts = []
        for file, byte, name, nbytes, crc, ranges, got in rows:
            key = (numbers[file[0]], byte)
            expected[key] = BlockRead(name, *key, nbytes, crc, ())
            parts.append(PartialRead(*key, tuple((low, high) for low, high in ranges), got))
        left = unproven(parts, {key: (b.nbytes, int(b.crc32, 16)) for key, b in expected.items()})
        with Files(at.storage, at.tag, [records[name] for name in names], direct=False) as files:
            for key in left:
                check_block(files, expected[key])

    ranks.settle(prove, patience_s=TRANSFER_S)
