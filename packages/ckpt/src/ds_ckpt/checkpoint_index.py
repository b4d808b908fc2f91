"""Manifest, version 2: an index, and leaves beside it that say where the elements are. Pure data; no tensor, no file.

Words. A *leaf* is a file of one rank: the data files it wrote or refers to, and the pieces in them. The *index* is
`manifest.json`: all tensors by name with dtype and shape, and of each leaf its name, size, checksum, the names and sizes of its data
files, and its *zones* (see `zones`), by which a reader finds the leaves that it needs and reads no others. So what a rank
reads and remembers grows with what it holds, and with the number of files by some bytes each.

Beyond version 1 a piece may have its blocks in several files, encoded, and in files that other checkpoints use, too
(`shared`). What version 1 can say is written as version 1: a manifest whose only leaf is inside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ds_ckpt.block_codecs import CODECS
from ds_ckpt.crc import crc32
from ds_ckpt.dtypes import ITEMSIZE
from ds_ckpt.format import (
    MANIFEST,
    MAX_SEQUENCE,
    check_inside,
    decode_box,
    decode_tensor_kind,
    seal,
    unseal,
    valid_name,
)
from ds_ckpt.json_reader import CRC, FILE_NAME, LINE, MAX_DIMS, MAX_NUMEL, Reader, damaged, invalid
from ds_ckpt.jsontext import Json, dump, parse
from ds_ckpt.records import BlockLocation, FileRecord, PartRecord, PieceRecord, TensorRecord
from ds_ckpt.zone_maps import SCALE, Bounds, Zone, bounds_of, zones_of
from ds_comm.placement import Box

__all__ = [
    "CheckpointIndex",
    "Kind",
    "Leaf",
    "LeafEntry",
    "decode_index",
    "decode_leaf",
    "encode_index",
    "encode_leaf",
    "entry_from",
    "entry_json",
    "entry_of",
    "leaf_json",
    "leaf_of",
]

_DIGEST: Final = re.compile(r"([0-9a-f]{32})?")
_MAX_LEAVES: Final = 10**6
_MAX_ITEMS: Final = 10**7

Kind = tuple[str, tuple[int, ...]]  # dtype and global shape


@dataclass(frozen=True, slots=True)
class Leaf:
    """What one rank says of its part of a checkpoint: files, and tensors with those of their pieces that are in them."""

    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]


@dataclass(frozen=True, slots=True)
class LeafEntry:
    """What the index knows of a leaf. `files`: (name, bytes, shared) of its data files."""

    name: str
    nbytes: int
    crc32: str
    files: tuple[tuple[str, int, bool], ...]
    zones: tuple[Zone, ...]


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """A checkpoint without its places. `crc32` as in Manifest."""

    sequence: int
    created: str
    writer: str
    block_bytes: int
    tensors: Mapping[str, Kind]
    leaves: tuple[LeafEntry, ...]
    aliases: Mapping[str, str]
    meta: Mapping[str, Json]
    crc32: str = ""


def leaf_json(leaf: Leaf) -> Json:
    """Convert a leaf to JSON, the content of its file."""
    return {
        "files": [[f.name, f.nbytes, f.header_nbytes, f.header_crc32, int(f.shared)] for f in leaf.files],
        "tensors": {
            name: [
                t.dtype,
                list(t.shape),
                [[list(p.box.offset), list(p.box.shape), [_piece_json(x) for x in p.pieces]] for p in t.parts],
            ]
            for name, t in leaf.tensors.items()
        },
    }


def leaf_of(body: Json) -> Leaf:
    """Undo `leaf_json`, of what a rank of the same save made: nothing is checked."""
    files = tuple(
        FileRecord(name, nbytes, header, crc, shared == 1) for name, nbytes, header, crc, shared in body["files"]
    )
    tensors = {
        name: TensorRecord(
            dtype,
            tuple(shape),
            tuple(
                PartRecord(
                    Box(tuple(offset), tuple(sides)),
                    tuple(PieceRecord(x[2], x[3], x[1], tuple(x[4]), x[0]) for x in pieces),
                )
                for offset, sides, pieces in parts
            ),
        )
        for name, (dtype, shape, parts) in body["tensors"].items()
    }
    return Leaf(files, tensors)


def encode_leaf(leaf: Leaf) -> bytes:
    """Encode a leaf as the bytes of its file."""
    return dump(leaf_json(leaf)).encode()


def _piece_json(piece: PieceRecord) -> Json:
    if not piece.blocks:
        return [piece.start, piece.numel, piece.file, piece.at, list(piece.crc32)]
    blocks = [[b.file, b.at, b.nbytes, c, b.codec, b.digest] for b, c in zip(piece.blocks, piece.crc32, strict=True)]
    return [piece.start, piece.numel, blocks]


def entry_of(leaf: Leaf, name: str, data: bytes) -> LeafEntry:
    """Build the index entry of a leaf whose file is `name` and contains `data`."""
    pieces = (
        (tensor, record.shape, bounds_of(record.shape, part.box, piece.start, piece.start + piece.numel))
        for tensor, record in leaf.tensors.items()
        for part in record.parts
        for piece in part.pieces
    )
    files = tuple((f.name, f.nbytes, f.shared) for f in leaf.files)
    return LeafEntry(name, len(data), f"{crc32(data):08x}", files, zones_of(pieces))


def entry_json(entry: LeafEntry) -> Json:
    """Convert an index entry to the JSON that a rank sends to the rank that writes the index."""
    zones = [[z.first, z.last, z.shape, z.bounds] for z in entry.zones]
    return [entry.name, entry.nbytes, entry.crc32, entry.files, zones]


def entry_from(body: Json) -> LeafEntry:
    """Undo `entry_json`."""
    name, nbytes, crc, files, zones = body
    decoded_zones = tuple(
        Zone(first, last, shape, tuple((low, high) for low, high in bounds)) for first, last, shape, bounds in zones
    )
    return LeafEntry(name, nbytes, crc, tuple((n, size, bool(shared)) for n, size, shared in files), decoded_zones)


def encode_index(index: CheckpointIndex) -> bytes:
    """Encode an index as the bytes of `manifest.json`, version 2.

    Raises:
        CheckpointError: "ckpt-manifest-size".
    """
    order = {name: i for i, name in enumerate(sorted(index.tensors))}
    rest = {
        "sequence": index.sequence,
        "created": index.created,
        "writer": index.writer,
        "block_bytes": index.block_bytes,
        "tensors": {name: [index.tensors[name][0], list(index.tensors[name][1])] for name in order},
        "leaves": [
            [
                leaf.name,
                leaf.nbytes,
                leaf.crc32,
                [[name, nbytes, int(shared)] for name, nbytes, shared in leaf.files],
                [[order[z.first], order[z.last], z.shape, *(n for pair in z.bounds for n in pair)] for z in leaf.zones],
            ]
            for leaf in index.leaves
        ],
        "aliases": dict(index.aliases),
        "meta": dict(index.meta),
    }
    return seal(2, rest)


def decode_index(data: bytes, where: str = MANIFEST) -> CheckpointIndex:
    """Read and check an index.

    Raises:
        CheckpointError: as `format.decode`.
    """
    body, crc = unseal(data, where, 2)
    r = Reader(where)
    names = ("format", "version", "crc32", "sequence", "created", "writer", "block_bytes", "tensors", "leaves")
    f = dict(zip((*names, "aliases", "meta"), r.fields(body, "index", (*names, "aliases", "meta")), strict=True))
    tensors: dict[str, Kind] = {}
    for name, item in r.mapping(f["tensors"], "tensors").items():
        if not valid_name(name):
            raise invalid(where, f"a tensor is named {name[:80]!r}")
        path = f"tensors[{name[:200]!r}]"
        dtype, shape = _row(r, item, path, 2)
        tensors[name] = decode_tensor_kind(r, dtype, shape, path)
    order = sorted(tensors)
    rows = r.items(f["leaves"], "leaves", _MAX_LEAVES)
    leaves = tuple(_entry(r, item, f"leaves[{i}]", order) for i, item in enumerate(rows))
    if len({leaf.name for leaf in leaves}) != len(leaves):
        raise invalid(where, "two leaves have the same name")
    aliases = r.mapping(f["aliases"], "aliases")
    for name, target in aliases.items():
        if not valid_name(name) or name in tensors or type(target) is not str or target not in tensors:
            raise invalid(where, f"the alias {name[:80]!r} must be a new name for a stored tensor")
    return CheckpointIndex(
        sequence=r.integer(f["sequence"], "sequence", 0, MAX_SEQUENCE),
        created=r.text(f["created"], "created", LINE),
        writer=r.text(f["writer"], "writer", LINE),
        block_bytes=r.integer(f["block_bytes"], "block_bytes", 1, 2**40),
        tensors=tensors,
        leaves=leaves,
        aliases=aliases,
        meta=r.mapping(f["meta"], "meta"),
        crc32=crc,
    )


def _row(r: Reader, value: Json, path: str, length: int) -> list[Json]:
    if type(value) is not list or len(value) != length:
        raise invalid(r.where, f"{path} must be a list of {length} values")
    return value


def _flag(r: Reader, value: Json, path: str) -> bool:
    return r.integer(value, path, 0, 1) == 1


def _entry(r: Reader, value: Json, path: str, order: Sequence[str]) -> LeafEntry:
    name, nbytes, crc, files, zones = _row(r, value, path, 5)
    return LeafEntry(
        _own_name(r, name, f"{path}.name"),
        r.integer(nbytes, f"{path}.nbytes", 0, 2**30),
        r.text(crc, f"{path}.crc32", CRC),
        tuple(_file_entry(r, item, f"{path}.files") for item in r.items(files, f"{path}.files", _MAX_LEAVES)),
        tuple(_zone(r, item, f"{path}.zones", order) for item in r.items(zones, f"{path}.zones", 4 * MAX_DIMS)),
    )


def _file_entry(r: Reader, value: Json, path: str) -> tuple[str, int, bool]:
    name, nbytes, shared = _row(r, value, path, 3)
    return _own_name(r, name, path), r.integer(nbytes, path), _flag(r, shared, path)


def _own_name(r: Reader, value: Json, path: str) -> str:
    name = r.text(value, path, FILE_NAME)
    if name == MANIFEST:
        raise invalid(r.where, f"{path} is the manifest itself")
    return name


def _zone(r: Reader, value: Json, path: str, order: Sequence[str]) -> Zone:
    row = r.items(value, path, 3 + 2 * MAX_DIMS)
    if len(row) < 3 or not len(row) % 2:
        raise invalid(r.where, f"{path} needs two tensors, a shape and two numbers per dim")
    first, last = (r.integer(n, path, 0, len(order) - 1) for n in row[:2])
    sides = [r.integer(n, path, 0, SCALE) for n in row[3:]]
    bounds: Bounds = tuple(zip(sides[::2], sides[1::2], strict=True))
    return Zone(order[first], order[last], r.integer(row[2], path, 0, 2**16), bounds)


def decode_leaf(data: bytes, entry: LeafEntry, index: CheckpointIndex, where: str) -> Leaf:
    """Read and check a leaf: bytes as the index says, pieces inside their files and tensors, every byte of own files accounted for.

    Raises:
        CheckpointError: "ckpt-manifest-damaged", "ckpt-manifest-invalid".
    """
    if len(data) != entry.nbytes or f"{crc32(data):08x}" != entry.crc32:
        raise damaged(where, f"it does not have the {entry.nbytes} bytes and the checksum {entry.crc32} of the index")
    r = Reader(where)
    files_json, tensors_json = r.fields(parse(data, where), "leaf", ("files", "tensors"))
    rows = r.items(files_json, "files", _MAX_LEAVES)
    files = tuple(_file(r, item, f"files[{i}]") for i, item in enumerate(rows))
    if [(f.name, f.nbytes, f.shared) for f in files] != list(entry.files):
        raise invalid(where, "its files are not those of the index")
    used: list[list[tuple[int, int]]] = [[] for _ in files]
    tensors = {}
    for name, item in r.mapping(tensors_json, "tensors").items():
        path = f"tensors[{name[:200]!r}]"
        dtype, shape, parts = _row(r, item, path, 3)
        kind = decode_tensor_kind(r, dtype, shape, path)
        if index.tensors.get(name) != kind:
            raise invalid(where, f"{path} is not as the index has it")
        decoded = []
        for i, part in enumerate(r.items(parts, path, _MAX_ITEMS)):
            offset, sides, pieces = _row(r, part, f"{path}.parts[{i}]", 3)
            box = decode_box(r, offset, sides, f"{path}.parts[{i}]")
            check_inside(where, box, kind[1], f"{path}.parts[{i}]")
            sizes = (ITEMSIZE[kind[0]], index.block_bytes, box.numel)
            rows = r.items(pieces, path, _MAX_ITEMS)
            decoded.append(PartRecord(box, tuple(_piece(r, x, f"{path}.parts[{i}]", sizes, used) for x in rows)))
        tensors[name] = TensorRecord(*kind, tuple(decoded))
    for record, spans in zip(files, used, strict=True):
        _check_file(where, record, spans)
    return Leaf(files, tensors)


def _file(r: Reader, value: Json, path: str) -> FileRecord:
    name, nbytes, header, crc, shared = _row(r, value, path, 5)
    return FileRecord(
        _own_name(r, name, path),
        r.integer(nbytes, path),
        r.integer(header, path),
        r.text(crc, path, CRC),
        _flag(r, shared, path),
    )


def _piece(
    r: Reader, value: Json, path: str, sizes: tuple[int, int, int], used: list[list[tuple[int, int]]]
) -> PieceRecord:
    itemsize, block_bytes, total = sizes
    row = r.items(value, path, 5)
    if len(row) not in (3, 5):
        raise invalid(r.where, f"{path} has a piece of {len(row)} values")
    start, numel = r.integer(row[0], path), r.integer(row[1], path, 1, MAX_NUMEL)
    if start + numel > total:
        raise invalid(r.where, f"{path} has {total} elements, a piece is at {start}..{start + numel}")
    nbytes = numel * itemsize
    count = -(-nbytes // block_bytes)
    blocks: list[BlockLocation] = []
    if len(row) == 5:
        sums = [r.text(c, path, CRC) for c in r.items(row[4], path, _MAX_ITEMS)]
        file, at = r.integer(row[2], path, 0, len(used) - 1), r.integer(row[3], path)
        used[file].append((at, at + nbytes))
    else:
        file, at, sums = 0, 0, []
        for item in r.items(row[2], path, _MAX_ITEMS):
            number, first, stored, crc, codec, digest = _row(r, item, path, 6)
            if codec not in CODECS:
                raise invalid(r.where, f"{path}: the codec {str(codec)[:80]!r} is not one of {', '.join(CODECS)}")
            block = BlockLocation(
                r.integer(number, path, 0, len(used) - 1),
                r.integer(first, path),
                r.integer(stored, path, 1, 2 * block_bytes + 4096),
                codec,
                r.text(digest, path, _DIGEST),
            )
            size = min(block_bytes, nbytes - len(sums) * block_bytes)
            if not codec and block.nbytes != size:
                raise invalid(r.where, f"{path}: a block of {size} bytes is stored as {block.nbytes}")
            blocks.append(block)
            sums.append(r.text(crc, path, CRC))
            used[block.file].append((block.at, block.at + block.nbytes))
    if len(sums) != count:
        raise invalid(r.where, f"{path} has {nbytes} bytes and {len(sums)} blocks of {block_bytes}")
    return PieceRecord(file, at, numel, tuple(sums), start, tuple(blocks))


def _check_file(where: str, record: FileRecord, spans: list[tuple[int, int]]) -> None:
    if record.shared:
        if any(stop > record.nbytes for _, stop in spans):
            raise invalid(where, f"a block is outside {record.name}, which has {record.nbytes} bytes")
        return
    at = record.header_nbytes
    for start, stop in sorted(spans):
        if start != at:
            what = "overlap" if start < at else "leave a hole"
            raise invalid(where, f"pieces of {record.name} {what} at byte {start}")
        at = stop
    if at != record.nbytes:
        raise invalid(where, f"{record.name} has {record.nbytes} bytes, its header and pieces {at}")
