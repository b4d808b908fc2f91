"""save, load, verify, diff: the calls, in the order they happen.

`save`, on every rank of the group:
 1. describe this rank's shards to the others (JSON)           all ranks
 2. plan: who writes what                                       all ranks, the same pure function
 3. create the draft, choose its token and sequence number      rank 0
 4. write and sync this rank's file                             ranks that were given elements
 5. write the manifest, publish                                 rank 0
Between steps the ranks agree: an error anywhere ends the save everywhere and the draft is removed.

`load`: 1. read the manifest; 2. check names, shapes, dtypes; 3. read byte ranges; 4. prove the blocks that were read in
parts. An error leaves the tensors partly filled: load again before using them.
"""

from __future__ import annotations

import datetime
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ds_monitor
from ds_ckpt.agree import Ranks
from ds_ckpt.catalog import next_sequence, read_manifest
from ds_ckpt.crc import crc32
from ds_ckpt.format import BLOCK_BYTES, FileRecord, Manifest, PartRecord, PieceRecord, TensorRecord, encode, valid_name
from ds_ckpt.jsontext import Json, dump, from_json, to_json
from ds_ckpt.plan import Item, LoadOptions, SavePlan, all_blocks, check_load, plan_load, plan_save
from ds_ckpt.reader import Files, Partial, check_block, missing_bytes, read_blocks, unproven
from ds_ckpt.storage import At, Draft, locate
from ds_ckpt.tensors import Local, byte_view, check_local, entry_bytes, staging
from ds_ckpt.writer import Written, write_file
from ds_comm.placement import Box, Interval, TensorShard
from ds_config.errors import CheckpointError

__all__ = ["Job", "Saved", "load", "prepare", "save"]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save wrote: where, the bytes of its tensors, and its place in the order of checkpoints."""

    path: str
    nbytes: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Job:
    """A save that is decided and not yet written: all that the writing needs to know, on one rank."""

    at: At
    draft: Draft
    plan: SavePlan
    rank: int
    sequence: int
    meta: Json
    aliases: Mapping[str, str]

    @property
    def items(self) -> tuple[Item, ...]:
        """This rank's entries."""
        return self.plan.items[self.rank]

    def write(self, source: Callable[[Item], memoryview]) -> Json:
        """Write and sync this rank's file; a JSON account of it, None when the rank has nothing to write."""
        if not self.items:
            return None
        with ds_monitor.span("ckpt.write", checkpoint=self.at.tag, nbytes=self.plan.nbytes[self.rank]):
            return _written_json(write_file(self.draft, self.rank, self.items, source, BLOCK_BYTES))

    def commit(self, written: Sequence[Json]) -> None:
        """Publish, from every rank's account. Rank 0 only."""
        with ds_monitor.span("ckpt.commit", checkpoint=self.at.tag):
            self.draft.commit(encode(_manifest(self, written)))

    def saved(self) -> Saved:
        return Saved(self.at.storage.where(self.at.tag), sum(self.plan.nbytes), self.sequence)


def save(
    path: str | os.PathLike[str] | At,
    shards: Iterable[Local],
    meta: Mapping[str, Json],
    *,
    group: Any = None,
    aliases: Mapping[str, str] | None = None,
) -> Saved:
    """Write a checkpoint and return when it is durable and visible. Collective over `group`.

    Args:
        path: The checkpoint's own directory, `<root>/<tag>`; the same on every rank. One that exists is replaced.
        shards: This rank's. What several ranks hold is written once; together they must hold every element.
        meta: JSON (tuples come back as lists), the same on every rank.
        group: Ranks that hold the shards; None means all.
        aliases: Other names of stored tensors (tied weights), name -> stored name.

    Raises:
        CheckpointError: on every rank when it is raised on one. Earlier checkpoints are untouched.
    Cost: every element is written once, by one rank, in parallel over ranks and threads; no tensor is copied on the host.
    """
    ranks = Ranks.of(group)
    local = _agreed_list(ranks, shards)
    with ds_monitor.span("ckpt.save", checkpoint=str(path)):
        job = prepare(ranks, path, local, (meta, aliases or {}))
        try:
            written = ranks.agree(lambda: job.write(lambda item: entry_bytes(local, item)))
            ranks.agree(lambda: job.commit(written) if ranks.rank == 0 else None)
        except BaseException as error:
            if ranks.rank == 0:
                undo(job.draft, error)
            raise
    return job.saved()


