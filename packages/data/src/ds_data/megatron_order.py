"""The sample order of Megatron-LM's GPT data set: a run that began there goes on here with the samples that it would have had.

Items are repeated for as many epochs as the samples need and shuffled; sequences are cut from them one after the other, and shuffled. If the
last epoch gives less than four fifths of an epoch's sequences, its items and its sequences are shuffled apart, behind the others. All
draws come from one `numpy.random.RandomState(seed)`, in this order: items, sequences. It is stored, 4 bytes an item of every epoch and a
sequence. New trainings are better off with `SampleStream`, which stores nothing and does not depend on the number of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_config.errors import ConfigError
from ds_data.tokens import TokenFile

__all__ = ["MegatronSequences"]

_SEPARATE = 0.80  # of an epoch's sequences: with fewer from the last epoch it is shuffled apart


class MegatronSequences(Sequence[dict[str, NDArray[np.int64]]]):
    """Sequences in the order of Megatron-LM's `GPTDataset`. Load it with `TokenLoader(data, lane, shuffle=False)`.

    Args:
        file: A token file.
        length: Megatron's `sequence_length`.
        samples: Megatron's `train_samples` (or iterations times the global batch): the order depends on it. None: one epoch.
        seed: Megatron's `seed`.
        items: The items of one split, a range of them (`split_ranges(len(file), (969, 30, 1))[0]`); None is all.
    Raises:
        ConfigError: the items are not in the file, or have too few tokens for one sequence ("data-packing").
    """

    def __init__(
        self, file: TokenFile, length: int, samples: int | None = None, *, seed: int = 1234, items: range | None = None
    ) -> None:
        self.file, self.length, self.seed = file, length, seed
        chosen = range(len(file)) if items is None else items
        numbers = np.arange(len(file), dtype=np.int32)[chosen.start : chosen.stop]
        tokens = int(file.sizes[numbers].sum())
        too_few = samples is not None and not samples >= 1
        if chosen.step != 1 or len(numbers) != len(chosen) or length < 1 or tokens <= length or too_few:
            raise ConfigError(
                f"items {chosen} of {file.prefix}, which has {len(file)}: {tokens} tokens for "
                f"{'an epoch' if samples is None else samples} of sequences of {length}",
                code="data-packing",
                fix="Give a range of items with more tokens than one sequence, and at least 1 sample.",
            )
        epochs = 1 if samples is None else max(1, -(-(samples * length + 1) // tokens))
        count, before = (epochs * tokens - 1) // length, ((epochs - 1) * tokens - 1) // length
        wanted = count if samples is None else samples
        apart = epochs > 1 and wanted - before < int(_SEPARATE * ((tokens - 1) // length))
        random = np.random.RandomState(seed)
        parts = [np.tile(numbers, epochs - 1), numbers.copy()] if apart else [np.tile(numbers, epochs)]
        places = np.arange(count, dtype=np.uint32)
        for part in (*parts, *((places[:before], places[before:]) if apart else (places,))):
            random.shuffle(part)
        self._items, self._places = np.concatenate(parts), places
        self._ends = np.cumsum(file.sizes[self._items])
        self._key = f"{length} {wanted} {seed} {chosen.start}-{chosen.stop}"

    @cached_property
    def fingerprint(self) -> str:
        """What distinguishes these sequences and their order from others."""
        return f"{self.file.fingerprint}/megatron {self._key}"

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, at: Any) -> Any:
        """Return `input_ids`, `labels` and `position_ids` of a sequence: int64 [length] each."""
        at = range(len(self))[at]
        return {name: rows[0] for name, rows in self.batch([at]).items()}

    def batch(self, sequences: ArrayLike) -> dict[str, NDArray[np.int64]]:
        """Read places of the order, int64 [k], as arrays int64 [k, length]. Labels go on over the ends of documents, as there."""
        ids = np.asarray(sequences, np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            raise IndexError(f"sequences {int(ids.min())} to {int(ids.max())} of {len(self)}")
        rows = (
            np.stack([self._tokens(place) for place in self._places[ids].tolist()])
            if ids.size
            else np.empty((0, 1 + self.length), np.int64)
        )
        positions = np.broadcast_to(np.arange(self.length), (len(ids), self.length)).copy()
        return {"input_ids": rows[:, :-1], "labels": rows[:, 1:].copy(), "position_ids": positions}

    def _tokens(self, place: int) -> NDArray[np.int64]:
        """Read the `length` + 1 tokens of one sequence from the shuffled items."""
        row = np.empty(self.length + 1, np.int64)
        start, at = place * self.length, 0
        number = int(np.searchsorted(self._ends, start, "right"))
        while at < len(row):
            item = self.file[int(self._items[number])]
            offset = start + at - (int(self._ends[number]) - len(item))
            part = item[offset : offset + len(row) - at]
            row[at : at + len(part)] = part
            at, number = at + len(part), number + 1
        return row
