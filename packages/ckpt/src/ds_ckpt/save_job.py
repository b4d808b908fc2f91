"""Write a checkpoint: decide together, write apart, publish once.

`save`, on every rank of the group:
 1. agree on place, meta and whether a layout changed            all ranks: one small message a doubling of the world
 2. plan: who writes what                                        see `save_planner`; only when a layout changed
 3. create the draft                                             rank 0
 4. write and sync this rank's file                              ranks that were given elements
 5. say where everything is: in a leaf, or to rank 0             the same ranks
 6. write the manifest, publish                                  rank 0
Steps 1 and 2 are `prepare`, the others `publish`, which may run on another thread with a group of its own. Between steps
the ranks settle: an error anywhere ends the save everywhere and the draft is removed.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import ds_monitor
from ds_ckpt.block_packing import BlockPacker, SaveOptions
from ds_ckpt.checkpoint_index import (
    CheckpointIndex,
    Kind,
    Leaf,
    encode_index,
    encode_leaf,
    entry_from,
    entry_json,
    entry_of,
    leaf_json,
    leaf_of,
)
from ds_ckpt.checkpoint_list import collect, next_sequence, shared_files
from ds_ckpt.coordinator import TRANSFER_S, Coordinator
from ds_ckpt.crc import copy_crc32, crc32
from ds_ckpt.format import BLOCK_BYTES, encode, valid_name
from ds_ckpt.jsontext import Json, dump, to_json
from ds_ckpt.local import LocalStorage, new_token
from ds_ckpt.local_storage import CheckpointRef, locate
from ds_ckpt.manifest_merge import join
from ds_ckpt.protocols import Draft, PartialDraft, put
from ds_ckpt.records import PartRecord, PieceRecord, TensorRecord
from ds_ckpt.save_plan import Item
from ds_ckpt.save_planner import described, entries_of, num_planners, planned
from ds_ckpt.shard_tensors import Local, byte_view, check_local, copier, lock_slabs
from ds_ckpt.writer import Copy, FileStream, SlabPool, Written
from ds_comm.placement import Box, TensorShard
from ds_config.errors import CheckpointError
from ds_config.rehearsing import is_rehearsal

__all__ = [
    "Gathered",
    "PlanCache",
    "RankSavePlan",
    "SaveJob",
    "SaveResult",
    "prepare",
    "publish",
    "save",
    "save_from",
    "undo",
]


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What a save wrote: where, the bytes of its tensors, and its place in the order of checkpoints."""

    path: str
    nbytes: int
    sequence: int


@dataclass(frozen=True, slots=True)
class RankSavePlan:
    """One rank's share of a plan: the entries of its file, the tensors it planned, and whether there are other planners."""

    items: tuple[Item, ...] = ()
    planned: Mapping[str, Kind] = field(default_factory=dict)
    alone: bool = True


@dataclass(slots=True)
class PlanCache:
    """The last plan and the shards of this rank it was made for: layouts rarely change between saves."""

    shards: list[TensorShard] | None = None
    share: RankSavePlan = field(default_factory=RankSavePlan)


