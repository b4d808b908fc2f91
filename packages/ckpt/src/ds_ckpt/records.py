"""What a checkpoint consists of, as data. See `format` for the words. No tensor, no file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_ckpt.dtypes import ITEMSIZE
from ds_ckpt.jsontext import Json
from ds_comm.placement import Box

__all__ = ["BlockLocation", "FileRecord", "Manifest", "PartRecord", "PieceRecord", "TensorRecord"]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One data file. `header_nbytes` counts the 8 length bytes and the padded safetensors header; entries start there.

    A `shared` file lies beside the checkpoints, has no header, and may hold blocks of several of them.
    """

    name: str
    nbytes: int
    header_nbytes: int
    header_crc32: str
    shared: bool = False


@dataclass(frozen=True, slots=True)
class BlockLocation:
    """Where one block is: `nbytes` at byte `at` of file number `file`, made by `codec` from the block's own bytes.

    `digest` names the block's own bytes (BLAKE2b of 16 bytes, hexadecimal), so that the next save need not write them again.
    """

    file: int
    at: int
    nbytes: int
    codec: str
    digest: str


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """`numel` elements from element `start` of a part on, with one checksum per block.

    They lie at byte `at` of file number `file`, or each block where `blocks` says.
    """

    file: int
    at: int
    numel: int
    crc32: tuple[str, ...]
    start: int = 0
    blocks: tuple[BlockLocation, ...] = ()


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A box of a tensor and the pieces of its flattened elements, in order.

    All of them, in what was read as a whole; else those that a reader asked for.
    """

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
    `num_leaves` says how many files of the checkpoint hold its places: none in version 1, which has them in the manifest.
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
    num_leaves: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all logical tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())
