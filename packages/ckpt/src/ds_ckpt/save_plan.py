"""Who writes which elements where, and who reads which bytes into what: pure functions of shards. No tensor, no file.

`plan_save` sees the shards of every rank and gives each element exactly one writer. `plan_load` sees the shards of one
rank and a manifest, and gives the byte ranges that fill them. Neither knows what wrote the checkpoint or what will read
it: world size, ZeRO stage and parallel degrees appear only as boxes and intervals.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ds_ckpt.dtypes import CODE, ITEMSIZE
from ds_ckpt.format import BLOCK_BYTES, disjoint, valid_name
from ds_ckpt.records import BlockLocation, Manifest, PartRecord, PieceRecord, TensorRecord
from ds_comm.placement import Box, TensorShard
from ds_config.errors import CheckpointError

__all__ = [
    "SHOWN",
    "BlockRead",
    "CopyRun",
    "Item",
    "PlannedPart",
    "PlannedPiece",
    "PlannedTensor",
    "SavePlan",
    "all_blocks",
    "in_file_order",
    "more",
    "of_shards",
    "plan_load",
    "plan_save",
]

_WRITERS: Final = 16  # of what many ranks hold: a reader of it reads the leaves of all its writers
SHOWN: Final = 10  # names listed in an error before "and N more"


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """`numel` elements that `rank` writes, from element `start` of its shard number `shard`."""

    rank: int
    shard: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A box and the pieces of its flattened elements, in order and without gap."""

    box: Box
    pieces: tuple[PlannedPiece, ...]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A logical tensor and where each of its elements will come from."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[PlannedPart, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of one rank's file: the safetensors `key` and shape, the elements of the rank's shard that it holds, and where
    they belong: from element `at` on of the part `box` of tensor `name`, whose global shape is `total`."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    piece: PlannedPiece
    name: str
    total: tuple[int, ...]
    box: Box
    at: int

    @property
    def nbytes(self) -> int:
        """Bytes of the entry."""
        return self.piece.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """All tensors by name (sorted), and the entries of each rank's file in the order they lie in it."""

    tensors: Mapping[str, PlannedTensor]
    items: tuple[tuple[Item, ...], ...]

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of tensor data that each rank writes."""
        return tuple(sum(item.nbytes for item in items) for items in self.items)


@dataclass(frozen=True, slots=True)
class CopyRun:
    """`nbytes` from byte `at` of a block to byte `to` of the data of shard number `shard`."""

    at: int
    shard: int
    to: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockRead:
    """What one rank needs of one block: byte `at` of file number `file`, `nbytes` long, with its checksum.

    With a `codec` there are `stored_nbytes` in the file, out of which it makes the `nbytes`.
    """

    name: str
    file: int
    at: int
    nbytes: int
    crc32: str
    runs: tuple[CopyRun, ...]
    codec: str = ""
    stored_nbytes: int = 0

    @property
    def needed(self) -> int:
        """Bytes of the block that the rank holds; the block's size when it holds all of it (once)."""
        return sum(run.nbytes for run in self.runs)


@dataclass(frozen=True, slots=True)
class _Source:
    """Elements start..stop of a part, held by `rank` from element `at` of its shard number `shard`."""

    start: int
    stop: int
    rank: int
    shard: int
    at: int


