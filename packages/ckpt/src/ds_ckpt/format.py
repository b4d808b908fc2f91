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
from dataclasses import dataclass, field
from typing import Final

from ds_ckpt.crc import crc32
from ds_ckpt.dtypes import CODE, ITEMSIZE
from ds_ckpt.jsontext import Json, dump, parse
from ds_comm.placement import Box
from ds_config.errors import CheckpointError

__all__ = [
    "BLOCK_BYTES",
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "FileRecord",
    "Manifest",
    "PartRecord",
    "PieceRecord",
    "TensorRecord",
    "decode",
    "disjoint",
    "encode",
    "entry_key",
    "peek_sequence",
    "valid_name",
]

MANIFEST: Final = "manifest.json"
VERSION: Final = 1
BLOCK_BYTES: Final = 16 * 2**20
MAX_MANIFEST_BYTES: Final = 2**30
_MAX_DIMS, _MAX_NAME, _MAX_NUMEL = 64, 4096, 2**60
_MAX_TANGLED = 2048  # boxes that no axis separates: compared pair by pair, so bounded
_HEAD = re.compile(rb'\{"format":"ds-ckpt","version":(\d{1,9}),"crc32":"([0-9a-f]{8})",\n')
_SEQUENCE = re.compile(rb'"sequence":(\d{1,18}),')
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_CRC = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One safetensors file. `header_nbytes` counts the 8 length bytes and the padded header; entries start there."""

    name: str
    nbytes: int
    header_nbytes: int
    header_crc32: str


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """`numel` elements at byte `at` of file number `file`, with one checksum per block."""

    file: int
    at: int
    numel: int
    crc32: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A box of a tensor and the pieces of its flattened elements, in order."""

    box: Box
    pieces: tuple[PieceRecord, ...]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A logical tensor. One without elements has no part."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[PartRecord, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a reader needs to find every element. `meta` is the caller's JSON, as `jsontext.to_json` left it.

    `crc32` is the checksum of the text that `decode` read (empty before): the identity of what is on disk.
    """

    sequence: int
    created: str
    writer: str
    block_bytes: int
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    aliases: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Json] = field(default_factory=dict)
    crc32: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all logical tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def valid_name(name: str) -> bool:
    """Whether a logical tensor may have this name: `#` separates names from piece numbers in data files."""
    return 0 < len(name) <= _MAX_NAME and name.isprintable() and "#" not in name and name != "__metadata__"


def entry_key(name: str, record: TensorRecord, part: int, piece: int) -> str:
    """The safetensors key of a piece: the tensor's own name when the piece is all of it, else numbered."""
    return name if len(record.parts) == 1 and len(record.parts[0].pieces) == 1 else f"{name}#{part}.{piece}"


