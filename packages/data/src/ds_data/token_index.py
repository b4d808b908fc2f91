"""The index of a token file: where each item begins and how long it is. Pure; bytes in, arrays out, and back.

Words: an *item* is a run of values (a document, a sentence, a row of sample ids); a *document* is a run of items. Layout of `.idx`,
little endian, as Megatron-LM and DeepSpeed write it:

    9 bytes  "MMIDIDX" 0 0      8  version 1      1  format code (see `codes`)      8  items n      8  document bounds d
    int32 [n] sizes in values   int64 [n] first byte of each item   int64 [d] item at which each document begins, and n
    int8  [n] modes, only in multimodal files

The older layout ("TNTIDX" 0 0) has sizes by dimension and offsets in values; it is only read.
Everything is checked here once, in a few vector operations, so that no later read can leave the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_config.errors import ConfigError
from ds_data.codes import TABLES, DType, Table, choose, code_of

__all__ = ["MAGIC", "TokenIndex", "pack_index", "parse_index"]

MAGIC = b"MMIDIDX\x00\x00"
LEGACY = b"TNTIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_LEGACY_HEAD = struct.Struct("<8sQQQQQQ")

Raw = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """Where every item of a data file is.

    Attributes:
        dtype: Format of the values.
        sizes: int64 [n], values of each item.
        starts: int64 [n], place of each item's first value, counted in values.
        documents: int64 [d], items at which documents begin, and n at the end; d may be 0 or 1 where documents are not known.
        modes: int8 [n] of a multimodal file, or None.
    """

    dtype: DType
    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]
    documents: NDArray[np.int64]
    modes: NDArray[np.int8] | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def end(self) -> int:
        """Values up to the end of the last item."""
        return int((self.starts + self.sizes).max()) if len(self) else 0

    @property
    def bounds(self) -> NDArray[np.int64]:
        """int64 [documents + 1]: items at which documents begin, and n. Every item is one where the file does not say."""
        if len(self.documents) < 2:
            return np.arange(len(self) + 1, dtype=np.int64)
        return self.documents


def parse_index(raw: Raw, data_bytes: int, *, table: Table | None = None, name: str = "index") -> TokenIndex:
    """Read an index.

    Args:
        raw: uint8, the bytes of the file.
        data_bytes: Size of the data file; no item may reach beyond it.
        table: Which meaning format codes have; None finds out.
        name: Of the file, for messages.
    Raises:
        ConfigError: the file is no index, is cut short, or contradicts itself or the data file ("data-index"); its format code is
            unknown ("data-dtype").
    Cost: about 5 ns an item.
    """
    head = raw[:9].tobytes()
    if head == MAGIC:
        return _parse(raw, data_bytes, table, name)
    if head[:8] == LEGACY:
        return _parse_legacy(raw, data_bytes, name)
    raise _bad(name, f"it begins with {head!r}, not with {MAGIC!r}", "Give a .idx file of Megatron-LM or DeepSpeed.")


def pack_index(index: TokenIndex, table: Table) -> bytes:
    """Pack an index into the bytes of an index file.

    Raises:
        ConfigError: the table has no code for the dtype ("data-dtype"), or an item has more than 2**31 - 1 values
            ("data-range").
    """
    if len(index) and int(index.sizes.max()) > np.iinfo(np.int32).max:
        raise ConfigError(
            f"an item has {int(index.sizes.max())} values; an index holds at most {np.iinfo(np.int32).max}",
            code="data-range",
            fix="Cut it into several items of one document.",
        )
    head = _HEAD.pack(MAGIC, 1, code_of(index.dtype, table), len(index), len(index.documents))
    parts = [
        index.sizes.astype("<i4"),
        (index.starts * index.dtype.itemsize).astype("<i8"),
        index.documents.astype("<i8"),
    ]
    if index.modes is not None:
        parts.append(index.modes.astype("<i1"))
    return head + b"".join(part.tobytes() for part in parts)


def _parse(raw: Raw, data_bytes: int, table: Table | None, name: str) -> TokenIndex:
    if len(raw) < _HEAD.size:
        raise _short(name, _HEAD.size, len(raw))
    _, version, code, items, bounds = _HEAD.unpack(raw[: _HEAD.size].tobytes())
    if version != 1:
        raise _bad(name, f"it has version {version}, not 1")
    size = _HEAD.size + 12 * items + 8 * bounds
    if len(raw) not in (size, size + items):
        raise _short(name, size, len(raw), f"{items} items and {bounds} document bounds")
    sizes = _read(raw, _HEAD.size, items, "<i4").astype(np.int64)
    pointers = _read(raw, _HEAD.size + 4 * items, items, "<i8")
    documents = _read(raw, _HEAD.size + 12 * items, bounds, "<i8")
    modes = _read(raw, size, items, "<i1") if len(raw) > size else None
    dtype = choose(code, table, lambda one: _fits(one, sizes, pointers, data_bytes))
    if dtype is None:
        known = sorted({code for known in TABLES.values() for code in known})
        raise ConfigError(
            f"{name}: format code {code} is unknown (known: {known[0]} to {known[-1]})",
            code="data-dtype",
            fix="The index is damaged or of another program. Write the file again.",
        )
    return _checked(TokenIndex(dtype, sizes, pointers, documents, modes), data_bytes, name)


def _parse_legacy(raw: Raw, data_bytes: int, name: str) -> TokenIndex:
    if len(raw) < _LEGACY_HEAD.size - 8:
        raise _short(name, _LEGACY_HEAD.size, len(raw))
    padded = np.concatenate([raw[: _LEGACY_HEAD.size], np.zeros(8, np.uint8)])[: _LEGACY_HEAD.size]
    _, version, code, width, items, dims, bounds = _LEGACY_HEAD.unpack(padded.tobytes())
    if version != 1:
        raise _bad(name, f"it has version {version}, not 1")
    size = _LEGACY_HEAD.size + 16 * (items + 1) + 8 * dims + 8 * bounds
    if len(raw) != size:
        raise _short(name, size, len(raw), f"{items} items, {dims} dimensions and {bounds} document bounds")
    # The older writers had a third table: theirs is recognised by the width of a value that stands beside the code.
    names = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: {2: "<u2", 4: "<f4", 8: "<f8"}.get(width),
             7: {4: "<u4", 8: "<f8"}.get(width), 8: {2: "<u2", 8: "<u8"}.get(width)}  # fmt: skip
    if (dtype_name := names.get(code)) is None or np.dtype(dtype_name).itemsize != width:
        raise ConfigError(
            f"{name}: format code {code} with {width} bytes a value is unknown",
            code="data-dtype",
            fix="The index is damaged or of another program. Write the file again.",
        )
    at = _LEGACY_HEAD.size
    dim_offsets, offsets = _read(raw, at, items + 1, "<i8"), _read(raw, at + 8 * (items + 1), items + 1, "<i8")
    shape = _read(raw, at + 16 * (items + 1), dims, "<i8")
    documents = _read(raw, at + 16 * (items + 1) + 8 * dims, bounds, "<i8")
    if items and (dim_offsets[0] != 0 or dim_offsets[-1] != dims or bool((np.diff(dim_offsets) < 0).any())):
        raise _bad(name, "its table of dimensions does not count up from 0 to their number")
    if items and (bool((offsets < 0).any()) or bool((np.diff(offsets) < 0).any()) or bool((shape < 0).any())):
        raise _bad(name, "it has negative sizes, or offsets that do not count up")
    if items and int(offsets[-1]) > data_bytes // width:
        raise _bad(name, f"its items take {int(offsets[-1]) * width} bytes, the data file has {data_bytes}")
    sizes = np.diff(offsets)
    products = [int(np.prod(shape[a:b], dtype=object)) for a, b in pairwise(dim_offsets)]
    if products != sizes.tolist():
        raise _bad(name, "sizes and offsets contradict each other")
    return _checked(TokenIndex(np.dtype(dtype_name), sizes, offsets[:-1] * width, documents), data_bytes, name)


def _checked(index: TokenIndex, data_bytes: int, name: str) -> TokenIndex:
    """`index` with pointers in bytes, checked; pointers in values."""
    sizes, pointers, width, documents = index.sizes, index.starts, index.dtype.itemsize, index.documents
    if len(sizes):
        if int(sizes.min()) < 0:
            raise _bad(name, f"item {int(sizes.argmin())} has {int(sizes.min())} values")
        # pointers may be anything: subtract, so that nothing overflows.
        beyond = (pointers < 0) | (pointers > data_bytes - sizes * width)
        if bool(beyond.any()):
            first = int(beyond.argmax())
            raise _bad(
                name,
                f"item {first} is {int(sizes[first])} values of {width} bytes at byte {int(pointers[first])}, "
                f"the data file has {data_bytes} bytes ({int(beyond.sum())} items are so)",
            )
        if width > 1 and bool((pointers % width).any()):
            raise _bad(
                name, f"item {int((pointers % width).argmax())} does not begin at a whole value of {width} bytes"
            )
    if len(documents):
        steps = np.diff(documents)
        if int(documents[0]) != 0 or bool((steps < 0).any()) or int(documents[-1]) > len(sizes):
            raise _bad(name, f"its document bounds do not count up from 0 to at most {len(sizes)} items")
        if len(documents) > 1 and int(documents[-1]) != len(sizes):
            raise _bad(name, f"its documents end at item {int(documents[-1])} of {len(sizes)}")
    return TokenIndex(index.dtype, sizes, pointers // width, documents, index.modes)


def _fits(dtype: DType, sizes: NDArray[Any], pointers: NDArray[Any], data_bytes: int) -> bool:
    """Whether items of this format end where the next begins: looked at for the first that has values."""
    filled = np.flatnonzero(sizes)[:1]
    if not len(filled):
        return True
    at = int(filled[0])
    end = int(pointers[at]) + int(sizes[at]) * dtype.itemsize
    return end == (int(pointers[at + 1]) if at + 1 < len(sizes) else data_bytes)


def _read(raw: Raw, at: int, count: int, dtype: str) -> NDArray[Any]:
    return np.frombuffer(raw, dtype=dtype, count=count, offset=at)


def _bad(name: str, problem: str, fix: str = "Write it again, or look at it with `ds data check`.") -> ConfigError:
    return ConfigError(f"{name} is no usable index: {problem}", code="data-index", fix=fix)


def _short(name: str, expected: int, actual: int, of: str = "a header") -> ConfigError:
    return _bad(
        name, f"{of} take {expected} bytes, the file has {actual}", "It is cut short or foreign. Write it again."
    )
