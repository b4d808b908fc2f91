"""Documents to sequences of one length, as index arithmetic over a token file.

Sequence i has the values from i*length to i*length + length of all documents one after the other: `length` inputs and, one further, their
labels. Nothing is padded and nothing is lost but an incomplete sequence at the end. Where a document begins, position ids begin at 0 again, document
ids count up, and the label of a document's last token is `IGNORE_INDEX`: the model is not trained to guess the beginning of an unrelated text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_config.errors import ConfigError
from ds_config.option_checks import check_options
from ds_data.permutation import mix_keys, uniform
from ds_data.tokens import TokenFile

__all__ = ["IGNORE_INDEX", "FillInMiddle", "PackedSequences"]

IGNORE_INDEX = -100  # the label that torch's cross entropy leaves out


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """Pieces of documents with their middle at the end (Bavarian et al., arXiv:2207.14255). The length stays: the last three tokens
    of a piece give way to the sentinels.

    Attributes:
        prefix, middle, suffix: Ids of the sentinels.
        rate: Share of the pieces.
        suffix_first: Share of those that have the suffix first.
        seed: Of which, and where they are cut.
    """

    prefix: int
    middle: int
    suffix: int
    rate: float = 0.5
    suffix_first: float = 0.5
    seed: int = 1234

    def __post_init__(self) -> None:
        check_options(self, prefix=">= 0", middle=">= 0", suffix=">= 0", rate=">= 0, <= 1", suffix_first=">= 0, <= 1")

    def indices(self, length: int, piece: int) -> NDArray[np.int64]:
        """Return the source index of each token of piece number `piece` after the reordering, int64 [length].

        -1, -2 and -3 are the prefix, middle and suffix sentinel.
        """
        chosen, first, one, two = uniform(mix_keys(self.seed, piece), np.arange(4))
        places = np.arange(length, dtype=np.int64)
        if length < 4 or chosen >= self.rate:
            return places
        a, b = sorted((int(one * (length - 2)), int(two * (length - 2))))
        prefix, middle, suffix = places[:a], places[a:b], places[b : length - 3]
        if first < self.suffix_first:
            return np.concatenate([[-1, -3], suffix, [-2], prefix, middle])
        return np.concatenate([[-1], prefix, [-3], suffix, [-2], middle])

    def apply(self, tokens: NDArray[Any], piece: int) -> NDArray[Any]:
        """Reorder the tokens of a piece of a document for fill-in-the-middle: [n] -> [n]."""
        indices = self.indices(len(tokens), piece)
        sentinels = np.array([self.suffix, self.middle, self.prefix], tokens.dtype)
        return np.concatenate([tokens, sentinels])[indices]


class PackedSequences(Sequence[dict[str, NDArray[Any]]]):
    """Sequences of a token file. Map-style: torch's DataLoader takes it, and `ds_data.TokenLoader` reads it faster.

    Args:
        file: A token file whose items lie one after the other, as all writers leave them.
        length: Tokens of a sequence.
        documents: Only these, a range of them (see `splits`); None is all.
        fill_in_middle: Changes the order of pieces of documents; None leaves them.
        dtype: Format of the arrays. int32 is half the bytes on the way to a device, where `TokenLoader` widens it.
    Raises:
        ConfigError: items overlap or have gaps, the documents are not in the file, or not one sequence is full ("data-packing").
    """

    def __init__(
        self,
        file: TokenFile,
        length: int,
        *,
        documents: range | None = None,
        fill_in_middle: FillInMiddle | None = None,
        dtype: Any = np.int64,
    ) -> None:
        self.file, self.length, self.fill_in_middle, self.dtype = file, length, fill_in_middle, np.dtype(dtype)
        if not np.can_cast(file.dtype, self.dtype) and self.dtype != np.int64:
            raise ConfigError(
                f"{file.prefix} holds {file.dtype}, which {self.dtype} may not hold",
                code="data-packing",
                fix="Leave dtype at int64, or write the file with a narrower format.",
            )
        starts, bounds = file.index.starts, file.index.bounds
        if len(file) and bool((starts[1:] != (starts + file.sizes)[:-1]).any()):
            raise ConfigError(
                f"items of {file.prefix} do not lie one after the other",
                code="data-packing",
                fix="Copy it with TokenWriter.merge, which lays them so.",
            )
        chosen = range(len(bounds) - 1) if documents is None else documents
        if chosen.step != 1 or chosen.start < 0 or chosen.stop > len(bounds) - 1:
            raise ConfigError(
                f"documents {chosen} of {file.prefix}, which has {len(bounds) - 1}",
                code="data-packing",
                fix="Give a range of them.",
            )
        ends = np.append(starts, file.index.end)
        self._edges: NDArray[np.int64] = ends[bounds[chosen.start : chosen.stop + 1]]
        self._first = int(self._edges[0]) if len(self._edges) else 0
        values = int(self._edges[-1]) - self._first if len(self._edges) else 0
        self._count = max(0, (values - 1) // length) if length > 0 else 0
        if self._count < 1:
            raise ConfigError(
                f"{values} tokens do not fill one sequence of {length} and its last label",
                code="data-packing",
                fix="Give more data or a smaller length.",
            )
        self._documents = chosen

    @cached_property
    def fingerprint(self) -> str:
        """What distinguishes these sequences from others."""
        chosen = self._documents
        return f"{self.file.fingerprint}/{self.length}/{chosen.start}-{chosen.stop}/{self.fill_in_middle}"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        """Return `input_ids`, `labels`, `position_ids`, `document_ids` of a sequence: [length] each."""
        at = range(self._count)[at]
        return {name: rows[0] for name, rows in self.batch([at]).items()}

    def over(self, file: TokenFile) -> PackedSequences:
        """Return the same packing of another file, whose documents have the same sizes.

        Raises:
            ConfigError: tokens are reordered, which the other file would not follow ("data-packing").
        """
        if self.fill_in_middle is not None:
            raise ConfigError(
                f"tokens of {self.file.prefix} are reordered by fill_in_middle, those of {file.prefix} are not",
                code="data-packing",
                fix="Leave fill_in_middle out.",
            )
        return PackedSequences(file, self.length, documents=self._documents)

    def tokens(self, sequences: ArrayLike, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read the tokens of `sequences`: int64 [k] -> [k, length + 1], inputs and the label after the inputs.

        Tokens are widened to the dtype of `out` (`dtype` by default).
        """
        ids = np.asarray(sequences, np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._count:
            raise IndexError(f"sequences {int(ids.min())} to {int(ids.max())} of {self._count}")
        rows = np.empty((len(ids), self.length + 1), self.dtype) if out is None else out
        values = self.file.values
        for row, start in zip(rows, (self._first + ids * self.length).tolist(), strict=True):
            row[:] = values[start : start + self.length + 1]
        if self.fill_in_middle is not None:
            for row, sequence in zip(rows, ids.tolist(), strict=True):
                # The last label belongs to the last piece, unless a document begins with it.
                edges = [0, *self._within(sequence, self.length + 1), self.length + 1]
                for a, b in pairwise(edges):
                    row[a:b] = self.fill_in_middle.apply(row[a:b], self._first + sequence * self.length + a)
        return rows

    def boundaries(self, sequence: int) -> list[int]:
        """Return where documents begin in a sequence: 0, ..., length, the `cu_seqlens` of varlen attention."""
        return [0, *self._within(sequence, self.length), self.length]

    def batch(self, sequences: ArrayLike) -> dict[str, NDArray[Any]]:
        """Read sequences, int64 [k], as four arrays [k, length]; see `__getitem__`."""
        ids = np.asarray(sequences, np.int64)
        rows, length = self.tokens(ids), self.length
        shape = (len(ids), length)
        labels, positions, documents = rows[:, 1:].copy(), np.empty(shape, self.dtype), np.empty(shape, self.dtype)
        starts = self._first + ids * length
        # A document may begin at 1 to length, where the last label is.
        first = np.searchsorted(self._begins, starts, "right").tolist()
        last = np.searchsorted(self._begins, starts + length, "right").tolist()
        counted = np.arange(length, dtype=self.dtype)
        # Pieces of documents are long: a few copies of runs cost less than arithmetic on every token.
        for row, start in enumerate(starts.tolist()):
            begin = 0
            for document, edge in enumerate((self._begins[first[row] : last[row]] - start).tolist()):
                labels[row, edge - 1] = IGNORE_INDEX
                positions[row, begin:edge] = counted[: edge - begin]
                documents[row, begin:edge] = document
                begin = edge
            positions[row, begin:] = counted[: length - begin]
            documents[row, begin:] = last[row] - first[row]
        return {"input_ids": rows[:, :-1], "labels": labels, "position_ids": positions, "document_ids": documents}

    def _within(self, sequence: int, end: int) -> list[int]:
        """Return where documents begin after the first of `end` tokens of a sequence."""
        start = self._first + range(self._count)[sequence] * self.length
        first, last = np.searchsorted(self._begins, start, "right"), np.searchsorted(self._begins, start + end)
        inside: list[int] = (self._begins[first:last] - start).tolist()
        return inside

    @cached_property
    def _begins(self) -> NDArray[np.int64]:
        """Where documents with at least one value begin in the file."""
        edges = self._edges  # in order already
        return edges[np.flatnonzero(np.diff(edges, prepend=edges[0] - 1))]
