"""The engine's loader: microbatches of this rank from any map-style dataset, in the order of `ds_data.order`; it can stop and go on anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ds_config.errors import ConfigError, UnsupportedError
from ds_data.loading import check_state
from ds_data.order import Lane, Rows, Stream

__all__ = ["ResumableLoader"]


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
        ids = Rows(self.stream, self.lane, starts)
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

    def state_dict(self) -> dict[str, Any]:
        """What to resume from, on any number of ranks. JSON-able. A dataset with a `fingerprint` is known again by it."""
        mark = getattr(self.dataset, "fingerprint", None)
        state = {"taken": self.taken, "seed": self.stream.seed, "length": self.stream.length}
        return state if mark is None else state | {"fingerprint": str(mark)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            CheckpointError: the dataset has another length or fingerprint, so that the order would be another ("data-changed").
        """
        check_state(state, self.state_dict())
        self.stream = Stream(self.stream.length, state["seed"], self.stream.shuffle, self.stream.multiple)
        self.taken = state["taken"]
