"""Token files, read through a memory map: `prefix.bin` is values one after the other, `prefix.idx` says where items are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cached_property, partial
from os import PathLike
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ds_config.errors import ConfigError
from ds_data.codes import DType, Table
from ds_data.token_index import TokenIndex, parse_index

__all__ = ["TokenFile", "prefix_of"]


def prefix_of(path: str | PathLike[str]) -> str:
    """Return the common name of the two files: `path` without `.bin` or `.idx`."""
    text = os.fspath(path)
    return text[:-4] if text.endswith((".bin", ".idx")) else text


class TokenFile:
    """Items of a token file. `file[i]` is a view of the map: nothing is copied, and it cannot be written to.

    Args:
        path: Common name of the two files; `.bin` or `.idx` at its end is ignored.
        table: Meaning of format codes: "megatron", "deepspeed", or None to find out (see `codes`).
    Attributes:
        prefix: Common name of the two files.
        index: Where items are.
        values: [values], the whole data file as one array.
    Raises:
        ConfigError: a file is missing ("data-file"), or the index is not usable ("data-index", "data-dtype").
    Cost: reads the index once; the data stays where it is until it is read.
    """

    def __init__(self, path: str | PathLike[str], *, table: Table | None = None) -> None:
        self.prefix, self._table = prefix_of(path), table
        names = f"{self.prefix}.idx", f"{self.prefix}.bin"
        missing = [name for name in names if not os.path.isfile(name)]
        if missing:
            raise ConfigError(
                f"there is no {' and no '.join(missing)}",
                code="data-file",
                fix="Give the common name of a .bin and a .idx file.",
            )
        data_bytes = os.path.getsize(names[1])
        self.index: TokenIndex = parse_index(np.fromfile(names[0], np.uint8), data_bytes, table=table, name=names[0])
        self._data_bytes = data_bytes
        count = data_bytes // self.index.dtype.itemsize
        self.values: NDArray[Any] = np.zeros(0, self.index.dtype)
        if count:
            self.values = np.memmap(names[1], self.index.dtype, "r", shape=(count,)).view(np.ndarray)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the map itself, instead of being sent the values.
        factory = type(self) if self._table is None else partial(type(self), table=self._table)
        return factory, (self.prefix,)

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return map(self.__getitem__, range(len(self)))

    @overload
    def __getitem__(self, at: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, at: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, at: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        start, size = int(self.index.starts[at]), int(self.index.sizes[at])
        return self.values[start : start + size]

    def get(self, at: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return a part of an item: `length` values from `offset`, to the item's end by default.

        Raises IndexError beyond the item.
        """
        item = self[at]
        end = len(item) if length is None else offset + length
        if not 0 <= offset <= end <= len(item):
            raise IndexError(f"values {offset} to {end} of item {at}, which has {len(item)}")
        return item[offset:end]

    @property
    def dtype(self) -> DType:
        """Format of the values."""
        return self.index.dtype

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64 [items]: values of each item."""
        return self.index.sizes

    @property
    def num_tokens(self) -> int:
        """Values of all items."""
        return int(self.sizes.sum())

    @cached_property
    def document_sizes(self) -> NDArray[np.int64]:
        """int64 [documents]: values of each document."""
        ends = np.concatenate([[0], np.cumsum(self.sizes)])
        return np.diff(ends[self.index.bounds])

    @cached_property
    def fingerprint(self) -> str:
        """What distinguishes this data from other data: a hash of the index, the size, and the first and last 64 KiB of values."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.dtype} {self._data_bytes}".encode())
        for part in (self.sizes, self.index.starts, self.index.bounds):
            digest.update(np.ascontiguousarray(part).data)
        edge = 65536 // self.dtype.itemsize
        digest.update(self.values[:edge].tobytes() + self.values[-edge:].tobytes())
        return digest.hexdigest()
