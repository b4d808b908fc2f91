"""Sequences of token files for a training: read ahead by threads, in an order that the threads have no say in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ds_config.errors import CheckpointError, ConfigError
from ds_data.order import Lane, Stream

__all__ = ["Batches", "TokenLoader", "check_state"]

Batch = dict[str, Tensor]


class Batches(Protocol):
    """What a `TokenLoader` reads; `Packed` is one."""

    fingerprint: str

    def __len__(self) -> int:
        """How many there are."""

    def batch(self, sequences: ArrayLike) -> Mapping[str, NDArray[np.int64]]:
        """int64 [k] -> arrays [k, ...]."""


class TokenLoader:
    """Microbatches of this rank, without end. Each is a dict of int64 tensors [micro, length].

    Args:
        data: Sequences.
        lane: This rank's part of every row.
        seed, shuffle: See `Stream`.
        threads: That read; 0 reads when asked.
        ahead: Microbatches that are read before they are asked for.
        pin_memory: Into page-locked memory, for copies to a device that do not wait.
    Attributes:
        taken: Samples handed out so far, over all ranks. Set it to go anywhere, at no cost.
        waited_s: Seconds that the caller has waited for data.
    Raises:
        ConfigError: there are no sequences ("data-empty").
    """

    def __init__(
        self,
        data: Batches,
        lane: Lane,
        *,
        seed: int = 1234,
        shuffle: bool = True,
        threads: int = 1,
        ahead: int = 4,
        pin_memory: bool = False,
    ) -> None:
        if not len(data):
            raise ConfigError("there are no sequences to load", code="data-empty", fix="Give more data.")
        self.data, self.lane, self.stream = data, lane, Stream(len(data), seed, shuffle)
        self.taken, self.waited_s = 0, 0.0
        self._threads, self._ahead, self._pin = threads, max(1, ahead), pin_memory

    def __iter__(self) -> Iterator[Batch]:
        row = self.lane.row
        if self._threads == 0:
            while True:
                begun, batch = perf_counter(), self.read(self.taken)
                self.waited_s += perf_counter() - begun
                self.taken += row
                yield batch
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="ds-data")
        coming: deque[Future[Batch]] = deque()
        at = self.taken
        try:
            while True:
                while len(coming) < self._ahead:
                    coming.append(pool.submit(self.read, at + len(coming) * row))
                begun, batch = perf_counter(), coming.popleft().result()
                self.waited_s += perf_counter() - begun
                at += row
                self.taken = at  # counted when handed out, not when read
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def read(self, start: int) -> Batch:
        """The microbatch of this rank in the row that begins at `start` of the stream."""
        samples = self.stream.samples(np.asarray(self.lane.positions(start)))
        batch = {name: torch.from_numpy(rows) for name, rows in self.data.batch(samples).items()}
        return {name: rows.pin_memory() for name, rows in batch.items()} if self._pin else batch

    def state_dict(self) -> dict[str, int | str]:
        """What to resume from, on any number of ranks and threads. JSON-able."""
        return {
            "taken": self.taken,
            "seed": self.stream.seed,
            "length": self.stream.length,
            "fingerprint": self.data.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go to a saved position.

        Raises:
            CheckpointError: the data is other data ("data-changed").
        """
        check_state(state, self.state_dict())
        self.stream = Stream(self.stream.length, int(state["seed"]), self.stream.shuffle)
        self.taken = int(state["taken"])


def check_state(saved: Mapping[str, int | str], now: Mapping[str, int | str]) -> None:
    """Raise CheckpointError ("data-changed") when a saved position is one of other data."""
    changed = [name for name in ("length", "fingerprint") if name in saved and saved[name] != now.get(name)]
    if changed:
        words = {"length": "{} samples then, {} now", "fingerprint": "fingerprint {} then, {} now"}
        told = ", ".join(words[name].format(saved[name], now.get(name)) for name in changed)
        raise CheckpointError(
            f"the checkpoint was written with other data: {told}",
            code="data-changed",
            fix="Give the same data, or begin its first epoch: load_checkpoint(..., load_data_state=False), or no load_state_dict().",
        )