def plan_save(requests: Sequence[Sequence[TensorShard]], split_bytes: int = BLOCK_BYTES, favoured: int = 0) -> SavePlan:
    """Give every element of every tensor one writer.

    Args:
        requests: The shards of each rank, by rank. Replicas are written once; what several ranks hold is given to the
            one with the least to write of up to 16 of them, in stretches of at most `split_bytes`.
        favoured: Which rank comes first among those with the same to write, its followers after it.

    Raises:
        CheckpointError: "ckpt-name" (a name the format cannot hold), "ckpt-shape-conflict" (ranks disagree about a
            tensor), "ckpt-incomplete-tensor" (elements that no rank holds).
    Cost: n log n in the number of shards; the same result on every rank.
    """
    shards_by_name: dict[str, list[tuple[int, int, TensorShard]]] = {}
    for rank, shards in enumerate(requests):
        for index, shard in enumerate(shards):
            shards_by_name.setdefault(shard.name, []).append((rank, index, shard))
    _check_names(shards_by_name)
    load = [0] * len(requests)
    shared: list[tuple[int, str, int, int, int, tuple[_Source, ...]]] = []
    chosen: dict[str, list[tuple[Box, list[tuple[int, int, _Source]]]]] = {}
    for name in sorted(shards_by_name):
        parts = _parts(shards_by_name[name])
        itemsize = ITEMSIZE[shards_by_name[name][0][2].dtype]
        chosen[name] = [(box, []) for box, _ in parts]
        for number, (box, sources) in enumerate(parts):
            for start, stop, holders in _segments(name, box, sources):
                if len({h.rank for h in holders}) == 1:
                    load[holders[0].rank] += (stop - start) * itemsize
                    chosen[name][number][1].append((start, stop, holders[0]))
                    continue
                step = max(1, split_bytes // itemsize)
                for low in range(start, stop, step):
                    high = min(low + step, stop)
                    shared.append(((high - low) * itemsize, name, number, low, high, holders))
    _balance(shared, load, chosen, favoured)
    tensors = {}
    for name, parts_chosen in chosen.items():
        shard = shards_by_name[name][0][2]
        parts_done = tuple(PlannedPart(box, _pieces(segments)) for box, segments in parts_chosen)
        tensors[name] = PlannedTensor(shard.dtype, shard.shape, parts_done)
    return SavePlan(tensors, _items(tensors, len(requests)))


def _balance(
    shared: list[tuple[int, str, int, int, int, tuple[_Source, ...]]],
    load: list[int],
    chosen: dict[str, list[tuple[Box, list[tuple[int, int, _Source]]]]],
    favoured: int,
) -> None:
    # Longest first to the least loaded holder. A heap entry may be out of date when another set of holders gave its
    # rank work meanwhile: it is then put back with the rank's present load, so one heap per set stays n log n.
    heaps: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}  # (load, place in the order, rank)
    for nbytes, name, number, low, high, holders in sorted(shared, key=lambda s: (-s[0], *s[1:4])):
        by_rank = {h.rank: h for h in reversed(holders)}
        ranks = tuple(sorted(by_rank))
        if ranks not in heaps:
            some = ranks[:: -(-len(ranks) // _WRITERS)]
            heaps[ranks] = sorted((0, (r - favoured) % len(load), r) for r in some)
        heap = heaps[ranks]
        while heap[0][0] != load[heap[0][2]]:
            heapq.heapreplace(heap, (load[heap[0][2]], heap[0][1], heap[0][2]))
        rank = heap[0][2]
        load[rank] += nbytes
        heapq.heapreplace(heap, (load[rank], heap[0][1], rank))
        chosen[name][number][1].append((low, high, by_rank[rank]))


def _check_names(shards_by_name: Mapping[str, Sequence[tuple[int, int, TensorShard]]]) -> None:
    bad = [name for name in shards_by_name if not valid_name(name)]
    if bad:
        raise CheckpointError(
            f"a checkpoint cannot hold tensors named {_listed([repr(n) for n in bad])}",
            code="ckpt-name",
            fix="Use printable names without `#`, up to 4096 characters.",
        )
    unknown = sorted({s.dtype for group in shards_by_name.values() for _, _, s in group} - set(CODE))
    if unknown:
        raise CheckpointError(
            f"a checkpoint cannot hold elements of type {', '.join(unknown)}",
            code="ckpt-dtype",
            fix=f"Convert to one of {', '.join(CODE)}.",
        )
    for name, group in shards_by_name.items():
        first_rank, _, first = group[0]
        for rank, _, shard in group[1:]:
            if (shard.shape, shard.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"ranks disagree about {name!r}: rank {first_rank} says {first.dtype}{list(first.shape)}, "
                    f"rank {rank} says {shard.dtype}{list(shard.shape)}",
                    code="ckpt-shape-conflict",
                    fix="One logical tensor has one global shape and dtype; give different tensors different names.",
                )


def _parts(group: Sequence[tuple[int, int, TensorShard]]) -> list[tuple[Box, list[_Source]]]:
    """Split a tensor into disjoint boxes, with the sources that have elements of each box.

    Boxes that overlap in part are flattened into a single box.
    """
    by_box: dict[Box, list[_Source]] = {}
    for rank, index, shard in group:
        if shard.numel:
            source = _Source(shard.interval.start, shard.interval.stop, rank, index, 0)
            by_box.setdefault(shard.box, []).append(source)
    boxes = sorted(by_box, key=lambda b: (b.offset, b.shape))
    whole = Box.whole(group[0][2].shape)
    if disjoint(boxes):
        covered = sum(box.numel for box in boxes)
        if covered != whole.numel:
            raise CheckpointError(
                f"{group[0][2].name!r} has {whole.numel} elements, the ranks' boxes only {covered}",
                code="ckpt-incomplete-tensor",
                fix="Pass the shards of every rank, with a group that contains all of them.",
            )
        return [(box, by_box[box]) for box in boxes]
    sources = []
    for rank, index, shard in group:
        for in_shard, in_whole, numel in _aligned(shard, whole):
            sources.append(_Source(in_whole, in_whole + numel, rank, index, in_shard))
    return [(whole, sources)]


def _segments(name: str, box: Box, sources: Sequence[_Source]) -> Iterator[tuple[int, int, tuple[_Source, ...]]]:
    """Yield consecutive ranges of a part with the set of sources of each; every element is in exactly one range."""
    edges = sorted({edge for s in sources for edge in (s.start, s.stop)})
    starts = sorted(sources, key=lambda s: (s.start, s.rank, s.shard))
    active: list[_Source] = []
    next_index, at = 0, 0
    for low, high in itertools.pairwise(edges):
        while next_index < len(starts) and starts[next_index].start <= low:
            active.append(starts[next_index])
            next_index += 1
        active = [s for s in active if s.stop > low]
        if low != at or not active:
            break
        yield low, high, tuple(_Source(low, high, s.rank, s.shard, s.at + low - s.start) for s in active)
        at = high
    if at != box.numel:
        raise CheckpointError(
            f"no rank holds element {at} of the {box.numel} in part offset {list(box.offset)} shape {list(box.shape)} of {name!r}",
            code="ckpt-incomplete-tensor",
            fix="Pass the shards of every rank, with a group that contains all of them.",
        )


def _pieces(segments: list[tuple[int, int, _Source]]) -> tuple[PlannedPiece, ...]:
    pieces: list[PlannedPiece] = []
    for low, high, source in sorted(segments, key=lambda t: t[0]):
        start = source.at + low - source.start
        last = pieces[-1] if pieces else None
        if last and (last.rank, last.shard, last.start + last.numel) == (source.rank, source.shard, start):
            pieces[-1] = PlannedPiece(last.rank, last.shard, last.start, last.numel + high - low)
        else:
            pieces.append(PlannedPiece(source.rank, source.shard, start, high - low))
    return tuple(pieces)


def _items(tensors: Mapping[str, PlannedTensor], world: int) -> tuple[tuple[Item, ...], ...]:
    out: list[list[Item]] = [[] for _ in range(world)]
    for name, tensor in tensors.items():
        whole = len(tensor.parts) == 1 and len(tensor.parts[0].pieces) == 1
        for i, part in enumerate(tensor.parts):
            at = 0
            for j, piece in enumerate(part.pieces):
                key = name if whole else f"{name}#{i}.{j}"
                shape = tensor.shape if whole else (piece.numel,)
                out[piece.rank].append(Item(key, tensor.dtype, shape, piece, name, tensor.shape, part.box, at))
                at += piece.numel
    return tuple(in_file_order(items) for items in out)


def in_file_order(items: Iterable[Item]) -> tuple[Item, ...]:
    """Sort entries for a file, widest elements first: every entry then starts at a multiple of its element size."""
    return tuple(sorted(items, key=lambda i: (-ITEMSIZE[i.dtype], i.key)))


def plan_load(shards: Sequence[TensorShard], manifest: Manifest) -> tuple[BlockRead, ...]:
    """Plan the byte ranges of the files that fill `shards`, block by block, ordered by file and offset.

    The shards must have passed `check_load`. A shard's byte positions are those of its dtype *in the checkpoint*: a
    caller that casts reads into a buffer of that dtype first.
    Cost: one run per contiguous range; a rank with the layout of the writer has one per block.
    """
    wanted: dict[tuple[int, int], tuple[BlockRead, list[CopyRun]]] = {}
    for index, shard in enumerate(shards):
        name = manifest.aliases.get(shard.name, shard.name)
        record = manifest.tensors[name]
        itemsize = ITEMSIZE[record.dtype]
        for part in record.parts:
            starts = [piece.start for piece in part.pieces]
            for in_shard, in_part, numel in _aligned(shard, part.box):
                for block, offset, done, count in _cut(
                    (name, record), part, starts, (in_part, numel), manifest.block_bytes
                ):
                    runs = wanted.setdefault((block.file, block.at), (block, []))[1]
                    to = (in_shard + done) * itemsize
                    last = runs[-1] if runs else None
                    if last and last.shard == index and (last.at + last.nbytes, last.to + last.nbytes) == (offset, to):
                        runs[-1] = CopyRun(last.at, index, last.to, last.nbytes + count)
                    else:
                        runs.append(CopyRun(offset, index, to, count))
    return tuple(
        replace(block, runs=tuple(sorted(runs, key=lambda r: (r.at, r.shard))))
        for _, (block, runs) in sorted(wanted.items())
    )


def of_shards(reads: Sequence[BlockRead], chosen: Collection[int]) -> list[BlockRead]:
    """Restrict the reads of a load plan to the runs that fill the `chosen` shards."""
    selected = (replace(read, runs=tuple(run for run in read.runs if run.shard in chosen)) for read in reads)
    return [read for read in selected if read.runs]


def all_blocks(manifest: Manifest) -> tuple[BlockRead, ...]:
    """List every block of a checkpoint, by file and offset, without runs.

    A block that several pieces share is listed once.
    """
    out = {}
    for name, tensor in manifest.tensors.items():
        for part in tensor.parts:
            for piece in part.pieces:
                for i in range(len(piece.crc32)):
                    block = _block(name, ITEMSIZE[tensor.dtype], piece, i, manifest.block_bytes)
                    out[(block.file, block.at)] = block
    return tuple(out[key] for key in sorted(out))


def _block(name: str, itemsize: int, piece: PieceRecord, number: int, block_bytes: int) -> BlockRead:
    low = number * block_bytes
    nbytes = min(block_bytes, piece.numel * itemsize - low)
    where = piece.blocks[number] if piece.blocks else BlockLocation(piece.file, piece.at + low, nbytes, "", "")
    return BlockRead(name, where.file, where.at, nbytes, piece.crc32[number], (), where.codec, where.nbytes)


def _cut(
    tensor: tuple[str, TensorRecord], part: PartRecord, starts: Sequence[int], run: tuple[int, int], block_bytes: int
) -> Iterator[tuple[BlockRead, int, int, int]]:
    # -> (block, byte in the block, elements of the run before, bytes). What no piece holds is left out: `missing_bytes` sees it.
    name, record = tensor
    itemsize = ITEMSIZE[record.dtype]
    start, numel = run
    stop = start + numel
    for number in range(max(0, bisect_right(starts, start) - 1), len(starts)):
        piece = part.pieces[number]
        if piece.start >= stop:
            break
        first = (max(start, piece.start) - piece.start) * itemsize  # byte inside the piece
        last = (min(stop, piece.start + piece.numel) - piece.start) * itemsize
        while first < last:
            block = _block(name, itemsize, piece, first // block_bytes, block_bytes)
            low = first // block_bytes * block_bytes
            count = min(last, low + block.nbytes) - first
            yield block, first - low, piece.start + first // itemsize - start, count
            first += count


def _aligned(shard: TensorShard, part: Box) -> Iterator[tuple[int, int, int]]:
    """Runs that lie contiguously in both: (element of the shard's data, element of `part` flattened, length)."""
    if shard.box == part:
        if shard.numel:
            yield 0, shard.interval.start, shard.numel
        return
    common = shard.box & part
    if common is None or not shard.numel:
        return
    inner = len(common.shape)  # dims inner.. are covered fully by all three: one run spans them and dim inner-1
    while inner > 0 and common.shape[inner - 1] == shard.box.shape[inner - 1] == part.shape[inner - 1]:
        inner -= 1
    dim = max(inner - 1, 0)
    length = math.prod(common.shape[dim:])
    ours, part_strides = _strides(shard.box), _strides(part)
    low = _flat(common.offset, shard.box.offset, ours)
    base = _flat(common.offset, part.offset, part_strides)
    outer = common.shape[:dim]
    for n in range(math.prod(outer)):
        rest, shard_at, other = n, low, base
        for d in reversed(range(dim)):
            rest, i = divmod(rest, outer[d])
            shard_at += i * ours[d]
            other += i * part_strides[d]
        start = max(shard_at, shard.interval.start)
        stop = min(shard_at + length, shard.interval.stop)
        if start < stop:
            yield start - shard.interval.start, other + start - shard_at, stop - start


def _strides(box: Box) -> list[int]:
    return [math.prod(box.shape[d + 1 :]) for d in range(len(box.shape))]


def _flat(offset: Sequence[int], origin: Sequence[int], strides: Sequence[int]) -> int:
    return sum((o - b) * s for o, b, s in zip(offset, origin, strides, strict=True))


def more(names: Sequence[str]) -> list[str]:
    """Return an error's line about the names after the first `SHOWN`; no line when there are no more."""
    return [f"... and {len(names) - SHOWN} more"] if len(names) > SHOWN else []


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:SHOWN], *more(names)])
