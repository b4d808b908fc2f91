"""A sink that another thread writes to: a slow disk or service costs a step no more than putting its records down."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque

from ds_monitor.record import Measurement, RecordKind
from ds_monitor.recording import Sink

__all__ = ["BackgroundSink"]

LIMIT = 100_000
"""Records that wait for a sink; about 30 MB. The oldest of more are left out."""
CLOSE_S = 30.0
"""Longest time that the end of a run waits for sinks that do not answer, all together."""

EVERY_S = 0.2
"""Least time between two hand-overs: waking a thread takes as long as writing ten records."""

_Batch = list[Measurement | int]
"""In order; a number is the end of that step."""


class BackgroundSink:
    """Hands whole steps to `sink` on a thread of its own, five times a second; an event is handed over at once.

    What `sink` raises is raised by the next call here, so it is dropped and named like any other. A process that is killed loses
    what was reported in the last fifth of a second, and what the sink had not written yet.

    Args:
        sink: called from one thread only, which begins with the first record.
        limit: records and ends of steps that may wait; when a sink falls behind further, the oldest are left out, with one warning.
    """

    def __init__(self, sink: Sink, *, limit: int = LIMIT) -> None:
        self.sink, self._limit = sink, limit
        self.label = type(sink).__name__
        self.outlives_process = bool(getattr(sink, "outlives_process", False))
        self.left_out = 0
        self._batch: _Batch = []
        self._handed_s = float("-inf")
        self._waiting: deque[_Batch] = deque()
        self._num_waiting = 0
        self._ready = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._closed_by_s: float | None = None

    def write(self, record: Measurement) -> None:
        """Keep it until a step ends."""
        if self._failure is not None:
            self._raise()
        self._batch.append(record)
        if record.kind is RecordKind.EVENT:
            self._hand_over()

    def end_step(self, step: int) -> None:
        """Pass the records collected so far to the writing thread, at most once per `EVERY_S` seconds."""
        if self._failure is not None:
            self._raise()
        self._batch.append(step)
        if time.monotonic() - self._handed_s >= EVERY_S:
            self._hand_over()

    def begin_close(self) -> None:
        """Let the thread write what waits and end; `close` waits for it. Sinks that begin together wait together."""
        if self._closed_by_s is not None:
            return
        if self._failure is None and self._batch:
            self._hand_over()
        self._closed_by_s = time.monotonic() + CLOSE_S
        with self._ready:
            self._closing = True
            self._ready.notify()

    def close(self) -> None:
        """Wait until all is written, and end the thread.

        Raises:
            TimeoutError: the sink did not take what was waiting within 30 s of `begin_close`; it is left behind.
        """
        self.begin_close()
        thread = self._thread
        if thread is None:
            self.sink.close()
            return
        thread.join(max(0.0, (self._closed_by_s or 0.0) - time.monotonic()))
        if thread.is_alive():
            raise TimeoutError(f"{self.label} did not write {self._num_waiting} records in {CLOSE_S:g} s")
        if self._failure is not None:
            self._raise()

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _hand_over(self) -> None:
        batch, self._batch, self._handed_s = self._batch, [], time.monotonic()
        with self._ready:
            if self._closing:
                return
            if self._thread is None:
                # A daemon: a service that hangs must not keep a finished run alive. The end of the run waits in `close`.
                self._thread = threading.Thread(target=self._run, name=f"ds-monitor {self.label}", daemon=True)
                self._thread.start()
            self._waiting.append(batch)
            self._num_waiting += len(batch)
            while self._num_waiting > self._limit and len(self._waiting) > 1:
                self._leave_out(len(self._waiting.popleft()))
            self._ready.notify()

    def _leave_out(self, count: int) -> None:
        self._num_waiting -= count
        if self.left_out == 0:
            text = f"monitor sink {self.label} is slower than the run: its oldest waiting records are left out"
            warnings.warn(text, RuntimeWarning, stacklevel=6)
        self.left_out += count

    def _run(self) -> None:
        try:
            while (batch := self._take()) is not None:
                for item in batch:
                    if isinstance(item, int):
                        self.sink.end_step(item)
                    else:
                        self.sink.write(item)
        except Exception as error:
            self._failure = error
        try:
            self.sink.close()
        except Exception as error:
            self._failure = self._failure or error
        with self._ready:
            self._closing = True  # what comes now has no reader

    def _take(self) -> _Batch | None:
        with self._ready:
            while not self._waiting and not self._closing:
                self._ready.wait()
            if not self._waiting:
                return None
            batch = self._waiting.popleft()
            self._num_waiting -= len(batch)
            return batch