@dataclass(frozen=True, slots=True)
class SaveJob:
    """A save that is decided and not yet written: all that the writing needs to know, on one rank.

    Attributes:
        leads: Whether this rank creates and publishes the folder it writes into: rank 0 does, and the first rank of each other
            place where ranks save apart.
        apart: Whether ranks save into directories of their own, which somebody joins afterwards.
    """

    at: CheckpointRef
    draft: Draft
    share: RankSavePlan
    rank: int
    meta: Json
    aliases: Mapping[str, str]
    packing: BlockPacker | None = None
    leads: bool = False
    apart: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes this rank writes."""
        return sum(item.nbytes for item in self.items)

    @property
    def items(self) -> tuple[Item, ...]:
        """This rank's entries."""
        return self.share.items

    def stream(self, pool: SlabPool) -> FileStream:
        """Create the stream of this rank's file, to be filled and drained."""
        return FileStream(self.items, pool, BLOCK_BYTES)

    def write(self, stream: FileStream, copy: Copy | None = None) -> Leaf | None:
        """Write and sync this rank's file; what it holds, None when there is nothing to write.

        `copy` fills the stream here; without it the caller does.
        """
        if not self.items:
            return None
        draft = self.draft if self.packing is None else self.packing.begin(self.draft, self.items, BLOCK_BYTES)
        with ds_monitor.span("ckpt.write", checkpoint=self.at.tag, nbytes=self.nbytes):
            if copy is None:
                written = stream.drain(draft, self.rank)
            else:
                written = stream.through(copy, draft, self.rank)
        return _leaf(self.items, written) if self.packing is None else self.packing.leaf()

    def publish_leaf(self, leaf: Leaf | None) -> bytes:
        """Step 5: what this rank sends rank 0; writes the leaf's file where leaves have files."""
        report: dict[str, Json] = {"planned": {n: [dtype, shape] for n, (dtype, shape) in self.share.planned.items()}}
        if leaf is not None:
            if self.inline:
                report["leaf"] = leaf_json(leaf)
            else:
                data, name = encode_leaf(leaf), self.draft.leaf_name(self.rank)
                put(self.draft, name, data)
                report["entry"] = entry_json(entry_of(leaf, name, data))
        return dump(report).encode()

    @property
    def inline(self) -> bool:
        """Whether the manifest holds all places itself (version 1): few enough for one rank to plan, in files of their own."""
        return self.share.alone and self.packing is None

    def _replaced(self) -> set[str]:
        """Return the shared files of the older checkpoint of this tag; of one whose manifest is damaged nobody knows them."""
        try:
            return shared_files(self.at)
        except CheckpointError as error:
            ds_monitor.event("ckpt.kept", why=error.message)
            return set()

    def commit(self, reports: Mapping[int, bytes]) -> Json:
        """Publish, from what every rank said; the sequence number and the bytes of all tensors. Rank 0 only."""
        with ds_monitor.span("ckpt.commit", checkpoint=self.at.tag):
            sequence = next_sequence(self.at.storage)
            replaced = self._replaced()
            answers = [json.loads(data) for _, data in sorted(reports.items())]
            tensors: dict[str, Kind] = {}
            for answer in answers:
                tensors |= {name: (dtype, tuple(shape)) for name, (dtype, shape) in answer["planned"].items()}
            _check_aliases(self.aliases, tensors)
            created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            entries = tuple(entry_from(answer["entry"]) for answer in answers if "entry" in answer)
            index = CheckpointIndex(
                sequence, created, "ds-ckpt", BLOCK_BYTES, tensors, entries, self.aliases, self.meta
            )
            if self.inline:
                leaves = [leaf_of(answer["leaf"]) for answer in answers if "leaf" in answer]
                self.draft.commit(encode(join(index, leaves, whole=True)))
            else:
                self.draft.commit(encode_index(index))
            if replaced:
                collect(self.at.storage, replaced)
        return [sequence, sum(TensorRecord(*kind, ()).nbytes for kind in tensors.values())]


def save(
    path: str | os.PathLike[str] | CheckpointRef,
    shards: Iterable[Local],
    meta: Mapping[str, Json],
    *,
    group: Any = None,
    aliases: Mapping[str, str] | None = None,
    recipe: SaveOptions | None = None,
) -> SaveResult:
    """Write a checkpoint and return when it is durable and visible. Collective over `group`.

    Args:
        path: The checkpoint's own directory, `<root>/<tag>`; the same on every rank. One that exists is replaced.
        shards: This rank's. What several ranks hold is written once; together they must hold every element.
        meta: JSON (tuples come back as lists), the same on every rank.
        group: Ranks that hold the shards; None means all.
        aliases: Other names of stored tensors (tied weights), name -> stored name.
        recipe: Which blocks are written again, and how (`SaveOptions`); the same on every rank.

    Raises:
        CheckpointError: on every rank when it is raised on one. Earlier checkpoints are untouched.
    Cost: every element is written once, by one rank, in parallel over ranks and threads, through 32 MiB of host memory.
    """
    ranks = Coordinator.of(group)
    with ds_monitor.span("ckpt.save", checkpoint=str(path)):
        gathered = Gathered(shards)
        packing = None if recipe is None else BlockPacker(recipe)
        job = prepare(ranks, path, gathered, (meta, aliases or {}), PlanCache(), packing)
        lock_slabs(pool := SlabPool(), gathered.local)
        stream = job.stream(pool)
        return publish(ranks, job, lambda: job.write(stream, copier(gathered.local)))


