"""Who writes which elements where, and who reads which bytes into what: pure functions of shards. No tensor, no file.

`plan_save` sees the shards of every rank and gives each element exactly one writer. `plan_load` sees the shards of one
rank and a manifest, and gives the byte ranges that fill them. Neither knows what wrote the checkpoint or what will read
it: world size, ZeRO stage and parallel degrees appear only as boxes and intervals.
"""

from __future__ import annotations

import difflib
import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ds_ckpt.dtypes import CODE, ITEMSIZE
from ds_ckpt.format import BLOCK_BYTES, Manifest, PartRecord, TensorRecord, disjoint, valid_name
from ds_comm.placement import Box, TensorShard
from ds_config.errors import CheckpointError

__all__ = [
    "BlockRead",
    "Item",
    "LoadOptions",
    "PlannedPart",
    "PlannedPiece",
    "PlannedTensor",
    "Run",
    "SavePlan",
    "all_blocks",
    "check_load",
    "plan_load",
    "plan_save",
]

_SHOWN: Final = 10  # names listed in an error before "and N more"


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
    """One entry of one rank's file: the safetensors `key`, and the elements of the rank's shard that it holds."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    piece: PlannedPiece

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
class Run:
    """`nbytes` from byte `at` of a block to byte `to` of the data of shard number `shard`."""

    at: int
    shard: int
    to: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockRead:
    """What one rank needs of one block: byte `at` of file number `file`, `nbytes` long, with its checksum."""

    name: str
    file: int
    at: int
    nbytes: int
    crc32: str
    runs: tuple[Run, ...]

    @property
    def needed(self) -> int:
        """Bytes of the block that the rank holds; the block's size when it holds all of it (once)."""
        return sum(run.nbytes for run in self.runs)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a load may leave out or change. The default: everything there is, as it is.

    Attributes:
        prefixes: Names that this load is about; others in the checkpoint are ignored (`("param/",)`: weights only).
        strict: Tensors in the checkpoint (under the prefixes) that no rank asked for are an error.
        cast: Fill a shard of another floating-point dtype by conversion, instead of an error.
    """

    prefixes: tuple[str, ...] = ("",)
    strict: bool = True
    cast: bool = False


@dataclass(frozen=True, slots=True)
class _Source:
    """Elements start..stop of a part, held by `rank` from element `at` of its shard number `shard`."""

    start: int
    stop: int
    rank: int
    shard: int
    at: int


def plan_save(requests: Sequence[Sequence[TensorShard]], split_bytes: int = BLOCK_BYTES) -> SavePlan:
    """Give every element of every tensor one writer.

    Args:
        requests: The shards of each rank, by rank. Replicas are written once; what several ranks hold is given to the
            one with the least to write, in stretches of at most `split_bytes`.

    Raises:
        CheckpointError: "ckpt-name" (a name the format cannot hold), "ckpt-shape-conflict" (ranks disagree about a
            tensor), "ckpt-incomplete-tensor" (elements that no rank holds).
    Cost: n log n in the number of shards; the same result on every rank.
    """
    held: dict[str, list[tuple[int, int, TensorShard]]] = {}
    for rank, shards in enumerate(requests):
        for index, shard in enumerate(shards):
            held.setdefault(shard.name, []).append((rank, index, shard))
    _check_names(held)
    load = [0] * len(requests)
    shared: list[tuple[int, str, int, int, int, tuple[_Source, ...]]] = []
    chosen: dict[str, list[tuple[Box, list[tuple[int, int, _Source]]]]] = {}
    for name in sorted(held):
        parts = _parts(held[name])
        itemsize = ITEMSIZE[held[name][0][2].dtype]
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
    _balance(shared, load, chosen)
    tensors = {}
    for name, parts_chosen in chosen.items():
        shard = held[name][0][2]
        parts_done = tuple(PlannedPart(box, _pieces(taken)) for box, taken in parts_chosen)
        tensors[name] = PlannedTensor(shard.dtype, shard.shape, parts_done)
    return SavePlan(tensors, _items(tensors, len(requests)))


def _balance(
    shared: list[tuple[int, str, int, int, int, tuple[_Source, ...]]],
    load: list[int],
    chosen: dict[str, list[tuple[Box, list[tuple[int, int, _Source]]]]],
) -> None:
    # Longest first to the least loaded holder. A heap entry may be out of date when another set of holders gave its
    # rank work meanwhile: it is then put back with the rank's present load, so one heap per set stays n log n.
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for nbytes, name, number, low, high, holders in sorted(shared, key=lambda s: (-s[0], *s[1:4])):
        by_rank = {h.rank: h for h in reversed(holders)}
        ranks = tuple(sorted(by_rank))
        heap = heaps.setdefault(ranks, [(0, r) for r in ranks])
        while heap[0][0] != load[heap[0][1]]:
            heapq.heapreplace(heap, (load[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        load[rank] += nbytes
        heapq.heapreplace(heap, (load[rank], rank))
        chosen[name][number][1].append((low, high, by_rank[rank]))


def _check_names(held: Mapping[str, Sequence[tuple[int, int, TensorShard]]]) -> None:
    bad = [name for name in held if not valid_name(name)]
    if bad:
        raise CheckpointError(
            f"a checkpoint cannot hold tensors named {_listed([repr(n) for n in bad])}",
            code="ckpt-name",
            fix="Use printable names without `#`, up to 4096 characters.",
        )
    unknown = sorted({s.dtype for group in held.values() for _, _, s in group} - set(CODE))
    if unknown:
        raise CheckpointError(
            f"a checkpoint cannot hold elements of type {', '.join(unknown)}",
            code="ckpt-dtype",
            fix=f"Convert to one of {', '.join(CODE)}.",
        )
    for name, group in held.items():
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
    """Disjoint boxes and who holds which elements of them. Boxes that overlap in part are flattened into one."""
    by_box: dict[Box, list[_Source]] = {}
    for rank, index, shard in group:
        if shard.numel:
            source = _Source(shard.interval.start, shard.interval.stop, rank, index, 0)
            by_box.setdefault(shard.box, []).append(source)
    boxes = sorted(by_box, key=lambda b: (b.offset, b.shape))
    whole = Box.whole(group[0][2].shape)
    if disjoint(boxes):
        found = sum(box.numel for box in boxes)
        if found != whole.numel:
            raise CheckpointError(
                f"{group[0][2].name!r} has {whole.numel} elements, the ranks' boxes only {found}",
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
    """Consecutive stretches of a part with the set of sources that hold each; every element is in exactly one."""
    edges = sorted({edge for s in sources for edge in (s.start, s.stop)})
    starts = sorted(sources, key=lambda s: (s.start, s.rank, s.shard))
    active: list[_Source] = []
    taken, at = 0, 0
    for low, high in itertools.pairwise(edges):
        while taken < len(starts) and starts[taken].start <= low:
            active.append(starts[taken])
            taken += 1
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


def _pieces(taken: list[tuple[int, int, _Source]]) -> tuple[PlannedPiece, ...]:
    pieces: list[PlannedPiece] = []
    for low, high, source in sorted(taken, key=lambda t: t[0]):
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
            for j, piece in enumerate(part.pieces):
                key = name if whole else f"{name}#{i}.{j}"
                out[piece.rank].append(Item(key, tensor.dtype, tensor.shape if whole else (piece.numel,), piece))
    # Widest elements first: every entry then starts at a multiple of its element size.
    return tuple(tuple(sorted(items, key=lambda i: (-ITEMSIZE[i.dtype], i.key))) for items in out)


def plan_load(shards: Sequence[TensorShard], manifest: Manifest) -> tuple[BlockRead, ...]:
    """The byte ranges of the files that fill `shards`, block by block, ordered by file and offset.

    The shards must have passed `check_load`. A shard's byte positions are those of its dtype *in the checkpoint*: a
    caller that casts reads into a buffer of that dtype first.
    Cost: one run per contiguous stretch; a rank with the layout of the writer has one per block.
    """
    wanted: dict[tuple[int, int], tuple[str, int, str, list[Run]]] = {}
    for index, shard in enumerate(shards):
        name = manifest.aliases.get(shard.name, shard.name)
        record = manifest.tensors[name]
        itemsize = ITEMSIZE[record.dtype]
        for part in record.parts:
            stops = _piece_stops(part)
            for in_shard, in_part, numel in _aligned(shard, part.box):
                for block in _cut(record, part, stops, (in_part, numel), manifest.block_bytes):
                    file, at, nbytes, crc, offset, done, count = block
                    runs = wanted.setdefault((file, at), (name, nbytes, crc, []))[3]
                    to = (in_shard + done) * itemsize
                    last = runs[-1] if runs else None
                    if last and last.shard == index and (last.at + last.nbytes, last.to + last.nbytes) == (offset, to):
                        runs[-1] = Run(last.at, index, last.to, last.nbytes + count)
                    else:
                        runs.append(Run(offset, index, to, count))
    return tuple(
        BlockRead(name, file, at, nbytes, crc, tuple(sorted(runs, key=lambda r: (r.at, r.shard))))
        for (file, at), (name, nbytes, crc, runs) in sorted(wanted.items())
    )


def all_blocks(manifest: Manifest) -> tuple[BlockRead, ...]:
    """Every block of a checkpoint, by file and offset, without runs."""
    out = []
    for name, tensor in manifest.tensors.items():
        for part in tensor.parts:
            for piece in part.pieces:
                nbytes = piece.numel * ITEMSIZE[tensor.dtype]
                for i, crc in enumerate(piece.crc32):
                    low = i * manifest.block_bytes
                    size = min(manifest.block_bytes, nbytes - low)
                    out.append(BlockRead(name, piece.file, piece.at + low, size, crc, ()))
    return tuple(sorted(out, key=lambda b: (b.file, b.at)))


def _piece_stops(part: PartRecord) -> list[int]:
    stops, at = [], 0
    for piece in part.pieces:
        at += piece.numel
        stops.append(at)
    return stops


def _cut(
    record: TensorRecord, part: PartRecord, stops: Sequence[int], run: tuple[int, int], block_bytes: int
) -> Iterator[tuple[int, int, int, str, int, int, int]]:
    # -> (file, byte of the block in it, block bytes, checksum, byte in the block, elements of the run before, bytes)
    itemsize = ITEMSIZE[record.dtype]
    start, numel = run
    number, done = bisect_right(stops, start), 0
    while done < numel:
        piece = part.pieces[number]
        first = (start + done - (stops[number] - piece.numel)) * itemsize  # byte inside the piece
        last = min(piece.numel * itemsize, first + (numel - done) * itemsize)
        while first < last:
            block = first // block_bytes
            low = block * block_bytes
            high = min(low + block_bytes, piece.numel * itemsize)
            count = min(last, high) - first
            yield piece.file, piece.at + low, high - low, piece.crc32[block], first - low, done, count
            done += count // itemsize
            first += count
        number += 1


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
    ours, theirs = _strides(shard.box), _strides(part)
    low = _flat(common.offset, shard.box.offset, ours)
    base = _flat(common.offset, part.offset, theirs)
    outer = common.shape[:dim]
    for n in range(math.prod(outer)):
        rest, mine, other = n, low, base
        for d in reversed(range(dim)):
            rest, i = divmod(rest, outer[d])
            mine += i * ours[d]
            other += i * theirs[d]
        start = max(mine, shard.interval.start)
        stop = min(mine + length, shard.interval.stop)
        if start < stop:
            yield start - shard.interval.start, other + start - mine, stop - start


def _strides(box: Box) -> list[int]:
    return [math.prod(box.shape[d + 1 :]) for d in range(len(box.shape))]


def _flat(offset: Sequence[int], origin: Sequence[int], strides: Sequence[int]) -> int:
    return sum((o - b) * s for o, b, s in zip(offset, origin, strides, strict=True))


def check_load(shards: Sequence[TensorShard], asked: Iterable[str], manifest: Manifest, options: LoadOptions) -> None:
    """Refuse, with every reason at once, what the checkpoint cannot fill exactly.

    Args:
        shards: This rank's.
        asked: Names that any rank asked for.

    A tensor without elements may be missing or unexpected.

    Raises:
        CheckpointError: "ckpt-mismatch": missing names (with the nearest stored ones), unexpected names, shapes or
            dtypes that differ.
    """
    known = {**{name: name for name in manifest.tensors}, **manifest.aliases}
    # Tensors without elements say nothing: whether one is there depends on the layout that wrote it.
    missing = sorted({s.name for s in shards if math.prod(s.shape)} - known.keys())
    problems = []
    for name in missing[:_SHOWN]:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6) if len(known) <= 20000 else []
        problems.append(f"missing {name!r}" + (f" (nearest: {near[0]!r})" if near else ""))
    problems += _more(missing)
    if options.strict:
        served = {known[name] for name in asked if name in known}
        mine = sorted(
            n for n, t in manifest.tensors.items() if n not in served and n.startswith(options.prefixes) and t.parts
        )
        problems += [f"unexpected {name!r}" for name in mine[:_SHOWN]] + _more(mine)
    wrong = []
    for shard in shards:
        if shard.name not in known:
            continue
        record = manifest.tensors[known[shard.name]]
        castable = options.cast and _castable(record.dtype) and _castable(shard.dtype)
        if shard.shape != record.shape or (shard.dtype != record.dtype and not castable):
            stored, wanted = f"{record.dtype}{list(record.shape)}", f"{shard.dtype}{list(shard.shape)}"
            wrong.append(f"{shard.name!r} is stored as {stored}, asked for as {wanted}")
    problems += wrong[:_SHOWN] + _more(wrong)
    if problems:
        raise CheckpointError(
            "the checkpoint does not match what is loaded into:\n  " + "\n  ".join(problems),
            code="ckpt-mismatch",
            fix="Use LoadOptions(prefixes=..., strict=False, cast=True) for a load that is meant to be partial.",
        )


def _castable(dtype: str) -> bool:
    return "float" in dtype


def _more(names: Sequence[str]) -> list[str]:
    return [f"... and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:_SHOWN], *_more(names)])