def prepare(
    ranks: Ranks,
    path: str | os.PathLike[str] | At,
    local: Sequence[Local],
    record: tuple[Mapping[str, Json], Mapping[str, str]],
) -> Job:
    """Steps 1 to 3 of a save. `record` is (meta, aliases). Collective."""

    def describe() -> Json:
        at = locate(path)
        meta, aliases = to_json(record[0]), dict(record[1])
        return {
            "where": at.storage.where(at.tag),
            "meta": {key: crc32(dump(value).encode()) for key, value in meta.items()},
            "aliases": aliases,
            "shards": [_shard_json(item.shard) for item in local],
        }

    answers = ranks.agree(describe)
    _check_same(answers)
    at = locate(path)
    plan = plan_save([[_shard_from_json(s) for s in answer["shards"]] for answer in answers])
    aliases = _merged_aliases([answer["aliases"] for answer in answers], plan)

    def start() -> Json:
        if ranks.rank:
            return None
        token = secrets.token_hex(8)
        drafts.append(at.storage.draft(at.tag, token))
        drafts[0].create()
        return [token, next_sequence(at.storage)]

    drafts: list[Draft] = []
    try:
        token, sequence = ranks.agree(start)[0]
    except BaseException as error:
        for draft in drafts:
            undo(draft, error)
        raise
    draft = drafts[0] if drafts else at.storage.draft(at.tag, token)
    return Job(at, draft, plan, ranks.rank, sequence, to_json(record[0]), aliases)


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
    local = _agreed_list(ranks, shards)
    with ds_monitor.span("ckpt.load", checkpoint=str(path)):
        found: list[tuple[At, Manifest]] = []

        def look() -> Json:
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
    ranks.agree(lambda: check_load(own, asked, manifest, options))
    reads = plan_load(own, manifest)
    with Files(at.storage, at.tag, manifest) as files:

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
            for answer in ranks.agree(read)
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


def undo(draft: Draft, error: BaseException) -> None:
    """Remove a draft after `error`; what cannot be removed is noted on the error, and left to the next save."""
    try:
        draft.abort()
    except (OSError, CheckpointError) as left:
        error.add_note(
            f"The unfinished checkpoint could not be removed ({left}); the next save into this directory will."
        )
        ds_monitor.event("ckpt.leftover", why=str(left))


def _agreed_list(ranks: Ranks, shards: Iterable[Local]) -> list[Local]:
    out: list[Local] = []

    def collect() -> Json:
        out.extend(check_local(shards))

    ranks.agree(collect)
    return out


def _check_same(answers: Sequence[Json]) -> None:
    first = answers[0]
    for rank, answer in enumerate(answers[1:], 1):
        if answer["where"] != first["where"]:
            raise CheckpointError(
                f"ranks save to different places: rank 0 to {first['where']}, rank {rank} to {answer['where']}",
                code="ckpt-tag-differs",
                fix="Give the same path and tag on every rank.",
            )
        keys = sorted(set(first["meta"]) | set(answer["meta"]))
        differ = [k for k in keys if first["meta"].get(k) != answer["meta"].get(k)]
        if differ:
            raise CheckpointError(
                f"meta differs between rank 0 and rank {rank} in {', '.join(differ[:10])}",
                code="ckpt-meta-differs",
                fix="Meta is recorded once; store what differs by rank as tensors, or under one key gathered from all.",
            )


def _merged_aliases(found: Sequence[Mapping[str, str]], plan: SavePlan) -> dict[str, str]:
    merged: dict[str, str] = {}
    for aliases in found:
        for name, target in aliases.items():
            if (
                merged.setdefault(name, target) != target
                or name in plan.tensors
                or target not in plan.tensors
                or not valid_name(name)
            ):
                raise CheckpointError(
                    f"the alias {name!r} -> {target!r} does not give a new name to a stored tensor",
                    code="ckpt-alias",
                    fix="Pass a tied tensor once as a shard, and its other names in `aliases`.",
                )
    return dict(sorted(merged.items()))


def _shard_json(s: TensorShard) -> Json:
    return [s.name, s.dtype, s.shape, s.box.offset, s.box.shape, s.interval.start, s.interval.stop]


def _shard_from_json(value: Json) -> TensorShard:
    name, dtype, shape, offset, size, start, stop = value
    return TensorShard(name, tuple(shape), dtype, Box(tuple(offset), tuple(size)), Interval(start, stop))


def _written_json(w: Written) -> Json:
    return [[w.file.name, w.file.nbytes, w.file.header_nbytes, w.file.header_crc32], w.crc32]


def _manifest(job: Job, written: Sequence[Json]) -> Manifest:
    files: list[FileRecord] = []
    placed: dict[tuple[int, int, int], PieceRecord] = {}  # (rank, shard, start element) names a piece of the plan
    for rank, account in enumerate(written):
        if account is None:
            continue
        record = FileRecord(*account[0])
        at = record.header_nbytes
        for item, crc in zip(job.plan.items[rank], account[1], strict=True):
            piece = item.piece
            placed[(rank, piece.shard, piece.start)] = PieceRecord(len(files), at, piece.numel, tuple(crc))
            at += item.nbytes
        files.append(record)
    tensors = {
        name: TensorRecord(
            tensor.dtype,
            tensor.shape,
            tuple(
                PartRecord(part.box, tuple(placed[(p.rank, p.shard, p.start)] for p in part.pieces))
                for part in tensor.parts
            ),
        )
        for name, tensor in job.plan.tensors.items()
    }
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Manifest(job.sequence, created, "ds-ckpt", BLOCK_BYTES, tuple(files), tensors, job.aliases, job.meta)
