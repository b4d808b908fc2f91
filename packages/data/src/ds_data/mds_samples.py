"""Data sets of MosaicML Streaming ("MDS"), read: folders of shards with an `index.json`, on this host or below an fsspec URL.

A shard is uint32 n; uint32 [n + 1] where each sample begins, and the end; a JSON text; the samples. A sample is uint32 sizes of the columns whose size
is not fixed, and the columns. Pickled columns are refused: reading one runs what it says. So are images, which need a library of their own.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import hashlib
import importlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_config.errors import ConfigError
from ds_data.packed_sequences import IGNORE_INDEX

__all__ = ["MdsSamples", "MdsSequences"]

_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_VALUES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
           64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip
_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": lambda data: data.decode(),
    "int": lambda data: int(np.frombuffer(data, "<i8")[0]),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": lambda data: json.loads(data.decode()),
}


@dataclass(frozen=True, slots=True)
class _MdsShard:
    """One shard of an index: its file, or the file of its compressed bytes, and its columns."""

    samples: int
    raw: str
    packed: str | None
    method: str
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]


class MdsSamples(Sequence[dict[str, Any]]):
    """Samples of an MDS data set, in the order of its shards; dicts by column.

    Columns of `bytes`, `str`, `int`, `json`, numpy's scalars and `ndarray`, and numbers as text are decoded as Streaming does.

    Args:
        folder: Of `index.json`, or an fsspec URL of it (`s3://bucket/corpus`), which needs the extra `remote` and `cache`.
        cache: Folder of this host that shards of a URL are copied to when they are first read.
        options: Of the file system, as fsspec has them.
    Raises:
        ConfigError: there is no index, or a shard is missing or damaged ("data-file"); a column or compression cannot be read ("data-mds").
    Cost: the index at once, a shard when it is first read. Compressed shards are unpacked into memory.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        cache: str | PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self._lock = os.fspath(folder).rstrip("/"), threading.Lock()
        self._cache = None if cache is None else Path(cache)
        self._options = dict(options or {})
        raw = self._file("index.json").read_bytes()
        self.fingerprint = hashlib.blake2b(raw, digest_size=16).hexdigest()
        self.shards = tuple(_shard(entry, self.folder) for entry in json.loads(raw)["shards"])
        self._ends = np.cumsum([shard.samples for shard in self.shards], dtype=np.int64)
        self._opened: dict[int, tuple[NDArray[np.uint8], NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, at: Any) -> Any:
        """Read one sample, or a list of them for a slice."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        number = int(np.searchsorted(self._ends, at, "right"))
        shard, (data, starts) = self.shards[number], self._open(number)
        place = at - (int(self._ends[number - 1]) if number else 0)
        return _decode(shard, data[starts[place] : starts[place + 1]].tobytes(), self.folder)

    def _open(self, number: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the bytes of a shard and where its samples begin, checked; threads may do so at once."""
        with self._lock:
            if number not in self._opened:
                shard = self.shards[number]
                if shard.packed is None or (self._local and (Path(self.folder) / shard.raw).is_file()):
                    data: NDArray[np.uint8] = np.memmap(self._file(shard.raw), np.uint8, "r").view(np.ndarray)
                else:
                    content = self._file(shard.packed).read_bytes()
                    data = np.frombuffer(_unpack(content, shard.method, shard.packed), np.uint8)
                self._opened[number] = data, _starts(data, shard)
            return self._opened[number]

    @property
    def _local(self) -> bool:
        return "://" not in self.folder

    def _file(self, name: str) -> Path:
        """Return the path of a file of the data set, which is copied to this host if it is not there."""
        if self._local:
            path = Path(self.folder) / name
            if not path.is_file():
                raise ConfigError(
                    f"there is no {path}", code="data-file", fix="Give the folder of an MDS data set's index.json."
                )
            return path
        if self._cache is None:
            raise ConfigError(f"{self.folder} needs a folder for copies", code="data-file", fix="Pass cache=.")
        # The index is read afresh; a shard with the index's digest in its path belongs to this version of the data set.
        version = hashlib.blake2b(self.folder.encode(), digest_size=8).hexdigest() + getattr(self, "fingerprint", "")
        target = self._cache / version / name
        if name == "index.json" or not target.exists():
            self._copy(name, target)
        return target

    def _copy(self, name: str, target: Path) -> None:
        try:
            fsspec = importlib.import_module("fsspec")
        except ImportError:
            raise ConfigError(
                f"{self.folder} needs fsspec, which is not installed",
                code="data-file",
                fix="pip install 'ds-data[remote]'",
            ) from None
        system, path = fsspec.core.url_to_fs(f"{self.folder}/{name}", **self._options)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            with system.open(path, "rb") as source, open(part, "xb") as out:
                shutil.copyfileobj(source, out, 1 << 22)
            os.replace(part, target)
        except FileNotFoundError as error:
            raise ConfigError(
                f"there is no {self.folder}/{name}", code="data-file", fix="Give the URL of the folder of index.json."
            ) from error
        finally:
            part.unlink(missing_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        # Another process opens the shards itself.
        return {**self.__dict__, "_opened": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_lock": threading.Lock()})


class MdsSequences(Sequence[dict[str, NDArray[Any]]]):
    """Token sequences of an MDS data set, one a sample, for `TokenLoader`: the arrays of `PackedSequences`.

    Args:
        samples: Whose column has the tokens of one sequence: an `ndarray`, or `bytes` of `dtype`.
        length: Tokens of a sequence; every sample must have so many.
        column: Name of the column.
        dtype: Of tokens that are `bytes`.
    Raises:
        ConfigError: a sample has no such column, or another length ("data-mds"); the latter when it is read.
    """

    def __init__(self, samples: MdsSamples, length: int, *, column: str = "tokens", dtype: Any = np.int64) -> None:
        self.samples, self.length, self.column, self.dtype = samples, length, column, np.dtype(dtype)
        without = [shard.raw for shard in samples.shards if column not in shard.names]
        if without:
            raise ConfigError(
                f"{without[0]} has no column {column!r}; it has {', '.join(samples.shards[0].names)}",
                code="data-mds",
                fix="Name the column of the tokens.",
            )
        self.fingerprint = f"{samples.fingerprint}/{column}/{length}"

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: Any) -> Any:
        """Return the four arrays of a sequence, [length] each."""
        at = range(len(self))[at]
        return {name: rows[0] for name, rows in self.batch([at]).items()}

    def batch(self, sequences: ArrayLike) -> dict[str, NDArray[Any]]:
        """Read sequences, int64 [k], as `input_ids`, `labels` (the next token; none for the last one), `position_ids` and `document_ids`."""
        rows = [self._tokens(int(at)) for at in np.asarray(sequences, np.int64).tolist()]
        ids = np.stack(rows) if rows else np.empty((0, self.length), np.int64)
        labels = np.full_like(ids, IGNORE_INDEX)
        labels[:, :-1] = ids[:, 1:]
        places = np.broadcast_to(np.arange(self.length, dtype=np.int64), ids.shape).copy()
        return {"input_ids": ids, "labels": labels, "position_ids": places, "document_ids": np.zeros_like(ids)}

    def _tokens(self, at: int) -> NDArray[np.int64]:
        value = self.samples[at][self.column]
        tokens = np.frombuffer(value, self.dtype) if isinstance(value, bytes) else np.asarray(value)
        if tokens.shape != (self.length,):
            raise ConfigError(
                f"sample {at} of {self.samples.folder} has {self.column} of shape {list(tokens.shape)}, not [{self.length}]",
                code="data-mds",
                fix="Give the length that the data set was written with, and the dtype of bytes.",
            )
        return tokens.astype(np.int64)


def _shard(entry: Mapping[str, Any], folder: str) -> _MdsShard:
    if entry.get("format") != "mds" or entry.get("version") != 2:
        raise ConfigError(
            f"{folder} has a shard of format {entry.get('format')!r}, version {entry.get('version')}",
            code="data-mds",
            fix="Give a data set of MosaicML Streaming's MDSWriter.",
        )
    packed, method = entry.get("zip_data"), str(entry.get("compression") or "").partition(":")[0]
    names = tuple(entry["column_names"])
    encodings = tuple(entry["column_encodings"])
    unknown = [(name, kind) for name, kind in zip(names, encodings, strict=True) if _decoder(kind) is None]
    if unknown:
        raise ConfigError(
            f"column {unknown[0][0]!r} of {folder} is encoded as {unknown[0][1]}",
            code="data-mds",
            fix="Columns of bytes, str, int, json, ndarray and numpy's scalars are read. Pickles run code, and images need MosaicML Streaming itself.",
        )
    basenames = [entry["raw_data"]["basename"], *([packed["basename"]] if packed else [])]
    if any(os.path.basename(name) != name for name in basenames):
        raise ConfigError(
            f"{folder} names files outside of it: {basenames}", code="data-mds", fix="Do not read this data set."
        )
    sizes = tuple(entry["column_sizes"])
    return _MdsShard(
        int(entry["samples"]), basenames[0], basenames[1] if packed else None, method, names, encodings, sizes
    )


@functools.cache
def _decoder(kind: str) -> Callable[[bytes], Any] | None:
    """Return the function that decodes a column of an encoding; None for one that is not read."""
    base, _, rest = kind.partition(":")
    dtype, _, shape = rest.partition(":")
    if base == "ndarray" and dtype in ("", *_SCALARS):
        return functools.partial(_array, dtype=dtype, shape=tuple(map(int, shape.split(","))) if shape else None)
    if base in _SCALARS:
        return lambda data: np.frombuffer(data, np.dtype(base).newbyteorder("<"))[0]
    return _DECODERS.get(base)


def _array(data: bytes, dtype: str, shape: tuple[int, ...] | None) -> NDArray[Any]:
    """Decode an array: a byte for its dtype and its shape where the column does not fix them, and the values."""
    at = 0
    if not dtype:
        dtype, at = _VALUES[data[0]], 1
    if shape is None:
        dims, width = data[at] >> 2, 1 << (data[at] & 3)
        shape = tuple(int(n) for n in np.frombuffer(data, f"<u{width}", dims, at + 1))
        at += 1 + dims * width
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=at).reshape(shape)


def _decode(shard: _MdsShard, data: bytes, folder: str) -> dict[str, Any]:
    try:
        unsized = sum(size is None for size in shard.sizes)
        varying = iter(np.frombuffer(data, "<u4", unsized).tolist())
        at, sample = 4 * unsized, {}
        for name, kind, size in zip(shard.names, shard.encodings, shard.sizes, strict=True):
            decode = _decoder(kind) or bytes
            end = at + (next(varying) if size is None else size)
            if end > len(data):
                raise ValueError(f"column {name!r} ends at byte {end} of {len(data)}")
            sample[name], at = decode(data[at:end]), end
        return sample
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"a sample of {folder}/{shard.raw} cannot be decoded: {error}",
            code="data-file",
            fix="Copy the shard again.",
        ) from error


