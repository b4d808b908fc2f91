"""Documents to sequences of one length without cutting them: first-fit decreasing (Johnson 1973), and loss masks over any packing.

A sequence holds whole documents and padding at its end. Padding counts as one more document: its position ids begin at 0, its labels are
`IGNORE_INDEX`. `pack_first_fit` decides in integers which document goes where; `WholeDocuments` reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Protocol, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_config.errors import ConfigError
from ds_data.packed_sequences import IGNORE_INDEX
from ds_data.tokens import TokenFile

__all__ = ["LossMaskedSequences", "WholeDocuments", "pack_first_fit"]

Longer = Literal["refuse", "cut", "leave_out"]


def pack_first_fit(sizes: ArrayLike, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack items into as few sequences as first-fit decreasing needs: longest first, each into the first sequence with room.

    Args:
        sizes: [n], each in 1..length; of equal sizes the lower number goes first.
        length: Tokens of a sequence.
    Returns: int64 [n] items in order of their sequences, and int64 [sequences] where the items of each sequence end.

    Raises:
        ConfigError: a size is not in 1..length ("data-packing").
    Cost: at most 11/9 of the optimum plus one sequence; O(n log n), a second for some 500,000 items.
    """
    item_sizes = np.asarray(sizes, np.int64)
    if len(item_sizes) and not 1 <= int(item_sizes.min()) <= int(item_sizes.max()) <= length:
        raise ConfigError(
            f"items of {int(item_sizes.min())} to {int(item_sizes.max())} tokens for sequences of {length}",
            code="data-packing",
            fix="Leave empty items out and cut longer ones.",
        )
    order = np.argsort(-item_sizes, kind="stable")
    room = _FirstWithRoom(len(item_sizes), length)
    sequence_of = np.empty(len(order), np.int64)
    ordered = item_sizes[order]
    edges = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)] if len(ordered) else [0]
    for begin, end in pairwise(edges):
        size, at = int(ordered[begin]), begin
        while at < end:  # first fit puts equal items into one sequence until it is full
            sequence, free = room.find(size)
            count = min(end - at, free // size)
            sequence_of[at : at + count] = sequence
            room.set(sequence, free - count * size)
            at += count
    by_sequence = np.argsort(sequence_of, kind="stable")
    return order[by_sequence], np.cumsum(np.bincount(sequence_of)).astype(np.int64)


class _FirstWithRoom:
    """The first of many sequences with enough room, by a tree of maxima."""

    def __init__(self, count: int, length: int) -> None:
        self._width = 1 << max(0, count - 1).bit_length()
        self._most = [length] * (2 * self._width)

    def find(self, size: int) -> tuple[int, int]:
        """Return the first sequence with room for `size` tokens, and its room."""
        most, node = self._most, 1
        while node < self._width:
            node *= 2
            node += most[node] < size
        return node - self._width, most[node]

    def set(self, sequence: int, room: int) -> None:
        """Set the room of a sequence."""
        most, node = self._most, sequence + self._width
        most[node] = room
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Runs of values that stay together: whole documents, or parts of those longer than a sequence.

    Attributes:
        starts: int64 [n], first value of each in the file. sizes: int64 [n].
        goes_on: bool [n], whether the next value of the file belongs to the same document and is the last label.
    """

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    goes_on: NDArray[np.bool_]

    @classmethod
    def cut(cls, starts: NDArray[np.int64], sizes: NDArray[np.int64], length: int) -> _Pieces:
        """Cut documents into pieces of at most `length` values."""
        counts = -(-sizes // length)
        document = np.repeat(np.arange(len(sizes)), counts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = number * length
        left = sizes[document] - offsets
        return cls(starts[document] + offsets, np.minimum(left, length), left > length)


class WholeDocuments(Sequence[dict[str, NDArray[Any]]]):
    """Sequences of whole documents of a token file, packed by first-fit decreasing. `TokenLoader` and torch's DataLoader read it.

    Args:
        file: A token file.
        length: Tokens of a sequence.
        documents: Only these, a range of them (see `split_ranges`); None is all. Empty ones are left out.
        longer: What to do with documents of more than `length` tokens: "refuse" raises, "cut" makes pieces of `length` tokens and a
            rest, "leave_out" does not read them.
        pad: Token id of padding.
    Raises:
        ConfigError: a document is longer and `longer` is "refuse", or no document is left ("data-packing").
    """

    def __init__(
        self,
        file: TokenFile,
        length: int,
        *,
        documents: range | None = None,
        longer: Longer = "refuse",
        pad: int = 0,
    ) -> None:
        if longer not in get_args(Longer):
            raise ConfigError(
                f"longer is {longer!r}", code="data-packing", fix=f"Use one of {', '.join(get_args(Longer))}."
            )
        self.file, self.length, self.longer, self.pad = file, length, longer, pad
        bounds, ends = file.index.bounds, np.append(file.index.starts, file.index.end)
        self._documents = range(len(bounds) - 1) if documents is None else documents
        chosen = self._documents
        if chosen.step != 1 or chosen.start < 0 or chosen.stop > len(bounds) - 1 or length < 1:
            raise ConfigError(
                f"documents {chosen} of {file.prefix}, which has {len(bounds) - 1}, in sequences of {length}",
                code="data-packing",
                fix="Give a range of them, and a length of at least 1.",
            )
        edges = ends[bounds[chosen.start : chosen.stop + 1]]
        starts, sizes = edges[:-1], np.diff(edges)
        if bool((sizes != file.document_sizes[chosen.start : chosen.stop]).any()):
            raise ConfigError(
                f"items of {file.prefix} do not lie one after the other",
                code="data-packing",
                fix="Copy it with TokenWriter.merge, which lays them so.",
            )
        too_long = int((sizes > length).sum())
        if too_long and longer == "refuse":
            raise ConfigError(
                f"{too_long} documents have more than {length} tokens, the longest {int(sizes.max())}",
                code="data-packing",
                fix='Give a larger length, or longer="cut" or longer="leave_out".',
            )
        usable = (sizes > 0) & ((sizes <= length) | (longer == "cut"))
        self._pieces = _Pieces.cut(starts[usable], sizes[usable], length)
        self._order, self._ends = pack_first_fit(self._pieces.sizes, length)
        if not len(self._ends):
            raise ConfigError(
                f"no document of {file.prefix} is left to pack",
                code="data-packing",
                fix="Give others, or a larger length.",
            )

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, at: Any) -> Any:
        """Return `input_ids`, `labels`, `position_ids`, `document_ids` of a sequence: [length] each."""
        at = range(len(self))[at]
        return {name: rows[0] for name, rows in self.batch([at]).items()}

    @cached_property
    def fingerprint(self) -> str:
        """What distinguishes these sequences from others."""
        chosen = self._documents
        return f"{self.file.fingerprint}/whole {self.length} {self.longer} {self.pad}/{chosen.start}-{chosen.stop}"

    @property
    def filled(self) -> float:
        """Share of the tokens of all sequences that are not padding."""
        return int(self._pieces.sizes.sum()) / (len(self) * self.length)

    def over(self, file: TokenFile) -> Self:
        """Return the same packing of another file, whose documents have the same sizes."""
        return type(self)(file, self.length, documents=self._documents, longer=self.longer)

    def boundaries(self, sequence: int) -> list[int]:
        """Return where documents and the padding begin in a sequence, and its length: the `cu_seqlens` of varlen attention."""
        inside: list[int] = np.cumsum(self._pieces.sizes[self._inside(sequence)]).tolist()
        return [0, *inside, self.length] if inside[-1] < self.length else [0, *inside]

    def batch(self, sequences: ArrayLike) -> dict[str, NDArray[np.int64]]:
        """Read sequences, int64 [k], as four arrays int64 [k, length]; see `__getitem__`."""
        ids = np.asarray(sequences, np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            raise IndexError(f"sequences {int(ids.min())} to {int(ids.max())} of {len(self)}")
        shape = (len(ids), self.length)
        tokens, labels = np.full(shape, self.pad, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        positions, documents = np.empty(shape, np.int64), np.empty(shape, np.int64)
        counted, values = np.arange(self.length), self.file.values
        for row, sequence in enumerate(ids.tolist()):
            at = number = 0
            for number, piece in enumerate(self._inside(sequence).tolist()):
                start, size = int(self._pieces.starts[piece]), int(self._pieces.sizes[piece])
                last = size - (not self._pieces.goes_on[piece])
                tokens[row, at : at + size] = values[start : start + size]
                labels[row, at : at + last] = values[start + 1 : start + 1 + last]
                positions[row, at : at + size] = counted[:size]
                documents[row, at : at + size] = number
                at += size
            positions[row, at:] = counted[: self.length - at]
            documents[row, at:] = number + 1
        return {"input_ids": tokens, "labels": labels, "position_ids": positions, "document_ids": documents}

    def _inside(self, sequence: int) -> NDArray[np.int64]:
        """Return the pieces of a sequence, in their order."""
        begin = int(self._ends[sequence - 1]) if sequence else 0
        return self._order[begin : int(self._ends[sequence])]


class _Packing(Protocol):
    """A packing that can be read of another file with documents of the same sizes."""

    length: int
    file: TokenFile

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def batch(self, sequences: ArrayLike) -> Mapping[str, NDArray[Any]]: ...
    def over(self, file: TokenFile) -> _Packing: ...


class LossMaskedSequences:
    """Sequences whose labels count only where a second token file says so: fine-tuning on answers, not on questions.

    The mask file has the items and documents of the data, with 0 for every token that the model is not to be trained to say.

    Args:
        data: `PackedSequences` or `WholeDocuments`, without reordering of tokens.
        mask: A token file of 0 and 1 (uint8).
    Raises:
        ConfigError: items of the two files differ in size, or tokens of `data` are reordered ("data-packing").
    """

    def __init__(self, data: _Packing, mask: TokenFile) -> None:
        ours, theirs = data.file.index, mask.index
        if not (np.array_equal(ours.sizes, theirs.sizes) and np.array_equal(ours.bounds, theirs.bounds)):
            raise ConfigError(
                f"{mask.prefix} has {len(mask)} items of {mask.num_tokens} values, {data.file.prefix} "
                f"{len(data.file)} of {data.file.num_tokens}, of other sizes or in other documents",
                code="data-packing",
                fix="Write one mask value for every token, item by item.",
            )
        self.data, self.length, self._mask = data, data.length, data.over(mask)

    @cached_property
    def fingerprint(self) -> str:
        """What distinguishes these sequences and their mask from others."""
        both = f"{self.data.fingerprint} {self._mask.fingerprint}"
        return "masked " + hashlib.blake2b(both.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, at: Any) -> dict[str, NDArray[Any]]:
        """Return the arrays of one sequence, [length] each."""
        at = range(len(self))[at]
        return {name: rows[0] for name, rows in self.batch([at]).items()}

    def batch(self, sequences: ArrayLike) -> dict[str, NDArray[Any]]:
        """Read sequences, int64 [k]; labels that the mask leaves out are `IGNORE_INDEX`."""
        rows = dict(self.data.batch(sequences))
        rows["labels"] = np.where(self._mask.batch(sequences)["labels"] == 0, IGNORE_INDEX, rows["labels"])
        return rows