def save_from(
    path: str | os.PathLike[str] | CheckpointRef,
    readers: Mapping[TensorShard, Callable[[], Tensor]],
    meta: Mapping[str, Json],
    aliases: Mapping[str, str],
) -> SaveResult:
    """`save` from one process, of tensors that are read one after another, each dropped once it is written.

    Cost: the largest tensor, and 32 MiB, of host memory.
    """
    ranks = Coordinator.alone()
    job = prepare(ranks, path, lambda: list(readers), (meta, aliases), PlanCache())
    stream, read = job.stream(SlabPool()), list(readers.values())
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
    ranks: Coordinator,
    path: str | os.PathLike[str] | CheckpointRef,
    shards: Callable[[], list[TensorShard]],
    record: tuple[Mapping[str, Json], Mapping[str, str]],
    cache: PlanCache,
    packing: BlockPacker | None = None,
) -> SaveJob:
    """Steps 1 and 2 of a save. `record` is (meta, aliases). Collective; one small agreement while the layout stays the same.

    `shards` gives this rank's; an error it raises is an error on every rank.

    Raises:
        CheckpointError: this process rehearses, so that it has no weights worth keeping ("rehearsal-save").
    """
    if is_rehearsal():
        raise CheckpointError(
            f"a rehearsal saves a checkpoint to {path}",
            code="rehearsal-save",
            fix="Save only where `not ds_config.rehearsing.is_rehearsal()`, or rehearse fewer steps than there are before the first save.",
        )
    local_shards: list[TensorShard] = []

    def describe() -> Json:
        local_shards.extend(shards())
        at, meta = locate(path), to_json(record[0])
        where = at.storage.where(at.tag)
        sums = {key: crc32(dump(value).encode()) for key, value in meta.items()}
        return {
            "same": [crc32(where.encode()), crc32(dump(sorted(sums.items())).encode())],
            "explain": [where, sums, at.tag, packing is None and isinstance(at.storage, LocalStorage)],
            "aliases": dict(record[1]),
            "clash": None,
            "changed": cache.shards != local_shards,
            "most": len(local_shards),
            "token": new_token() if ranks.rank == 0 else None,
        }

    description = ranks.settle(describe)
    explain = description.pop("explain")
    common = ranks.spread(description, _common)
    leads, apart = ranks.rank == 0, False
    if common["same"] is None:
        leads, apart = _place(ranks.exchange(explain), ranks.rank), True
    if common["clash"] is not None:
        raise _bad_alias(*common["clash"])
    if common["changed"]:
        cache.share = _share(ranks, local_shards, common["most"])
        cache.shards = local_shards
    at = locate(path)
    draft = at.storage.draft(at.tag, common["token"])
    if packing is not None:
        packing.look(ranks, at, local_shards)
    aliases = dict(sorted(common["aliases"].items()))
    return SaveJob(at, draft, cache.share, ranks.rank, to_json(record[0]), aliases, packing, leads, apart)


def _common(first: Json, second: Json) -> Json:
    """Merge the descriptions that two ranks give of a save."""
    merged = {**first["aliases"], **second["aliases"]}
    clashes = [
        [name, target]
        for name, target in sorted(first["aliases"].items())
        if second["aliases"].get(name, target) != target
    ]
    known = [c for c in (first["clash"], second["clash"]) if c is not None]
    return {
        "same": first["same"] if first["same"] == second["same"] else None,
        "aliases": merged,
        "clash": min([*clashes, *known], default=None),
        "changed": first["changed"] or second["changed"],
        "most": max(first["most"], second["most"]),
        "token": first["token"] or second["token"],
    }


def _share(ranks: Coordinator, local_shards: list[TensorShard], most: int) -> RankSavePlan:
    count = num_planners(most, ranks.size)
    came = ranks.route(described(local_shards, count, ranks.size))
    answers: dict[int, bytes] = {}
    table: dict[str, Kind] = {}

    def plan() -> None:
        if came:
            messages, kinds = planned(came, ranks.rank, ranks.size)
            answers.update(messages)
            table.update(kinds)

    ranks.settle(plan)
    return RankSavePlan(entries_of(ranks.route(answers), local_shards, ranks.rank), table, count == 1)