def _starts(data: NDArray[np.uint8], shard: _MdsShard) -> NDArray[np.int64]:
    head = 4 * (shard.samples + 2)
    numbers = data[: min(head, len(data) // 4 * 4)].view("<u4").astype(np.int64)
    good = len(numbers) == shard.samples + 2 and numbers[0] == shard.samples
    starts = numbers[1:]
    if not good or bool((np.diff(starts) < 0).any()) or starts[0] < head or starts[-1] > len(data):
        raise ConfigError(
            f"{shard.raw} is no shard of {shard.samples} samples, or is cut short ({len(data)} bytes)",
            code="data-file",
            fix="Copy it again.",
        )
    return starts


def _unpack(content: bytes, method: str, name: str) -> bytes:
    if method == "gz":
        return gzip.decompress(content)
    if method == "bz2":
        return bz2.decompress(content)
    if method == "zstd":
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError:
            raise ConfigError(
                f"{name} needs the package zstandard", code="data-mds", fix="pip install 'ds-data[mds]'"
            ) from None
        unpacked: bytes = zstandard.ZstdDecompressor().decompressobj().decompress(content)
        return unpacked
    raise ConfigError(
        f"{name} is compressed by {method!r}",
        code="data-mds",
        fix="gz, bz2 and zstd are read; write it with one of them.",
    )
