"""Which leaves of an index a reader needs, and the manifest that they make together. Pure data; no tensor, no file."""

from __future__ import annotations

from collections.abc import Sequence

from ds_ckpt.checkpoint_index import CheckpointIndex, Leaf, LeafEntry
from ds_ckpt.format import MANIFEST, check_cover
from ds_ckpt.json_reader import invalid
from ds_ckpt.records import BlockLocation, FileRecord, Manifest, PartRecord, PieceRecord, TensorRecord
from ds_ckpt.zone_maps import bounds_of, meet, zones_of
from ds_comm.placement import Box, TensorShard

__all__ = ["join", "select"]


def select(index: CheckpointIndex, shards: Sequence[TensorShard]) -> list[LeafEntry]:
    """Select the leaves that may contain pieces of these shards, never too few.

    Cost: the zones of the leaves, times those of the shards (a few).
    """
    wanted = [
        (index.aliases.get(s.name, s.name), s.shape, bounds_of(s.shape, s.box, s.interval.start, s.interval.stop))
        for s in shards
        if s.numel and index.aliases.get(s.name, s.name) in index.tensors
    ]
    zones = zones_of(wanted)
    return [leaf for leaf in index.leaves if any(meet(shard_zone, zone) for zone in leaf.zones for shard_zone in zones)]


def join(index: CheckpointIndex, leaves: Sequence[Leaf], *, whole: bool) -> Manifest:
    """Merge an index and all or some of its leaves into a manifest.

    Args:
        whole: `leaves` are all of the index: parts must cover their tensors, and pieces their parts.

    Raises:
        CheckpointError: "ckpt-manifest-invalid": leaves that contradict each other.
    """
    files: list[FileRecord] = []
    numbers: dict[str, int] = {}
    parts: dict[str, dict[Box, list[PieceRecord]]] = {name: {} for name in index.tensors}
    for leaf in leaves:
        moved = []
        for record in leaf.files:
            if record.name not in numbers:
                numbers[record.name] = len(files)
                files.append(record)
            if files[numbers[record.name]] != record:
                raise invalid(MANIFEST, f"leaves disagree about {record.name}")
            moved.append(numbers[record.name])
        for name, tensor in leaf.tensors.items():
            for part in tensor.parts:
                parts[name].setdefault(part.box, []).extend(_moved(piece, moved) for piece in part.pieces)
    tensors = {}
    for name in sorted(index.tensors):
        dtype, shape = index.tensors[name]
        boxes = sorted(parts[name], key=lambda b: (b.offset, b.shape))
        records = [PartRecord(box, tuple(sorted(parts[name][box], key=lambda p: p.start))) for box in boxes]
        for part in records:
            _check_run(name, part, whole)
        if whole:
            check_cover(MANIFEST, repr(name[:200]), shape, boxes)
        tensors[name] = TensorRecord(dtype, shape, tuple(records))
    return Manifest(
        index.sequence,
        index.created,
        index.writer,
        index.block_bytes,
        tuple(files),
        tensors,
        index.aliases,
        index.meta,
        index.crc32,
        len(index.leaves),
    )


def _moved(piece: PieceRecord, numbers: Sequence[int]) -> PieceRecord:
    blocks = tuple(BlockLocation(numbers[b.file], b.at, b.nbytes, b.codec, b.digest) for b in piece.blocks)
    file = 0 if blocks else numbers[piece.file]
    return PieceRecord(file, piece.at, piece.numel, piece.crc32, piece.start, blocks)


def _check_run(name: str, part: PartRecord, whole: bool) -> None:
    at = 0
    for piece in part.pieces:
        if piece.start < at or (whole and piece.start != at):
            what = "overlap" if piece.start < at else "leave a hole"
            raise invalid(MANIFEST, f"the pieces of {name[:200]!r} {what} at element {piece.start}")
        at = piece.start + piece.numel
    if whole and at != part.box.numel:
        raise invalid(MANIFEST, f"{name[:200]!r} has {part.box.numel} elements in a part, its pieces {at}")