class Gathered:
    """The checked shards of this rank, as `prepare` asks for them."""

    def __init__(self, shards: Iterable[Local]) -> None:
        self._shards, self.local = shards, list[Local]()

    def __call__(self) -> list[TensorShard]:
        self.local = check_local(self._shards)
        return [item.shard for item in self.local]


def publish(ranks: Coordinator, job: SaveJob, write: Callable[[], Leaf | None]) -> SaveResult:
    """Steps 3 to 6 of a save; `write` is step 4. Collective."""
    reports: list[bytes] = []

    def account() -> None:
        reports.append(job.publish_leaf(write()))

    try:
        ranks.settle(lambda: job.draft.create() if job.leads else None)
        ranks.settle(account, patience_s=TRANSFER_S)
        came = ranks.route({0: reports[0]})
        draft = job.draft
        if job.apart:  # the manifest last: it says that all is there
            other = job.leads and ranks.rank > 0
            ranks.settle(lambda: draft.commit_part() if other and isinstance(draft, PartialDraft) else None)
        sequence, nbytes = ranks.first(lambda: job.commit(came))
    except BaseException as error:
        if job.leads:
            undo(job.draft, error)
        raise
    if job.packing is not None:
        job.packing.committed()
    return SaveResult(job.at.storage.where(job.at.tag), nbytes, sequence)


def undo(draft: Draft, error: BaseException) -> None:
    """Remove a draft after `error`; what cannot be removed is noted on the error, and left to the next save."""
    try:
        draft.abort()
    except (OSError, CheckpointError) as left:
        error.add_note(
            f"The unfinished checkpoint could not be removed ({left}); the next save into this directory will."
        )
        ds_monitor.event("ckpt.leftover", why=str(left))


def _place(explanations: Sequence[Json], own: int) -> bool:
    """Whether rank `own` is the first to save into its directory, where the directories of the ranks differ.

    Args:
        explanations: Of each rank the place, a checksum of each value of meta, the tag, and whether places may differ.
    Raises:
        CheckpointError: the tags differ, or places that must not ("ckpt-tag-differs"); meta differs ("ckpt-meta-differs").
    """
    where, first, tag, _ = explanations[0]
    alike = all(other == tag and able for _, _, other, able in explanations)
    for rank, (other, sums, _, _) in enumerate(explanations[1:], 1):
        if other != where and not alike:
            raise CheckpointError(
                f"ranks save to different places: rank 0 to {where}, rank {rank} to {other}",
                code="ckpt-tag-differs",
                fix="Give the same path and tag on every rank; directories of their own only with the same tag, on disks, without a recipe.",
            )
        differ = [k for k in sorted(set(first) | set(sums)) if first.get(k) != sums.get(k)]
        if differ:
            raise CheckpointError(
                f"meta differs between rank 0 and rank {rank} in {', '.join(differ[:10])}",
                code="ckpt-meta-differs",
                fix="Meta is recorded once; store what differs by rank as tensors, or under one key gathered from all.",
            )
    return [place for place, *_ in explanations].index(explanations[own][0]) == own


def _check_aliases(aliases: Mapping[str, str], tensors: Mapping[str, Kind]) -> None:
    for name, target in aliases.items():
        if name in tensors or target not in tensors or not valid_name(name):
            raise _bad_alias(name, target)


def _bad_alias(name: str, target: str) -> CheckpointError:
    return CheckpointError(
        f"the alias {name!r} -> {target!r} does not give a new name to a stored tensor",
        code="ckpt-alias",
        fix="Pass a tied tensor once as a shard, and its other names in `aliases`.",
    )


def _leaf(items: Sequence[Item], written: Written) -> Leaf:
    """Build the leaf that describes the content of a rank's file."""
    pieces_by_name: dict[str, dict[Box, list[PieceRecord]]] = {}
    kinds: dict[str, Kind] = {}
    at = written.file.header_nbytes
    for item, crc in zip(items, written.crc32, strict=True):
        piece = PieceRecord(0, at, item.piece.numel, tuple(crc), item.at)
        pieces_by_name.setdefault(item.name, {}).setdefault(item.box, []).append(piece)
        kinds[item.name] = (item.dtype, item.total)
        at += item.nbytes
    tensors = {
        name: TensorRecord(*kinds[name], tuple(PartRecord(box, tuple(pieces)) for box, pieces in boxes.items()))
        for name, boxes in pieces_by_name.items()
    }
    return Leaf((written.file,), tensors)
