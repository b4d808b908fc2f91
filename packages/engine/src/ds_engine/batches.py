"""Where the microbatches of a step come from: the engine's own loader, one that the caller put in its place, or what a call brings.

Words: the *own* loader resumes where a checkpoint was written; the position of any other is the caller's. A *stream* is an iterator
that goes on from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any

from ds_config.errors import PlanError
from ds_engine.loader import PackedLoader, ResumableLoader

__all__ = ["BatchSource"]


class BatchSource:
    """The training data of one engine.

    Attributes:
        consumed: Samples taken from it by the steps that are complete.
    """

    def __init__(self, loader: ResumableLoader | None) -> None:
        self._resumable, self.consumed = loader, 0
        self._brought: Iterable[Any] | None = None
        self._stream: Iterator[Any] | None = None  # of the own loader
        self._lent: Iterator[Any] | None = None  # `draw_from`: it outlives checkpoints
        self._borrowed: tuple[Iterable[Any], Iterator[Any]] | None = None  # what a call brought last, and where it is
        self._waited_s = 0.0

    @property
    def loader(self) -> Any:
        """What microbatches are read from by default; None where every call brings them."""
        return self._resumable if self._brought is None else self._brought

    def replace(self, loader: Iterable[Any] | None) -> None:
        """Read another loader from now on; of another class its position is not saved."""
        if isinstance(loader, ResumableLoader):
            self._resumable, self._brought, self.consumed = loader, None, loader.consumed
        else:
            self._resumable, self._brought, self.consumed = None, loader, 0
        self._stream = self._lent = None

    def draw_from(self, data: Iterator[Any] | Iterable[Any]) -> None:
        """Read `data` where a call brings none: an iterator to its end, anything else again and again."""
        self._lent = data if isinstance(data, Iterator) else _forever(data)

    @property
    def has_data(self) -> bool:
        """Whether a call may bring none."""
        return self._lent is not None or self.loader is not None

    def restart(self) -> None:
        """Begin the next stream where the loader is, not where it was read ahead to."""
        self._stream = None

    def close(self) -> None:
        """Let go of what is being read."""
        self._stream = self._lent = self._borrowed = None

    def rebatch(self, micro: int, train: int) -> None:
        """Set the loader's microbatches to `micro` samples, in steps of `train` samples over all ranks."""
        if self._resumable is not None:
            self._resumable.rebatch(micro, train)
            self._stream = None

    def stream(self, brought: Iterator[Any] | Iterable[Any] | None = None) -> Iterator[Any]:
        """Return the iterator of the next microbatches: of the data passed to a call, else the default.

        Raises:
            PlanError: there is no data ("data-missing").
        """
        source = brought if brought is not None else self._brought if self._lent is None else self._lent
        if source is None and self._stream is not None:
            return self._stream
        if isinstance(source, Iterator):
            return self._timed(source)
        if source is not None:
            if self._borrowed is None or self._borrowed[0] is not source:
                self._borrowed = source, _forever(source)
            return self._timed(self._borrowed[1])
        if self._resumable is None:
            raise PlanError(
                "train_batch() has no data: initialize() was called without training_data",
                code="data-missing",
                fix="Pass training_data= to initialize(), or an iterator to train_batch().",
            )
        self._stream = self._resumable.forever()
        return self._stream

    def samples(self) -> int | None:
        """Samples that the engine's loader returned since the last complete step, where their number differs from step to step."""
        if isinstance(self._resumable, PackedLoader) and self._resumable.consumed > self.consumed:
            return self._resumable.samples_between(self.consumed, self._resumable.consumed)
        return None

    def complete(self) -> float:
        """Commit the batches taken so far to the finished step. Returns the seconds spent waiting for data."""
        waited, self._waited_s = self._waited_s, 0.0
        if self._resumable is not None:
            waited, self._resumable.waited_s = waited + self._resumable.waited_s, 0.0
        self.consumed = 0 if self._resumable is None else self._resumable.consumed
        return waited

    @property
    def epoch(self) -> int:
        """Whole passes over the own loader."""
        return 0 if self._resumable is None else self._resumable.epoch

    def _timed(self, data: Iterator[Any]) -> Iterator[Any]:
        """Yield from `data`, counting the time for each item as waiting time."""
        while True:
            begun = perf_counter()
            try:
                batch = next(data)
            except StopIteration:
                return
            self._waited_s += perf_counter() - begun
            yield batch


def _forever(data: Iterable[Any]) -> Iterator[Any]:
    """Repeat `data` endlessly; stop when a pass yields nothing."""
    empty = False
    while not empty:
        empty = True
        for item in data:
            empty = False
            yield item
