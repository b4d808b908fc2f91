"""Write a checkpoint: decide together, write apart, publish once.

`save`, on every rank of the group:
 1. describe this rank's shards to the others (JSON)           all ranks
 2. plan: who writes what                                       all ranks, the same pure function
 3. create the draft                                            rank 0
 4. write and sync this rank's file                             ranks that were given elements
 5. write the manifest, publish                                 rank 0
Steps 1 and 2 are `prepare`, the others `publish`, which may run on another thread with a group of its own. Between steps
the ranks agree: an error anywhere ends the save everywhere and the draft is removed.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import ds_monitor
from ds_ckpt.agree import TRANSFER_S, Ranks
from ds_ckpt.catalog import next_sequence
from ds_ckpt.crc import copy_crc32, crc32
from ds_ckpt.format import BLOCK_BYTES, FileRecord, Manifest, PartRecord, PieceRecord, TensorRecord, encode, valid_name
from ds_ckpt.jsontext import Json, dump, to_json
from ds_ckpt.local import new_token
from ds_ckpt.plan import Item, SavePlan, plan_save
from ds_ckpt.protocols import Draft
from ds_ckpt.storage import At, locate
from ds_ckpt.tensors import Local, byte_view, check_local, copier
from ds_ckpt.writer import Copy, Pool, Stream, Written
from ds_comm.placement import Box, Interval, TensorShard
from ds_config.errors import CheckpointError

__all__ = ["Gathered", "Job", "PlanCache", "Saved", "prepare", "publish", "save", "save_from", "undo"]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save wrote: where, the bytes of its tensors, and its place in the order of checkpoints."""

    path: str
    nbytes: int
    sequence: int


@dataclass(slots=True)
class PlanCache:
    """The last plan and the shards of this rank it was made for: layouts rarely change between saves."""

    shards: list[TensorShard] | None = None
    plan: SavePlan = field(default_factory=lambda: SavePlan({}, ()))


