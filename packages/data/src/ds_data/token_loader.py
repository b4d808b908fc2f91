"""Sequences of token files for a training: read ahead by threads, in an order that the threads have no say in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ds_accel import streams
from ds_config.errors import CheckpointError, ConfigError
from ds_data.sample_order import RankSlice, SampleStream

__all__ = ["Batches", "TokenLoader", "check_state"]

Batch = dict[str, Tensor]
Places = NDArray[np.int64]
EpochEnd = Literal["never", "drop", "fill"]
_ENDLESS = 1 << 62
_BLOCK = 64  # rows whose samples are computed together


class Batches(Protocol):
    """What a `TokenLoader` reads; `Packed` is one."""

    @property
    def fingerprint(self) -> str:
        """What distinguishes it from other data."""

    def __len__(self) -> int:
        """Return the number of sequences."""

    def batch(self, sequences: ArrayLike) -> Mapping[str, NDArray[Any]]:
        """Read the arrays [k, ...] of `sequences`, int64 [k]."""


class TokenLoader:
    """Microbatches of this rank, without end unless asked. Each is a dict of tensors [micro, length], int64 unless the data say int32.

    Args:
        data: Sequences.
        lane: This rank's part of every row.
        seed: Of the order.
        shuffle: Whether an epoch is a permutation of the sequences. None: yes, but for data without an end (`BlendedDataset`), which come
            shuffled and whose sources would be drawn with replacement.
        threads: That read; 0 reads when asked.
        ahead: Microbatches that are read before they are asked for; up to half of them are in one piece of memory.
        pin_memory: Into page-locked memory, for copies to a device that do not wait.
        device: Where the tensors are returned, as int64: what the data has as int32 is widened there. None leaves them as they are.
        epoch_end: "never": iteration goes on into the next epoch for ever. "drop": it ends with the epoch, samples that do not fill a row
            of all ranks are left out. "fill": it ends with the row that has the epoch's last sample, filled up from the next epoch.
            The next iteration goes on with the next epoch; `len(loader)` counts the microbatches until the end.
    Attributes:
        consumed: Samples returned so far, over all ranks. Set it to go anywhere, at no cost; an iteration that has begun follows.
        waited_s: Seconds that the caller has waited for data.
    Raises:
        ConfigError: a number below 0 ("config-option"); there are no sequences ("data-empty"); data without an end shall be shuffled ("data-mixture"); an epoch shall end and the data have none, or it is shorter than a row
            ("data-epoch").
    """

    def __init__(
        self,
        data: Batches,
        lane: RankSlice,
        *,
        seed: int = 1234,
        shuffle: bool | None = None,
        threads: int = 1,
        ahead: int = 16,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
        epoch_end: EpochEnd = "never",
    ) -> None:
        if not len(data):
            raise ConfigError("there are no sequences to load", code="data-empty", fix="Give more data.")
        if not (threads >= 0 and ahead >= 0):
            raise ConfigError(
                f"{threads} threads that read {ahead} microbatches ahead",
                code="config-option",
                fix="Use 0 or more of both.",
            )
        endless = len(data) >= _ENDLESS
        if shuffle and endless:
            raise ConfigError(
                f"shuffle=True for {type(data).__name__}, which has no end: its sources would be drawn with replacement, and in shares on average only",
                code="data-mixture",
                fix="Leave shuffle out: a mixture shuffles each of its sources in epochs of its own.",
            )
        self.data, self.lane = data, lane
        self.stream = SampleStream(len(data), seed, not endless if shuffle is None else shuffle)
        self._consumed, self._moves, self.waited_s = 0, 0, 0.0
        self._threads, self._ahead, self._pin, self._device = threads, max(1, ahead), pin_memory, device
        self.epoch_end = epoch_end
        if epoch_end not in ("never", "drop", "fill") or (
            epoch_end != "never" and not lane.row <= len(data) < _ENDLESS
        ):
            size = "no end" if endless else f"{len(data)} sequences"
            raise ConfigError(
                f"epoch_end {epoch_end!r} for data with {size}, in rows of {lane.row}",
                code="data-epoch",
                fix='Use "never", "drop" or "fill"; count the steps of an endless mixture, and let a row fit into an epoch.',
            )

    @property
    def consumed(self) -> int:
        """Return how many samples were returned so far, over all ranks."""
        return self._consumed

    @consumed.setter
    def consumed(self, samples: int) -> None:
        self._consumed = samples
        self._moves += 1

    def __len__(self) -> int:
        """Return the number of microbatches of this rank until the present epoch ends.

        Raises TypeError without an end.
        """
        if self.epoch_end == "never":
            raise TypeError('a TokenLoader with epoch_end="never" has no length')
        start, end = self._epoch()
        return -(-(end - start) // self.lane.row) if self.epoch_end == "fill" else (end - start) // self.lane.row

    def _epoch(self) -> tuple[int, int]:
        """Return where the next iteration begins in the sample stream, and where its epoch ends."""
        start, length = self.consumed, len(self.data)
        end = start - start % length + length
        if self.epoch_end == "drop" and end - start < self.lane.row:
            return end, end + length  # saved where rows were smaller: what is left fills none of these
        return start, end

    def __iter__(self) -> Iterator[Batch]:
        while True:
            moves = self._moves
            yield from self._iterate(moves)
            if self._moves == moves:
                return

    def _iterate(self, moves: int) -> Iterator[Batch]:
        """Yield microbatches until the epoch ends or somebody goes to another position."""
        row, left, end = self.lane.row, -1, -1
        if self.epoch_end != "never":
            left = len(self)
            self._consumed, end = self._epoch()
        at, jobs = self.consumed, self._jobs()
        pool = None if self._threads == 0 else ThreadPoolExecutor(self._threads, thread_name_prefix="ds-data")
        coming: deque[tuple[int, Future[Batch] | None, Places]] = deque()
        waiting, wanted = (
            0,
            1,
        )  # microbatches in `coming`, and how many there should be: the first is not to wait for others
        try:
            while left:
                while waiting < wanted:
                    samples = next(jobs)
                    waiting += len(samples)
                    coming.append((len(samples), None if pool is None else pool.submit(self._read, samples), samples))
                    if pool is None:
                        break
                count, job, samples = coming.popleft()
                wanted = self._ahead
                begun = perf_counter()
                batch = self._read(samples) if job is None else job.result()
                self.waited_s += perf_counter() - begun
                for each in range(count):
                    waiting, left = waiting - 1, left - 1
                    at = end if self.epoch_end == "drop" and not left else at + row
                    self._consumed = at  # counted when returned, not when read
                    span = slice(each * self.lane.micro, (each + 1) * self.lane.micro)
                    yield self._there({name: rows[span] for name, rows in batch.items()})
                    if not left or self._moves != moves:
                        return
        finally:
            if pool is not None:
                # Without waiting: the collector may close this iteration inside any line of any thread, one of the pool's included.
                pool.shutdown(wait=False, cancel_futures=True)

    def read(self, start: int) -> Batch:
        """Read the microbatch of this rank in the row that begins at position `start` of the sample stream."""
        return self._there(self._read(self.stream.samples(np.asarray(self.lane.positions(start)))))

    def _there(self, batch: Batch) -> Batch:
        if self._device is None:
            return batch
        # Narrow on the way, wide where it is used; neither waits for the device.
        device = torch.device(self._device)
        sent = {name: streams.copy_to(rows, device) if self._pin else rows.to(device) for name, rows in batch.items()}
        return {name: rows.to(torch.int64) for name, rows in sent.items()}

    def _jobs(self) -> Iterator[Places]:
        """Yield int64 [microbatches, micro]: samples that a thread reads in a single job.

        A single microbatch first, then more at a time: to hand a job over takes as long as to read a microbatch.
        """
        start, lane, most = self.consumed, self.lane, max(1, self._ahead // 2) if self._threads else 1
        size, block = 1, 1
        while True:
            places = np.concatenate([lane.positions(start + i * lane.row) for i in range(block)])
            # Of a few samples, the calls would cost more than the numbers.
            samples = self.stream.samples(places).reshape(block, lane.micro)
            at = 0
            while at < block:
                yield samples[at : at + size]
                at, size = at + size, min(2 * size, most)
            start, block = start + block * lane.row, _BLOCK

    def _read(self, samples: Places) -> Batch:
        batch = {name: torch.from_numpy(rows) for name, rows in self.data.batch(samples.reshape(-1)).items()}
        return {name: streams.pin(rows) for name, rows in batch.items()} if self._pin else batch

    def state_dict(self) -> dict[str, int | str]:
        """Return the state to resume from, on any number of ranks and threads. JSON-able."""
        return {
            "taken": self.consumed,
            "seed": self.stream.seed,
            "length": self.stream.length,
            "fingerprint": self.data.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go to a saved position. An iteration that has begun goes on from there.

        Raises:
            CheckpointError: the data is other data ("data-changed").
        """
        check_state(state, self.state_dict())
        self.stream = SampleStream(self.stream.length, int(state["seed"]), self.stream.shuffle)
        self.consumed = int(state["taken"])


def check_state(saved: Mapping[str, int | str], now: Mapping[str, int | str]) -> None:
    """Raise CheckpointError ("data-changed") when a saved position is one of other data."""
    changed = [name for name in ("length", "fingerprint") if name in saved and saved[name] != now.get(name)]
    if changed:
        words = {"length": "{} samples then, {} now", "fingerprint": "fingerprint {} then, {} now"}
        differences = ", ".join(words[name].format(saved[name], now.get(name)) for name in changed)
        raise CheckpointError(
            f"the checkpoint was written with other data: {differences}",
            code="data-changed",
            fix="Give the same data, or begin its first epoch: load_checkpoint(..., load_data_state=False), or no load_state_dict().",
        )
