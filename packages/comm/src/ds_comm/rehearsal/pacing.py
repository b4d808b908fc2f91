"""Waiting on behalf of ranks that are not there: what a collective does to this rank's memory, and then the time its links take.

All groups of a rank share one budget: operations use the links one after the other, in the order in which they were called, as the
bytes of two of them at once would take as long. On a CPU a thread does it, and a second one lets those that have left the links arrive: their
latencies overlap. On a device it is a stream of high priority, on which a kernel
spins; as many of its blocks as a real collective occupies multiprocessors.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_comm.rehearsal.fabric import Passage
from ds_comm.rehearsal.peer_skew import PeerSkew
from ds_comm.rehearsal.traffic import LinkTransfer

__all__ = ["HostPacer", "PacedWork", "Pacer", "Trip"]

_CHUNK_BYTES = 256 << 10
_SLEEP_MARGIN_S = 100e-6
"""`sleep` returns late by up to this; the rest is waited by copying or yielding."""


@dataclass(slots=True)
class Trip:
    """One operation on its way.

    Attributes:
        passage: What it takes of time, of the links and of a core.
        move: What it does to this rank's memory.
        tensors: Its results. Records are kept until the end of a rehearsal, memory is not: see `release_memory`.
        ready_s: When the last of the ranks has come to it.
    """

    op: str
    group: str
    unit: str
    ranks: int
    nbytes: int
    passage: Passage
    move: Callable[[], None]
    tensors: Sequence[Tensor]
    ready_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    exposed_s: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def release_memory(self) -> None:
        """Drop the references to tensors. Afterwards only the work holds the results, as a real backend's does."""
        self.move, self.tensors = _nothing, ()


def _sleep_until(then_s: float) -> None:
    if (idle := then_s - _SLEEP_MARGIN_S / 2 - time.perf_counter()) > 0:
        time.sleep(idle)


def _nothing() -> None:
    """Do nothing: the operation has moved its bytes."""


class Pacer(ABC):
    """What both pacers share: the clock and the records.

    Attributes:
        records: Of all operations that have ended, in the order of their ends.
    """

    def __init__(self) -> None:
        self.records: list[LinkTransfer] = []

    def now(self) -> float:
        """Return the time on the clock of `time.perf_counter`, which records have."""
        return time.perf_counter()

    @abstractmethod
    def start(self, trip: Trip) -> dist.Work:
        """Send an operation off; the work waits for it."""

    @abstractmethod
    def settle(self) -> list[LinkTransfer]:
        """Wait for all operations and return the records of all that ended."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End threads, if there are any."""

    def note(self, trip: Trip) -> None:
        """Keep the record of an operation."""
        fields = (trip.op, trip.group, trip.unit, trip.ranks, trip.nbytes, trip.start_s, trip.end_s, trip.exposed_s)
        self.records.append(LinkTransfer(*fields))


class HostPacer(Pacer):
    """A thread that carries one operation after the other, and computes as long for each as a transport does.

    Args:
        skew: Of the other ranks; None: they come to every operation when this one does.
    """

    def __init__(self, skew: PeerSkew | None = None) -> None:
        super().__init__()
        self._skew = skew
        self._landing: queue.SimpleQueue[Trip | None] = queue.SimpleQueue()
        self._lander: threading.Thread | None = None
        self._queue: queue.SimpleQueue[Trip | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waited: list[Trip] = []
        self._scratch = torch.zeros(2, _CHUNK_BYTES, dtype=torch.uint8, device="cpu")

    def start(self, trip: Trip) -> dist.Work:
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry, name="ds-rehearsal", daemon=True)
            self._thread.start()
        work = PacedWork(trip, self)
        now_s = self.now()
        trip.ready_s = now_s if self._skew is None else now_s + self._skew.issue((trip.op, trip.nbytes), now_s)
        self._queue.put(trip)
        self._waited.append(trip)
        return work

    def waited(self, trip: Trip, began_s: float) -> None:
        """Count what a caller has waited for an operation since `began_s`."""
        now_s = self.now()
        trip.exposed_s += now_s - began_s
        if self._skew is not None:
            self._skew.wait(began_s, now_s, trip.end_s)

    def settle(self) -> list[LinkTransfer]:
        waited, self._waited = self._waited, []
        for trip in waited:
            trip.done.wait()
            self.note(trip)
        return self.records

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        if self._lander is not None:
            self._landing.put(None)
            self._lander.join()
            self._lander = None

    def _carry(self) -> None:
        torch.set_num_threads(1)
        while (trip := self._queue.get()) is not None:
            _sleep_until(trip.ready_s)
            trip.start_s, busy_from_s = self.now(), time.thread_time()
            try:
                with torch.no_grad():
                    trip.move()
                self._pass(trip.start_s + trip.passage.link_s, busy_from_s + trip.passage.busy_s)
            except BaseException as error:  # whoever waits for it raises it
                trip.error = error
            trip.release_memory()
            if trip.start_s + trip.passage.seconds > self.now() + _SLEEP_MARGIN_S:
                self._land(trip)
            else:
                self._arrive(trip)

    def _land(self, trip: Trip) -> None:
        if self._lander is None:
            self._lander = threading.Thread(target=self._let_arrive, name="ds-rehearsal-landing", daemon=True)
            self._lander.start()
        self._landing.put(trip)

    def _let_arrive(self) -> None:
        while (trip := self._landing.get()) is not None:
            _sleep_until(trip.start_s + trip.passage.seconds)
            self._arrive(trip)

    def _arrive(self, trip: Trip) -> None:
        trip.end_s = self.now()
        trip.done.set()

    def _pass(self, until_s: float, busy_until_s: float) -> None:
        """Let the time pass until `until_s`, and until this thread has computed until `busy_until_s` on its own clock.

        Who computes on the same core meanwhile delays the thread, as it delays a transport.
        """
        idle_until = until_s - max(0.0, busy_until_s - time.thread_time()) - _SLEEP_MARGIN_S
        while (idle := idle_until - self.now()) > 0:
            time.sleep(idle)
        while self.now() < until_s or time.thread_time() < busy_until_s:
            self._scratch[0].copy_(self._scratch[1])  # lets other threads of Python run


class PacedWork(dist.Work):
    """An operation that a thread carries; `wait` blocks the caller until its end."""

    def __init__(self, trip: Trip, pacer: HostPacer) -> None:
        super().__init__()
        self._trip, self._pacer, self._results = trip, pacer, list(trip.tensors)

    def is_completed(self) -> bool:
        return self._trip.done.is_set()

    def is_success(self) -> bool:
        return self._trip.done.is_set() and self._trip.error is None

    def wait(self, timeout: Any = None) -> bool:
        trip, began_s = self._trip, self._pacer.now()
        trip.done.wait()
        self._pacer.waited(trip, began_s)
        if trip.error is not None:
            raise trip.error
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return list(self._results)

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()  # a future that another thread fulfils would run the callbacks of DDP there
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future
