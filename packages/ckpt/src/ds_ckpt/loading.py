"""Fill tensors from a checkpoint that any layout wrote.

`load`, on every rank of the group: 1. read the manifest; 2. check names, shapes, dtypes; 3. read the byte ranges this rank
holds; 4. prove the blocks that were read in parts. Between steps the ranks agree: an error on one is raised on all. An
error leaves the tensors partly filled: load again before using them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

import ds_monitor
from ds_ckpt.agree import TRANSFER_S, Ranks
from ds_ckpt.catalog import read_manifest
from ds_ckpt.format import Manifest
from ds_ckpt.jsontext import Json, from_json
from ds_ckpt.plan import BlockRead, LoadOptions, all_blocks, check_load, plan_load
from ds_ckpt.reader import Files, Partial, check_block, missing_bytes, read_blocks, unproven
from ds_ckpt.storage import At, locate
from ds_ckpt.tensors import Local, byte_view, check_local, staging
from ds_config.errors import CheckpointError

__all__ = ["load"]

_SHARED: Final = 1.25  # times each byte is read, by all ranks, from which on the page cache is worth its cost


def load(
    path: str | os.PathLike[str] | At,
    shards: Iterable[Local],
    *,
    group: Any = None,
    options: LoadOptions | None = None,
) -> dict[str, Json]:
    """Fill `shards` in place from a checkpoint, whatever layout wrote it, and return its meta. Collective over `group`.

    Every block that any rank touches is proven by its checksum; each rank reads only the bytes it holds.

    Raises:
        CheckpointError: on every rank when it is raised on one: "ckpt-not-found", "ckpt-mismatch" (missing, unexpected,
            other shape or dtype; all of them listed), "ckpt-block-damaged" (names file, bytes and tensor), and those of
            `format.decode`. The tensors are then partly filled.
    """
    ranks = Ranks.of(group)
    chosen = options or LoadOptions()
    with ds_monitor.span("ckpt.load", checkpoint=str(path)):
        found: list[tuple[At, Manifest]] = []
        local: list[Local] = []

        def look() -> Json:
            local.extend(check_local(shards))
            at = locate(path)
            found.append((at, read_manifest(at)))
            return [found[0][1].crc32, sorted({item.shard.name for item in local})]

        answers = ranks.agree(look)
        at, manifest = found[0]
        if len({answer[0] for answer in answers}) > 1:
            raise CheckpointError(
                f"ranks see different checkpoints at {at.storage.where(at.tag)}",
                code="ckpt-not-shared",
                fix="Load from a directory that all ranks share, and do not overwrite it meanwhile.",
            )
        asked = {name for answer in answers for name in answer[1]}
        _load(ranks, at, local, (manifest, asked, chosen))
    return dict(from_json(manifest.meta))


def _load(ranks: Ranks, at: At, local: Sequence[Local], what: tuple[Manifest, set[str], LoadOptions]) -> None:
    manifest, asked, options = what
    own = [item.shard for item in local]
    known = {**{name: name for name in manifest.tensors}, **manifest.aliases}
    reads: list[BlockRead] = []

    def plan() -> Json:
        check_load(own, asked, manifest, options)
        reads.extend(
            plan_load([shard for shard in own if shard.name in known], manifest)
        )  # the others have no elements
        return sum(run.nbytes for read in reads for run in read.runs)

    wanted = sum(ranks.agree(plan))
    local = [item for item in local if item.shard.name in known]
    stored = {known[name] for name in asked if name in known}
    alone = wanted <= _SHARED * sum(manifest.tensors[name].nbytes for name in stored)
    with Files(at.storage, at.tag, manifest, direct=alone) as files:

        def read() -> Json:
            targets = [staging(item, manifest.tensors[known[item.shard.name]].dtype) for item in local]
            buffers = [byte_view(target) for target, _ in targets]
            if any(missing_bytes(reads, [b.nbytes for b in buffers])):
                raise CheckpointError(
                    "the plan does not fill every shard", code="ckpt-failed", fix="Report this with the manifest."
                )
            partials = read_blocks(files, reads, buffers)
            for item, (target, staged) in zip(local, targets, strict=True):
                if staged:
                    item.data.detach().copy_(target.reshape(item.data.shape))
            return [[p.file, p.at, p.ranges, p.crc] for p in partials]

        partials = [
            Partial(file, byte, tuple((low, high) for low, high in ranges), crc)
            for answer in ranks.agree(read, patience_s=TRANSFER_S)
            for file, byte, ranges, crc in answer
        ]
        ranks.agree(lambda: _prove(ranks, files, manifest, partials))


def _prove(ranks: Ranks, files: Files, manifest: Manifest, partials: Sequence[Partial]) -> None:
    if not partials:
        return
    touched = {(p.file, p.at) for p in partials}
    blocks = {(b.file, b.at): b for b in all_blocks(manifest) if (b.file, b.at) in touched}
    expected = {key: (b.nbytes, int(b.crc32, 16)) for key, b in blocks.items()}
    for index, key in enumerate(unproven(partials, expected)):
        if index % ranks.size == ranks.rank:
            check_block(files, blocks[key])
