"""Manifest, version 1: what a checkpoint directory says about itself. Pure data; no tensor, no file.

Words. A *checkpoint* is a directory: `manifest.json` and safetensors files. A *tensor* is logical: name, global shape,
dtype. A *part* is a box of it (all of it, unless tensor or expert parallelism cut it); the parts of a tensor are disjoint
and cover it. A *piece* is the next run of elements of a part's flattened box; the pieces of a part lie end to end, so
there can be neither hole nor overlap inside a part. A piece is one entry of one safetensors file. A *block* is up to
`block_bytes` of a piece and has one CRC-32.

The manifest's first line is `{"format":"ds-ckpt","version":1,"crc32":"xxxxxxxx",`, the checksum being that of every byte
after this line; the second line starts with the sequence number. Together they are one JSON object.
The page docs/reference/checkpoint-format.md says the same for other programs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

from ds_ckpt.crc import crc32
from ds_ckpt.dtypes import CODE, ITEMSIZE
from ds_ckpt.json_reader import CRC, FILE_NAME, LINE, MAX_DIMS, MAX_NUMEL, Reader, damaged, invalid
from ds_ckpt.jsontext import Json, dump, parse
from ds_ckpt.records import FileRecord, Manifest, PartRecord, PieceRecord, TensorRecord
from ds_comm.placement import Box
from ds_config.errors import CheckpointError

__all__ = [
    "BLOCK_BYTES",
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "MAX_SEQUENCE",
    "check_cover",
    "check_inside",
    "decode",
    "decode_box",
    "decode_tensor_kind",
    "disjoint",
    "encode",
    "entry_key",
    "peek_sequence",
    "seal",
    "unseal",
    "valid_name",
    "version_of",
]

MANIFEST: Final = "manifest.json"
BLOCK_BYTES: Final = 16 * 2**20
MAX_MANIFEST_BYTES: Final = 2**30
MAX_SEQUENCE: Final = 10**18 - 1
_MAX_NAME, _MAX_FILES, _MAX_ITEMS = 4096, 10**6, 10**7
_MAX_TANGLED = 2048  # boxes that no axis separates: compared pair by pair, so bounded
_HEAD = re.compile(rb'\{"format":"ds-ckpt","version":(\d{1,9}),"crc32":"([0-9a-f]{8})",\n')
_SEQUENCE = re.compile(rb'"sequence":(\d{1,18}),')


def valid_name(name: str) -> bool:
    """Whether a logical tensor may have this name: `#` separates names from piece numbers in data files."""
    return 0 < len(name) <= _MAX_NAME and name.isprintable() and "#" not in name and name != "__metadata__"


def entry_key(name: str, record: TensorRecord, part: int, piece: int) -> str:
    """Return the safetensors key of a piece: the tensor's name when the piece is the whole tensor, else numbered."""
    return name if len(record.parts) == 1 and len(record.parts[0].pieces) == 1 else f"{name}#{part}.{piece}"


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest as the bytes of `manifest.json`, version 1.

    Raises:
        CheckpointError: "ckpt-manifest-size": `decode` would refuse the manifest.
    """
    _check_readable(manifest)
    rest = {
        "sequence": manifest.sequence,
        "created": manifest.created,
        "writer": manifest.writer,
        "block_bytes": manifest.block_bytes,
        "files": [
            {"name": f.name, "nbytes": f.nbytes, "header_nbytes": f.header_nbytes, "header_crc32": f.header_crc32}
            for f in manifest.files
        ],
        "tensors": {name: _tensor_json(record) for name, record in manifest.tensors.items()},
        "aliases": dict(manifest.aliases),
        "meta": dict(manifest.meta),
    }
    return seal(1, rest)


def seal(version: int, rest: Mapping[str, Json]) -> bytes:
    """Build the bytes of a manifest of `version`: the line with the checksum, and the rest.

    `rest` starts with the sequence number.

    Raises:
        CheckpointError: "ckpt-manifest-size": larger than any reader takes.
    """
    if int(rest["sequence"]) > MAX_SEQUENCE:
        raise _too_large(f"the sequence number {rest['sequence']}, and readers take {MAX_SEQUENCE}")
    body = dump(rest)[1:].encode() + b"\n"
    data = f'{{"format":"ds-ckpt","version":{version},"crc32":"{crc32(body):08x}",\n'.encode() + body
    if len(data) > MAX_MANIFEST_BYTES:
        raise _too_large(f"a manifest of {len(data)} bytes, and readers take {MAX_MANIFEST_BYTES}")
    return data


def version_of(data: bytes, where: str) -> int:
    """Return the format version of a manifest.

    Raises CheckpointError: "ckpt-manifest-damaged", "ckpt-version".
    """
    head = _HEAD.match(data)
    if head is None:
        raise damaged(where, "it does not start with the line of a ds-ckpt manifest")
    version = int(head.group(1))
    if version not in (1, 2):
        raise CheckpointError(
            f"{where} has format version {version}; this program reads versions 1 and 2",
            code="ckpt-version",
            fix="Update ds-ckpt, or convert the checkpoint with the program that wrote it.",
        )
    return version


def unseal(data: bytes, where: str, version: int) -> tuple[Json, str]:
    """Parse a manifest of `version` and verify its checksum; return its object and the checksum.

    Raises CheckpointError as `decode` says.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise invalid(where, f"{len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
    if version_of(data, where) != version:
        raise CheckpointError(
            f"{where} is of version {version_of(data, where)}, not {version}",
            code="ckpt-version",
            fix="Read it with ds_ckpt.inspect, which takes both.",
        )
    head = _HEAD.match(data)
    stated = head.group(2).decode() if head else ""
    checksum = f"{crc32(memoryview(data)[head.end() if head else 0 :]):08x}"
    if checksum != stated:
        raise damaged(where, f"its checksum says {stated}, its content {checksum}")
    return parse(data, where), checksum


def _check_readable(manifest: Manifest) -> None:
    """Refuse to write a manifest that exceeds the limits of `decode`."""
    if len(manifest.files) > _MAX_FILES:
        raise _too_large(f"{len(manifest.files)} files, and readers take {_MAX_FILES}")
    for name, tensor in manifest.tensors.items():
        if len(tensor.shape) > MAX_DIMS or math.prod(tensor.shape) > MAX_NUMEL:
            raise _too_large(f"{name[:80]!r} of shape {list(tensor.shape)[:8]}, {len(tensor.shape)} dims")
        if len(tensor.parts) > _MAX_ITEMS or any(len(part.pieces) > _MAX_ITEMS for part in tensor.parts):
            raise _too_large(f"{name[:80]!r} in more than {_MAX_ITEMS} pieces")


def _too_large(what: str) -> CheckpointError:
    return CheckpointError(
        f"nobody could read this checkpoint back: {what}",
        code="ckpt-manifest-size",
        fix="Save with a group of more ranks, or with fewer or smaller tensors and meta.",
    )


def peek_sequence(head: bytes) -> int:
    """Read the sequence number from the first bytes (200 are plenty) of a manifest; -1 for other bytes."""
    match = _HEAD.match(head)
    number = match and _SEQUENCE.match(head, match.end())
    return int(number.group(1)) if number else -1


def decode(data: bytes, where: str = MANIFEST) -> Manifest:
    """Read and check a manifest. What this returns can be trusted to be consistent with itself.

    Checked: version, checksum, types and bounds of every value, file names that stay in the directory, pieces inside
    their files, no two pieces sharing bytes, every byte of every file accounted for, parts that cover their tensor
    exactly, aliases that name a stored tensor.

    Raises:
        CheckpointError: "ckpt-version" (written by a newer program), "ckpt-manifest-damaged" (checksum),
            "ckpt-manifest-invalid" (well formed but not consistent), naming `where` and the place inside.
    """
    body, _ = unseal(data, where, 1)
    manifest = _manifest(Reader(where), body)
    _check_files(manifest, where)
    return manifest


def disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no two of these non-empty boxes share an element.

    Cost: n log n for boxes that an axis separates again and again, as every mesh does; a set that cannot be separated
    is compared pair by pair.

    Raises:
        ValueError: more than 2,048 boxes that no axis separates.
    """
    stack = [list(boxes)]
    while stack:
        group = stack.pop()
        if len(group) < 2:
            continue
        for dim in range(len(group[0].shape)):
            runs = _separated(group, dim)
            if len(runs) > 1:
                stack.extend(runs)
                break
        else:
            if len(group) > _MAX_TANGLED:
                raise ValueError(f"{len(group)} boxes that no axis separates")
            if any((a & b) is not None for i, a in enumerate(group) for b in group[:i]):
                return False
            if not group[0].shape:  # two boxes of a scalar are the same element
                return False
    return True


def _separated(boxes: list[Box], dim: int) -> list[list[Box]]:
    ordered = sorted(boxes, key=lambda b: b.offset[dim])
    out: list[list[Box]] = []
    stop = -1
    for box in ordered:
        if not out or box.offset[dim] >= stop:
            out.append([])
        out[-1].append(box)
        stop = max(stop, box.offset[dim] + box.shape[dim])
    return out


def _tensor_json(record: TensorRecord) -> Json:
    return {
        "dtype": record.dtype,
        "shape": list(record.shape),
        "parts": [
            {
                "offset": list(part.box.offset),
                "shape": list(part.box.shape),
                "pieces": [{"file": p.file, "at": p.at, "numel": p.numel, "crc32": list(p.crc32)} for p in part.pieces],
            }
            for part in record.parts
        ],
    }


def _manifest(r: Reader, value: Json) -> Manifest:
    names = (
        "format",
        "version",
        "crc32",
        "sequence",
        "created",
        "writer",
        "block_bytes",
        "files",
        "tensors",
        "aliases",
        "meta",
    )
    f = dict(zip(names, r.fields(value, "manifest", names), strict=True))
    block_bytes = r.integer(f["block_bytes"], "block_bytes", 1, 2**40)
    files = tuple(_file(r, item, f"files[{i}]") for i, item in enumerate(r.items(f["files"], "files", _MAX_FILES)))
    tensors = {}
    for name, item in r.mapping(f["tensors"], "tensors").items():
        if not valid_name(name):
            raise invalid(r.where, f"a tensor is named {name[:80]!r}")
        tensors[name] = _tensor(r, item, f"tensors[{name[:200]!r}]", block_bytes)
    aliases = r.mapping(f["aliases"], "aliases")
    for name, target in aliases.items():
        if not valid_name(name) or name in tensors or type(target) is not str or target not in tensors:
            raise invalid(
                r.where, f"the alias {name[:80]!r} must be a new name for a stored tensor, found {str(target)[:80]!r}"
            )
    return Manifest(
        sequence=r.integer(f["sequence"], "sequence", 0, MAX_SEQUENCE),
        created=r.text(f["created"], "created", LINE),
        writer=r.text(f["writer"], "writer", LINE),
        block_bytes=block_bytes,
        files=files,
        tensors=tensors,
        aliases=aliases,
        meta=r.mapping(f["meta"], "meta"),
        crc32=f["crc32"],
    )


def _file(r: Reader, value: Json, path: str) -> FileRecord:
    name, nbytes, header, crc = r.fields(value, path, ("name", "nbytes", "header_nbytes", "header_crc32"))
    record = FileRecord(
        r.text(name, f"{path}.name", FILE_NAME),
        r.integer(nbytes, f"{path}.nbytes"),
        r.integer(header, f"{path}.header_nbytes", 8),
        r.text(crc, f"{path}.header_crc32", CRC),
    )
    if record.name == MANIFEST:
        raise invalid(r.where, f"{path}.name is the manifest itself")
    return record


def decode_tensor_kind(r: Reader, dtype: Json, shape_json: Json, path: str) -> tuple[str, tuple[int, ...]]:
    """Decode and check a dtype and a shape that a tensor can have."""
    if type(dtype) is not str or dtype not in CODE:
        raise invalid(r.where, f"{path}.dtype {str(dtype)[:80]!r} is not one of {', '.join(CODE)}")
    shape = r.shape(shape_json, f"{path}.shape")
    if math.prod(shape) > MAX_NUMEL:
        raise invalid(r.where, f"{path}.shape has {math.prod(shape):.3e} elements")
    return dtype, shape


def decode_box(r: Reader, offset: Json, shape: Json, path: str) -> Box:
    """Decode a box from its offset and shape; refuse an empty box."""
    lows, sides = r.shape(offset, f"{path}.offset"), r.shape(shape, f"{path}.shape")
    if len(lows) != len(sides) or 0 in sides:
        raise invalid(r.where, f"{path} needs one offset and one size of at least 1 per dim")
    return Box(lows, sides)


def check_inside(where: str, box: Box, shape: tuple[int, ...], path: str) -> None:
    """Raises CheckpointError unless the box is inside a tensor of this shape."""
    fits = len(box.shape) == len(shape) and all(
        o + s <= n for o, s, n in zip(box.offset, box.shape, shape, strict=True)
    )
    if not fits:
        raise invalid(where, f"{path} {box} is not inside shape {list(shape)}")


def check_cover(where: str, path: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raises CheckpointError unless the boxes cover a tensor of this shape, each element once."""
    numel, covered = math.prod(shape), sum(box.numel for box in boxes)
    if covered != numel:
        raise invalid(where, f"{path} has {numel} elements, its parts {covered}")
    try:
        apart = disjoint(boxes)
    except ValueError as error:
        raise invalid(where, f"{path} has {error}") from error
    if not apart:
        raise invalid(where, f"{path} has parts that overlap")


def _tensor(r: Reader, value: Json, path: str, block_bytes: int) -> TensorRecord:
    dtype_json, shape_json, parts_json = r.fields(value, path, ("dtype", "shape", "parts"))
    dtype, shape = decode_tensor_kind(r, dtype_json, shape_json, path)
    parts = tuple(
        _part(r, item, f"{path}.parts[{i}]", (ITEMSIZE[dtype], block_bytes))
        for i, item in enumerate(r.items(parts_json, f"{path}.parts", _MAX_ITEMS))
    )
    for i, part in enumerate(parts):
        check_inside(r.where, part.box, shape, f"{path}.parts[{i}]")
    check_cover(r.where, path, shape, [part.box for part in parts])
    return TensorRecord(dtype, shape, parts)


def _part(r: Reader, value: Json, path: str, sizes: tuple[int, int]) -> PartRecord:
    offset, shape, pieces_json = r.fields(value, path, ("offset", "shape", "pieces"))
    box = decode_box(r, offset, shape, path)
    pieces, start = [], 0
    for i, item in enumerate(r.items(pieces_json, f"{path}.pieces", _MAX_ITEMS)):
        pieces.append(_piece(r, item, f"{path}.pieces[{i}]", sizes, start))
        start += pieces[-1].numel
    if start != box.numel:
        raise invalid(r.where, f"{path} has {box.numel} elements, its pieces {start}")
    return PartRecord(box, tuple(pieces))


def _piece(r: Reader, value: Json, path: str, sizes: tuple[int, int], start: int) -> PieceRecord:
    file, at, numel_json, crc = r.fields(value, path, ("file", "at", "numel", "crc32"))
    itemsize, block_bytes = sizes
    numel = r.integer(numel_json, f"{path}.numel", 1)
    sums = tuple(r.text(c, f"{path}.crc32", CRC) for c in r.items(crc, f"{path}.crc32", _MAX_ITEMS))
    if len(sums) != -(-numel * itemsize // block_bytes):
        raise invalid(
            r.where, f"{path} has {numel * itemsize} bytes and {len(sums)} checksums, one per {block_bytes} bytes"
        )
    return PieceRecord(
        r.integer(file, f"{path}.file", 0, _MAX_FILES), r.integer(at, f"{path}.at", 8), numel, sums, start
    )


def _check_files(manifest: Manifest, where: str) -> None:
    if len({f.name for f in manifest.files}) != len(manifest.files):
        raise invalid(where, "two files have the same name")
    spans: list[list[tuple[int, int]]] = [[] for _ in manifest.files]
    for name, tensor in manifest.tensors.items():
        for part in tensor.parts:
            for piece in part.pieces:
                if piece.file >= len(spans):
                    raise invalid(where, f"{name[:80]!r} is in file {piece.file} of {len(spans)}")
                spans[piece.file].append((piece.at, piece.at + piece.numel * ITEMSIZE[tensor.dtype]))
    for record, span in zip(manifest.files, spans, strict=True):
        at = record.header_nbytes
        for start, stop in sorted(span):
            if start != at:
                what = "overlap" if start < at else "leave a hole"
                raise invalid(where, f"pieces of {record.name} {what} at byte {start}")
            at = stop
        if at != record.nbytes:
            raise invalid(where, f"{record.name} has {record.nbytes} bytes, its header and pieces {at}")
