"""Which sample goes where, decided in integers; and the loader that follows the decision and can stop and go on anywhere.

Words: an *epoch* is one pass over the dataset, in an order that depends on seed and epoch only; the *stream* is all
epochs one after the other; a *row* is the next micro x ranks samples of the stream, one microbatch a rank; *taken* is the
number of samples that all ranks together have taken from the stream, and is all there is to resume from. It says nothing
of the number of ranks: on any world size, step k trains on the same samples as long as the train batch size is the same.

A row at the end of an epoch takes its rest from the next epoch, so every sample is seen exactly once an epoch and every
rank always has the same number of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ds_config.errors import CheckpointError, ConfigError, UnsupportedError

__all__ = ["Lane", "ResumableLoader", "Stream"]


@dataclass(frozen=True, slots=True)
class Lane:
    """The part of every row that one rank reads.

    Attributes:
        rank: This rank among the data-parallel ranks.
        ranks: How many there are.
        micro: Samples of one microbatch on one rank.
    """

    rank: int
    ranks: int
    micro: int

    @property
    def row(self) -> int:
        """Samples that all ranks take together."""
        return self.micro * self.ranks

    def positions(self, start: int) -> range:
        """Positions in the stream of this rank's samples in the row that begins at `start`."""
        first = start + self.rank * self.micro
        return range(first, first + self.micro)


@dataclass(frozen=True, slots=True)
class Stream:
    """The endless order of samples. Pure: `sample(position)` is the same on every rank and after every resume.

    Attributes:
        length: Samples in the dataset.
        seed: Of the order.
        shuffle: Whether an epoch is a permutation or the dataset's own order.
        multiple: An epoch is cut to a multiple of it (of a shuffled epoch, other samples every time).
    """

    length: int
    seed: int = 1234
    shuffle: bool = True
    multiple: int = 1
    _orders: dict[int, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def epoch_length(self) -> int:
        """Samples of one epoch."""
        return self.length - self.length % self.multiple

    def sample(self, position: int) -> int:
        """The dataset index at `position`. The order of an epoch is made once and kept (8 bytes a sample)."""
        epoch, index = divmod(position, self.epoch_length)
        return int(self._order(epoch)[index]) if self.shuffle else index

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            while len(self._orders) > 1:  # two are kept: a row may straddle two epochs
                del self._orders[min(self._orders)]
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._orders[epoch] = torch.randperm(self.length, generator=generator)
        return self._orders[epoch]


class ResumableLoader:
    """Microbatches of this rank until the end of the epoch; iterating again goes on with the next epoch.

    Args:
        dataset: Map-style: it has `len()` and `dataset[i]`.
        lane: This rank's part.
        seed: Of the order.
        shuffle: Whether the order is a permutation or the dataset's own.
        multiple: Cut every epoch to a multiple of it: the train batch size for `dataloader_drop_last`, else 1.
        options: Passed to torch's DataLoader (`collate_fn`, `num_workers`, `pin_memory`, ...).
    Attributes:
        taken: Samples handed out so far, over all ranks and epochs.
    Raises:
        UnsupportedError: an iterable dataset ("data-iterable"): it cannot go on where it stopped.
        ConfigError: no samples, or none left after the cut ("data-empty").
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        lane: Lane,
        *,
        seed: int = 1234,
        shuffle: bool = True,
        multiple: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UnsupportedError(
                f"training_data is a {type(dataset).__name__}, which has no len() and no index",
                code="data-iterable",
                fix="Pass a map-style dataset, or your own iterator to train_batch(data_iter).",
            )
        self.dataset, self.lane, self.taken = dataset, lane, 0
        self.stream = Stream(len(dataset), seed, shuffle, multiple)
        self._options: Mapping[str, Any] = options or {}
        if self.stream.epoch_length == 0:
            raise ConfigError(
                f"the dataset has {len(dataset)} samples, of which none is left when cut to a multiple of {multiple}",
                code="data-empty",
                fix="Give more data, a smaller batch, or dataloader_drop_last = false.",
            )

    @property
    def epoch(self) -> int:
        """Whole passes taken."""
        return self.taken // self.stream.epoch_length

    def __len__(self) -> int:
        """Microbatches of this rank in an epoch that begins with a row."""
        return -(-self.stream.epoch_length // self.lane.row)

    def __iter__(self) -> Iterator[Any]:
        row = self.lane.row
        starts = range(self.taken, (self.epoch + 1) * self.stream.epoch_length, row)
        ids = _Rows(self.stream, self.lane, starts)
        # A generator of its own: making an iterator must not move the random numbers of the training.
        generator = torch.Generator().manual_seed(self.stream.seed + self.taken)
        batches = DataLoader(self.dataset, batch_sampler=ids, generator=generator, **self._options)
        for start, batch in zip(starts, batches, strict=True):
            self.taken = start + row  # counted when handed out, not when sampled: workers read ahead
            yield batch

    def forever(self) -> Iterator[Any]:
        """Microbatches without end, epoch after epoch."""
        while True:
            yield from self

    def state_dict(self) -> dict[str, int]:
        """What to resume from, on any number of ranks. JSON-able."""
        return {"taken": self.taken, "seed": self.stream.seed, "length": self.stream.length}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a saved position.

        Raises:
            CheckpointError: the dataset has another length, so that the order would be another ("data-changed").
        """
        if state["length"] != self.stream.length:
            raise CheckpointError(
                f"the checkpoint was written with {state['length']} samples, training_data has {self.stream.length}",
                code="data-changed",
                fix="Give the same data, or load_checkpoint(..., load_data_state=False) to begin its first epoch.",
            )
        self.stream = Stream(self.stream.length, state["seed"], self.stream.shuffle, self.stream.multiple)
        self.taken = state["taken"]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Sample ids of one rank, one list a row."""

    stream: Stream
    lane: Lane
    starts: range

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[list[int]]:
        for start in self.starts:
            yield [self.stream.sample(position) for position in self.lane.positions(start)]