def encode(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
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
    body = dump(rest)[1:].encode() + b"\n"
    return f'{{"format":"ds-ckpt","version":{VERSION},"crc32":"{crc32(body):08x}",\n'.encode() + body


def peek_sequence(head: bytes) -> int:
    """The sequence number from the first bytes (200 are plenty) of a manifest; -1 when they are not one's."""
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
    if len(data) > MAX_MANIFEST_BYTES:
        raise _invalid(where, f"{len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
    head = _HEAD.match(data)
    if head is None:
        raise _damaged(where, "it does not start with the line of a ds-ckpt manifest")
    if int(head.group(1)) != VERSION:
        raise CheckpointError(
            f"{where} has format version {int(head.group(1))}; this program reads version {VERSION}",
            code="ckpt-version",
            fix="Update ds-ckpt, or convert the checkpoint with the program that wrote it.",
        )
    found = f"{crc32(memoryview(data)[head.end() :]):08x}"
    if found != head.group(2).decode():
        raise _damaged(where, f"its checksum says {head.group(2).decode()}, its content {found}")
    manifest = _manifest(_Reader(where), parse(data, where))
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


class _Reader:
    """Typed access to parsed JSON; every failure names the file and the place."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fields(self, value: Json, path: str, names: tuple[str, ...]) -> list[Json]:
        if type(value) is not dict or set(value) != set(names):
            found = sorted(value)[:12] if type(value) is dict else type(value).__name__
            raise _invalid(
                self.where, f"{path} must have exactly the fields {', '.join(names)}; found {str(found)[:200]}"
            )
        return [value[name] for name in names]

    def integer(self, value: Json, path: str, low: int = 0, high: int = _MAX_NUMEL) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _invalid(self.where, f"{path} must be an integer in {low}..{high}, found {str(value)[:80]}")
        return value

    def text(self, value: Json, path: str, pattern: re.Pattern[str]) -> str:
        if type(value) is not str or not pattern.fullmatch(value):
            raise _invalid(self.where, f"{path} must match {pattern.pattern}, found {str(value)[:80]!r}")
        return value

    def items(self, value: Json, path: str, limit: int) -> list[Json]:
        if type(value) is not list or len(value) > limit:
            raise _invalid(self.where, f"{path} must be a list of at most {limit} items")
        return value

    def mapping(self, value: Json, path: str) -> dict[str, Json]:
        if type(value) is not dict:
            raise _invalid(self.where, f"{path} must be an object, found {type(value).__name__}")
        return value

    def shape(self, value: Json, path: str) -> tuple[int, ...]:
        return tuple(self.integer(n, path) for n in self.items(value, path, _MAX_DIMS))


_LINE = re.compile(r"[^\x00-\x1f]{0,200}")


def _manifest(r: _Reader, value: Json) -> Manifest:
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
    files = tuple(_file(r, item, f"files[{i}]") for i, item in enumerate(r.items(f["files"], "files", 10**6)))
    tensors = {}
    for name, item in r.mapping(f["tensors"], "tensors").items():
        if not valid_name(name):
            raise _invalid(r.where, f"a tensor is named {name[:80]!r}")
        tensors[name] = _tensor(r, item, f"tensors[{name[:200]!r}]", block_bytes)
    aliases = r.mapping(f["aliases"], "aliases")
    for name, target in aliases.items():
        if not valid_name(name) or name in tensors or type(target) is not str or target not in tensors:
            raise _invalid(
                r.where, f"the alias {name[:80]!r} must be a new name for a stored tensor, found {str(target)[:80]!r}"
            )
    return Manifest(
        sequence=r.integer(f["sequence"], "sequence", 0, 10**18 - 1),
        created=r.text(f["created"], "created", _LINE),
        writer=r.text(f["writer"], "writer", _LINE),
        block_bytes=block_bytes,
        files=files,
        tensors=tensors,
        aliases=aliases,
        meta=r.mapping(f["meta"], "meta"),
        crc32=f["crc32"],
    )


def _file(r: _Reader, value: Json, path: str) -> FileRecord:
    name, nbytes, header, crc = r.fields(value, path, ("name", "nbytes", "header_nbytes", "header_crc32"))
    record = FileRecord(
        r.text(name, f"{path}.name", _FILE_NAME),
        r.integer(nbytes, f"{path}.nbytes"),
        r.integer(header, f"{path}.header_nbytes", 8),
        r.text(crc, f"{path}.header_crc32", _CRC),
    )
    if record.name == MANIFEST:
        raise _invalid(r.where, f"{path}.name is the manifest itself")
    return record


def _tensor(r: _Reader, value: Json, path: str, block_bytes: int) -> TensorRecord:
    dtype, shape_json, parts_json = r.fields(value, path, ("dtype", "shape", "parts"))
    if type(dtype) is not str or dtype not in CODE:
        raise _invalid(r.where, f"{path}.dtype {str(dtype)[:80]!r} is not one of {', '.join(CODE)}")
    shape = r.shape(shape_json, f"{path}.shape")
    numel = math.prod(shape)
    if numel > _MAX_NUMEL:
        raise _invalid(r.where, f"{path}.shape has {numel:.3e} elements")
    parts = tuple(
        _part(r, item, f"{path}.parts[{i}]", (ITEMSIZE[dtype], block_bytes))
        for i, item in enumerate(r.items(parts_json, f"{path}.parts", 10**7))
    )
    for i, part in enumerate(parts):
        fits = len(part.box.shape) == len(shape) and all(
            o + s <= n for o, s, n in zip(part.box.offset, part.box.shape, shape, strict=True)
        )
        if not fits:
            raise _invalid(r.where, f"{path}.parts[{i}] {part.box} is not inside shape {list(shape)}")
    covered = sum(part.box.numel for part in parts)
    if covered != numel:
        raise _invalid(r.where, f"{path} has {numel} elements, its parts {covered}")
    try:
        apart = disjoint([part.box for part in parts])
    except ValueError as error:
        raise _invalid(r.where, f"{path} has {error}") from error
    if not apart:
        raise _invalid(r.where, f"{path} has parts that overlap")
    return TensorRecord(dtype, shape, parts)


def _part(r: _Reader, value: Json, path: str, sizes: tuple[int, int]) -> PartRecord:
    offset, shape, pieces_json = r.fields(value, path, ("offset", "shape", "pieces"))
    lows, sides = r.shape(offset, f"{path}.offset"), r.shape(shape, f"{path}.shape")
    if len(lows) != len(sides) or 0 in sides:
        raise _invalid(r.where, f"{path} needs one offset and one size of at least 1 per dim")
    box = Box(lows, sides)
    pieces = tuple(
        _piece(r, item, f"{path}.pieces[{i}]", sizes)
        for i, item in enumerate(r.items(pieces_json, f"{path}.pieces", 10**7))
    )
    if sum(piece.numel for piece in pieces) != box.numel:
        raise _invalid(r.where, f"{path} has {box.numel} elements, its pieces {sum(p.numel for p in pieces)}")
    return PartRecord(box, pieces)


def _piece(r: _Reader, value: Json, path: str, sizes: tuple[int, int]) -> PieceRecord:
    file, at, numel_json, crc = r.fields(value, path, ("file", "at", "numel", "crc32"))
    itemsize, block_bytes = sizes
    numel = r.integer(numel_json, f"{path}.numel", 1)
    sums = tuple(r.text(c, f"{path}.crc32", _CRC) for c in r.items(crc, f"{path}.crc32", 10**7))
    if len(sums) != -(-numel * itemsize // block_bytes):
        raise _invalid(
            r.where, f"{path} has {numel * itemsize} bytes and {len(sums)} checksums, one per {block_bytes} bytes"
        )
    return PieceRecord(r.integer(file, f"{path}.file", 0, 10**6), r.integer(at, f"{path}.at", 8), numel, sums)


def _check_files(manifest: Manifest, where: str) -> None:
    if len({f.name for f in manifest.files}) != len(manifest.files):
        raise _invalid(where, "two files have the same name")
    spans: list[list[tuple[int, int]]] = [[] for _ in manifest.files]
    for name, tensor in manifest.tensors.items():
        for part in tensor.parts:
            for piece in part.pieces:
                if piece.file >= len(spans):
                    raise _invalid(where, f"{name[:80]!r} is in file {piece.file} of {len(spans)}")
                spans[piece.file].append((piece.at, piece.at + piece.numel * ITEMSIZE[tensor.dtype]))
    for record, span in zip(manifest.files, spans, strict=True):
        at = record.header_nbytes
        for start, stop in sorted(span):
            if start != at:
                what = "overlap" if start < at else "leave a hole"
                raise _invalid(where, f"pieces of {record.name} {what} at byte {start}")
            at = stop
        if at != record.nbytes:
            raise _invalid(where, f"{record.name} has {record.nbytes} bytes, its header and pieces {at}")


def _invalid(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is not consistent: {what}",
        code="ckpt-manifest-invalid",
        fix="The file is damaged or was not written by this program; use another checkpoint.",
    )


def _damaged(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is damaged: {what}",
        code="ckpt-manifest-damaged",
        fix="Use another checkpoint; `ds_ckpt.find_latest(dir)` skips this one.",
    )
