"""Token files, written. What is not finished does not exist: the files get their names last, the index after the data.

with TokenWriter("corpus", np.uint16) as out:
    out.add(ids)                # an item that is a document
    out.merge("other")          # all items of another file
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_config.errors import ConfigError
from ds_data.codes import DType, Table, code_of
from ds_data.token_index import TokenIndex, pack_index
from ds_data.tokens import TokenFile, prefix_of

__all__ = ["TokenWriter", "write_items"]

_BLOCK = 1 << 22  # values that are copied at a time when files are merged


class TokenWriter:
    """Writes one token file. A context manager: left with an error, it leaves what was there before.

    Args:
        path: Common name of the two files.
        dtype: Format of the values; with `append` that of the file, and must be the same.
        table: By which table the format is coded. They agree on up to 64-bit signed integers; unsigned 16 bit are 8 for Megatron-LM and
            6 for DeepSpeed, whose readers each know only their own.
        append: Go on with an existing file instead of replacing it. Until the end, readers see the old one.
    Raises:
        ConfigError: the table has no code for the format ("data-dtype"), the file to append to is not usable.
    """

    def __init__(
        self, path: str | PathLike[str], dtype: Any, *, table: Table = "megatron", append: bool = False
    ) -> None:
        self.prefix, self.dtype = prefix_of(path), _little(dtype)
        code_of(self.dtype, table)
        self._table: Table = table
        self._sizes: list[NDArray[np.int64]] = []
        self._starts: list[NDArray[np.int64]] = []
        self._documents: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._items, self._end, self._open, self._appends = 0, 0, 0, append
        self._part = f"{self.prefix}.bin" if append else f"{self.prefix}.bin.{os.getpid()}.part"
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        if append:
            self._take_over(TokenFile(self.prefix, table=table))
        if not append:
            Path(self._part).unlink(missing_ok=True)  # a link of this name is not followed
        self._file: IO[bytes] | None = open(self._part, "r+b" if append else "xb")  # noqa: SIM115 - closed by finish
        self._file.truncate(self._end * self.dtype.itemsize)  # what an interrupted append has left
        self._file.seek(0, os.SEEK_END)

    def add(self, values: ArrayLike, *, ends_document: bool = True) -> None:
        """Append one item, [n] integers (or floats for a float file).

        Raises:
            ConfigError: a value does not fit the format ("data-range").
        """
        array = np.asarray(values).reshape(-1)
        self.add_flat(array, np.array([len(array)]), ends_documents=ends_document)

    def add_flat(self, values: ArrayLike, sizes: ArrayLike, *, ends_documents: bool = True) -> None:
        """Append many items at once.

        Args:
            values: [sum of sizes].
            sizes: [items].
            ends_documents: Whether every item is a document; otherwise call `end_document`.
        """
        array, lengths = self._fit(np.asarray(values)), np.asarray(sizes, np.int64)
        if int(lengths.sum()) != array.size or (len(lengths) and int(lengths.min()) < 0):
            raise ConfigError(
                f"items of {int(lengths.sum())} values were announced, {array.size} were given",
                code="data-range",
                fix="Give sizes that add up to the number of values.",
            )
        self._handle.write(array.data if array.size else b"")
        self._note(lengths)
        if ends_documents:
            first = self._items - len(lengths)
            self._documents.append(np.arange(first + 1, self._items + 1, dtype=np.int64))
            self._open = self._items

    def end_document(self) -> None:
        """End a document of one or more items. Without items it is an empty document."""
        self._documents.append(np.array([self._items], np.int64))
        self._open = self._items

    def merge(self, other: TokenFile | str | PathLike[str]) -> None:
        """Append all items and documents of another file. Values are converted if every one of them fits."""
        file = other if isinstance(other, TokenFile) else TokenFile(other)
        index, before = file.index, self._items
        ends = index.starts + index.sizes
        # Items that lie one after the other, as all writers leave them, are copied in large blocks.
        if len(index) and bool((index.starts[1:] == ends[:-1]).all()):
            for at in range(int(index.starts[0]), int(ends[-1]), _BLOCK):
                self._handle.write(self._fit(file.values[at : min(at + _BLOCK, int(ends[-1]))]).data)
        else:
            for item in file:
                self._handle.write(self._fit(item).data if len(item) else b"")
        self._note(index.sizes)
        self._documents.append(index.bounds[1:] + before)
        self._open = self._items

    def finish(self) -> str:
        """Make the file what readers see, on disk even if the machine stops. Returns the common name."""
        file = self._handle
        if self._open < self._items:
            self.end_document()
        file.flush()
        os.fsync(file.fileno())
        file.close()
        self._file = None
        index = TokenIndex(self.dtype, _joined(self._sizes), _joined(self._starts), _joined(self._documents))
        draft = f"{self.prefix}.idx.{os.getpid()}.part"
        Path(draft).unlink(missing_ok=True)
        with open(draft, "xb") as out:
            out.write(pack_index(index, self._table))
            out.flush()
            os.fsync(out.fileno())
        if not self._appends:
            # An old index beside new data would be read as if they belonged together.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.prefix}.idx")
            os.replace(self._part, f"{self.prefix}.bin")
        os.replace(draft, f"{self.prefix}.idx")
        _sync_directory(Path(self.prefix).parent)
        return self.prefix

    def discard(self) -> None:
        """Leave what was there before. Does nothing after `finish`."""
        if self._file is not None:
            if self._appends:
                self._file.truncate(self._before * self.dtype.itemsize)
            self._file.close()
            self._file = None
            if not self._appends:
                os.unlink(self._part)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._file is not None:
            self.finish()
        self.discard()

    @property
    def _handle(self) -> IO[bytes]:
        if self._file is None:
            raise ConfigError(
                f"{self.prefix} is finished", code="data-file", fix="Open it again with append=True to add to it."
            )
        return self._file

    def _take_over(self, old: TokenFile) -> None:
        if old.dtype != self.dtype:
            raise ConfigError(
                f"{self.prefix} holds {old.dtype}, {self.dtype} shall be appended",
                code="data-dtype",
                fix=f"Append {old.dtype}, or write a new file and merge the old one into it.",
            )
        self._sizes, self._starts = [old.index.sizes], [old.index.starts]
        self._documents = [old.index.bounds]
        self._items = self._open = len(old)
        self._end = self._before = old.index.end

    def _note(self, sizes: NDArray[np.int64]) -> None:
        ends = self._end + np.cumsum(sizes)
        self._sizes.append(sizes)
        self._starts.append(ends - sizes)
        self._items += len(sizes)
        self._end = int(ends[-1]) if len(ends) else self._end

    def _fit(self, values: NDArray[Any]) -> NDArray[Any]:
        if values.dtype == self.dtype:
            return np.ascontiguousarray(values).reshape(-1)
        if self.dtype.kind in "iu" and values.size:
            span = np.iinfo(self.dtype)
            low, high = values.min(), values.max()
            if values.dtype.kind not in "iub" or int(low) < span.min or int(high) > span.max:
                raise ConfigError(
                    f"values of {low} to {high} ({values.dtype}) do not fit {self.dtype}, which holds integers of {span.min} to {span.max}",
                    code="data-range",
                    fix="Write the file with a wider dtype.",
                )
        return np.ascontiguousarray(values.reshape(-1), self.dtype)


def write_items(
    path: str | PathLike[str], items: Iterable[ArrayLike], dtype: Any, *, table: Table = "megatron"
) -> TokenFile:
    """Write one item after the other, each a document, and open the file."""
    with TokenWriter(path, dtype, table=table) as out:
        for item in items:
            out.add(item)
    return TokenFile(path, table=table)


def _little(dtype: Any) -> DType:
    return np.dtype(dtype).newbyteorder("<")


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
