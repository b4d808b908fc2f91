"""A save's plan, made by some ranks for all: what each does grows with what it holds, not with the world.

The *planner* of a tensor is a rank that its name decides. Each rank sends the planners of its tensors what it holds (`described`);
each planner plans its tensors as `save_plan.plan_save` does (`planned`) and sends each holder what to write (`entries_of`). Up to `SHARDS_ALONE` shards
rank 0 plans for all; beyond there are as many planners as shards fill. Ranks agree on the number before, by a maximum.
Nothing here communicates: messages are bytes by rank, and `Coordinator.route` carries them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from ds_ckpt.checkpoint_index import Kind
from ds_ckpt.crc import crc32
from ds_ckpt.jsontext import Json
from ds_ckpt.save_plan import Item, PlannedPiece, in_file_order, plan_save
from ds_comm.placement import Box, Interval, TensorShard

__all__ = ["SHARDS_ALONE", "SHARDS_PER_PLANNER", "described", "entries_of", "num_planners", "planned", "planner_of"]

SHARDS_ALONE: Final = 40_000
SHARDS_PER_PLANNER: Final = 4_000

Table = dict[str, Kind]


def num_planners(most_shards: int, world: int) -> int:
    """Return how many ranks plan the save, when no rank has more than `most_shards`."""
    total = most_shards * world
    return 1 if total <= SHARDS_ALONE else min(world, -(-total // SHARDS_PER_PLANNER))


def planner_of(name: str, planners: int, world: int) -> int:
    """Return the rank that plans a tensor, which is any of `planners` ranks, spread over the world."""
    return crc32(name.encode("utf-8", "surrogatepass")) % planners * world // planners


def described(shards: Sequence[TensorShard], planners: int, world: int) -> dict[int, bytes]:
    """Encode a rank's shards as a message for each of their planners."""
    rows: dict[int, list[Json]] = {}
    for index, s in enumerate(shards):
        box = None if s.box == Box.whole(s.shape) else [s.box.offset, s.box.shape]
        row = [index, s.name, s.dtype, s.shape, box, s.interval.start, s.interval.stop]
        rows.setdefault(planner_of(s.name, planners, world), []).append(row)
    return {rank: _dump(rank_rows) for rank, rank_rows in rows.items()}


def planned(came: Mapping[int, bytes], rank: int, world: int) -> tuple[dict[int, bytes], Table]:
    """Plan the tensors of this planner; return the answer to each rank that sent shards, and the planned tensors.

    Raises:
        CheckpointError: as `save_plan.plan_save`.
    """
    requests: list[list[TensorShard]] = [[] for _ in range(world)]
    numbers: dict[int, list[int]] = {}
    boxes: dict[str, Box] = {}
    for source, data in came.items():
        rows = json.loads(data)
        numbers[source] = [row[0] for row in rows]
        requests[source] = [_shard(row, boxes) for row in rows]
    plan = plan_save(requests, favoured=rank)
    answers = {
        source: _dump([_answer(item, numbers[source], requests[source]) for item in plan.items[source]])
        for source in came
    }
    return answers, {name: (t.dtype, t.shape) for name, t in plan.tensors.items()}


def entries_of(answers: Mapping[int, bytes], shards: Sequence[TensorShard], rank: int) -> tuple[Item, ...]:
    """Decode the planners' answers into the entries of this rank's file, in file order."""
    items = []
    for data in answers.values():
        for index, start, numel, number, box_json, at in json.loads(data):
            shard = shards[index]
            key = shard.name if number is None else f"{shard.name}#{number[0]}.{number[1]}"
            shape = shard.shape if number is None else (numel,)
            box = shard.box if box_json is None else Box(tuple(box_json[0]), tuple(box_json[1]))
            piece = PlannedPiece(rank, index, start, numel)
            items.append(Item(key, shard.dtype, shape, piece, shard.name, shard.shape, box, at))
    return in_file_order(items)


def _shard(row: Json, boxes: dict[str, Box]) -> TensorShard:
    _, name, dtype, shape, box, start, stop = row
    key = f"{shape}{box}"
    if key not in boxes:  # the same for most rows
        boxes[key] = Box.whole(shape) if box is None else Box(tuple(box[0]), tuple(box[1]))
    return TensorShard(name, tuple(shape), dtype, boxes[key], Interval(start, stop))


def _answer(item: Item, numbers: Sequence[int], shards: Sequence[TensorShard]) -> Json:
    piece = item.piece
    number = None if item.key == item.name else [int(n) for n in item.key.rpartition("#")[2].split(".")]
    # Boxes that overlapped in part became one, which no holder has.
    box = None if item.box == shards[piece.shard].box else [item.box.offset, item.box.shape]
    return [numbers[piece.shard], piece.start, piece.numel, number, box, item.at]


def _dump(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