@dataclass(frozen=True, slots=True)
class Job:
    """A save that is decided and not yet written: all that the writing needs to know, on one rank."""

    at: At
    draft: Draft
    plan: SavePlan
    rank: int
    meta: Json
    aliases: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes this rank writes."""
        return sum(item.nbytes for item in self.items)

    @property
    def items(self) -> tuple[Item, ...]:
        """This rank's entries."""
        return self.plan.items[self.rank]

    def stream(self, pool: Pool) -> Stream:
        """This rank's file, to be filled and drained."""
        return Stream(self.items, pool, BLOCK_BYTES)

    def write(self, stream: Stream, copy: Copy | None = None) -> Json:
        """Write and sync this rank's file; a JSON account of it, None when there is nothing to write.

        `copy` fills the stream here; without it somebody else does.
        """
        if not self.items:
            return None
        with ds_monitor.span("ckpt.write", checkpoint=self.at.tag, nbytes=self.nbytes):
            if copy is None:
                return _written_json(stream.drain(self.draft, self.rank))
            return _written_json(stream.through(copy, self.draft, self.rank))

    def commit(self, written: Sequence[Json]) -> int:
        """Publish, from every rank's account; the sequence number. Rank 0 only."""
        with ds_monitor.span("ckpt.commit", checkpoint=self.at.tag):
            sequence = next_sequence(self.at.storage)
            self.draft.commit(encode(_manifest(self, written, sequence)))
        return sequence


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
    Cost: every element is written once, by one rank, in parallel over ranks and threads, through 32 MiB of host memory.
    """
    ranks = Ranks.of(group)
    with ds_monitor.span("ckpt.save", checkpoint=str(path)):
        gathered = Gathered(shards)
        job = prepare(ranks, path, gathered, (meta, aliases or {}), PlanCache())
        stream = job.stream(Pool())
        return publish(ranks, job, lambda: job.write(stream, copier(gathered.local)))


def save_from(
    path: str | os.PathLike[str] | At,
    readers: Mapping[TensorShard, Callable[[], Tensor]],
    meta: Mapping[str, Json],
    aliases: Mapping[str, str],
) -> Saved:
    """`save` from one process, of tensors that are read when their turn comes and dropped after it.

    Cost: the largest tensor, and 32 MiB, of host memory.
    """
    ranks = Ranks.alone()
    job = prepare(ranks, path, lambda: list(readers), (meta, aliases), PlanCache())
    stream, read = job.stream(Pool()), list(readers.values())
    present: list[tuple[int, memoryview]] = []

    def copy(target: memoryview, item: Item, start: int) -> int:
        index = item.piece.shard
        if not present or present[0][0] != index:
            present.clear()  # before the next one is read: one at a time
            present.append((index, byte_view(read[index]())))
        if present[0][1].nbytes != item.nbytes:
            raise CheckpointError(
                f"{item.key!r} has {present[0][1].nbytes} bytes, its description {item.nbytes}",
                code="ckpt-shard",
                fix="The source changed or is damaged.",
            )
        return copy_crc32(target, present[0][1][start : start + target.nbytes])

    return publish(ranks, job, lambda: job.write(stream, copy))


def prepare(
    ranks: Ranks,
    path: str | os.PathLike[str] | At,
    shards: Callable[[], list[TensorShard]],
    record: tuple[Mapping[str, Json], Mapping[str, str]],
    cache: PlanCache,
) -> Job:
    """Steps 1 and 2 of a save. `record` is (meta, aliases). Collective; one exchange while the layout stays the same.

    `shards` gives this rank's; an error it raises is an error on every rank.
    """
    own: list[TensorShard] = []

    def describe() -> Json:
        own.extend(shards())
        at = locate(path)
        meta = to_json(record[0])
        return {
            "where": at.storage.where(at.tag),
            "meta": {key: crc32(dump(value).encode()) for key, value in meta.items()},
            "aliases": dict(record[1]),
            "shards": None if cache.shards == own else [_shard_json(shard) for shard in own],
            "token": new_token(),
        }

    answers = ranks.agree(describe)
    _check_same(answers)
    described = [answer["shards"] for answer in answers]
    if any(found is not None for found in described):
        if None in described:
            described = ranks.agree(lambda: [_shard_json(shard) for shard in own])
        held = [
            [_shard_from_json(s) for s in found] if rank != ranks.rank else own for rank, found in enumerate(described)
        ]
        cache.plan = plan_save(held)
        cache.shards = own
    aliases = _merged_aliases([answer["aliases"] for answer in answers], cache.plan)
    at = locate(path)
    draft = at.storage.draft(at.tag, answers[0]["token"])
    return Job(at, draft, cache.plan, ranks.rank, to_json(record[0]), aliases)


class Gathered:
    """The checked shards of this rank, as `prepare` asks for them."""

    def __init__(self, shards: Iterable[Local]) -> None:
        self._shards, self.local = shards, list[Local]()

    def __call__(self) -> list[TensorShard]:
        self.local = check_local(self._shards)
        return [item.shard for item in self.local]


def publish(ranks: Ranks, job: Job, write: Callable[[], Json]) -> Saved:
    """Steps 3 to 5 of a save; `write` is step 4. Collective."""
    try:
        ranks.agree(lambda: job.draft.create() if ranks.rank == 0 else None)
        written = ranks.agree(write, patience_s=TRANSFER_S)
        sequence = ranks.agree(lambda: job.commit(written) if ranks.rank == 0 else None)[0]
    except BaseException as error:
        if ranks.rank == 0:
            undo(job.draft, error)
        raise
    return Saved(job.at.storage.where(job.at.tag), sum(job.plan.nbytes), sequence)


def undo(draft: Draft, error: BaseException) -> None:
    """Remove a draft after `error`; what cannot be removed is noted on the error, and left to the next save."""
    try:
        draft.abort()
    except (OSError, CheckpointError) as left:
        error.add_note(
            f"The unfinished checkpoint could not be removed ({left}); the next save into this directory will."
        )
        ds_monitor.event("ckpt.leftover", why=str(left))


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


def _manifest(job: Job, written: Sequence[Json], sequence: int) -> Manifest:
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
    return Manifest(sequence, created, "ds-ckpt", BLOCK_BYTES, tuple(files), tensors, job.aliases, job.meta)
