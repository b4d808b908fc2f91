"""What the watchdogs of a job tell each other, over their own connection to the job's store.

Who can connect to the store can write to it. Where the job has a secret (`secret.job_secret`), each text carries a code made with it,
and a text without a valid one counts as not written: a process outside the job cannot end it by an alarm.

Keys, below a prefix of their own:

    job         the job's name for its dumps: that of the rank that proposed one first
    host/H      what the ranks of host H need to open each other's rings, one JSON text a line
    state/R     once a second: digests of its operations, and until when it asked for patience
    left/R      rank R communicates no more; `left` counts them, and goodbye/N is what the Nth of them said
    alarm       the first rank that gave up waiting, and what for; it makes all ranks report
    report/R    what rank R does, for everyone's line
    hung-up/R   rank R uses the store no more, because rank 0 left
    seen/R      rank R has said its line; nobody ends before all have
"""

from __future__ import annotations

import hmac
import json
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ds_comm.watch.secret import seal
from ds_comm.watch.stamp_ring import Stamp
from ds_comm.watch.verdict import RankReport

__all__ = ["SideChannel", "StoreSilentError"]

_log = logging.getLogger(__name__)
_PATIENCE = timedelta(seconds=5)  # for one answer of the store
_POLL_S = 0.02
_NAME = re.compile(r"[0-9A-Za-z-]{1,64}")


class StoreSilentError(RuntimeError):
    """The store gave no answer, and may give one yet: the process that serves it is stopped, or its host is away."""


class _Impatient:
    """A store each of whose calls ends after `_PATIENCE`, which torch's own limit is for few of them.

    The calls are made by a thread, one after another: what is asked while an answer is late is not waited for.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store, self._calls = store, queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]()
        self._last: Future[Any] | None = None
        self._asking = threading.Lock()  # of the training thread, which may ask for patience, and of the watchdog's
        self._thread = threading.Thread(target=self._run, name="ds-comm-store", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread, after the call that it makes."""
        self._calls.put(None)
        if self._last is None or self._last.done():
            self._thread.join()

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, answer = asked
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self._ask(partial(getattr(self._store, name), *args))

    def _ask(self, call: Callable[[], Any]) -> Any:
        with self._asking:
            if self._last is None or self._last.done():
                self._last = Future()
                self._calls.put((call, self._last))
                if futures.wait([self._last], _PATIENCE.total_seconds()).done:
                    return self._last.result()
        raise StoreSilentError("the job's store gives no answer")


class SideChannel:
    """Typed access to the keys, until `close`. Any method raises RuntimeError (torch's DistError) when the store is gone, or silent.

    Rank 0 usually serves the store. When it leaves while others work on, they `hang_up` first: torch prints pages where a
    connection breaks.
    """

    def __init__(self, store: dist.Store, rank: int, secret: bytes = b"") -> None:
        prefixed = dist.PrefixStore("ds_comm/watch", store)
        prefixed.set_timeout(_PATIENCE)
        self._open: Any = _Impatient(prefixed)  # Any: torch's stubs lack append
        self._rank, self._secret = rank, secret

    def _seal(self, key: str, value: object) -> str:
        text = json.dumps(value)
        return f"{seal(self._secret, key, text)} {text}" if self._secret else text

    def _opened(self, key: str, data: bytes) -> Any:
        """Verify and decode the value of `key`; return None where the value is not from this job."""
        text = data.decode(errors="replace")
        if self._secret:
            code, _, text = text.partition(" ")
            if not hmac.compare_digest(code, seal(self._secret, key, text)):
                _log.warning("something that is not of this job wrote %r to its store; it is not believed", key)
                return None
        return json.loads(text)

    def _read(self, key: str) -> Any:
        return self._opened(key, self._store.get(key)) if self._store.check([key]) else None

    @property
    def _store(self) -> Any:
        if self._open is None:
            raise RuntimeError("rank 0 has ended, and the job's store with it")
        return self._open

    def hang_up(self) -> None:
        """Announce that this rank no longer uses the store, and stop using the store."""
        self.tell("hung-up", True)
        self.close()

    def close(self) -> None:
        """Use the store no more."""
        if self._open is not None:
            self._open.end()
            self._open = None

    def tell(self, key: str, value: object) -> None:
        """Publish this rank's `key`."""
        name = f"{key}/{self._rank}"
        self._store.set(name, self._seal(name, value))

    def ask(self, key: str, rank: int) -> Any:
        """Return the value that rank `rank` published under `key`; None when there is none."""
        return self._read(f"{key}/{rank}")

    def agree_on_job(self, proposed: str) -> str:
        """Agree on the job name that all ranks of this world use: the proposal of the first rank to ask.

        The name becomes part of a file's name.
        """
        agreed = self._opened("job", self._store.compare_set("job", "", self._seal("job", proposed)))
        return agreed if isinstance(agreed, str) and _NAME.fullmatch(agreed) else proposed

    def introduce(self, host: str, hello: Mapping[str, Any]) -> None:
        """Tell the ranks of this host how to open this rank's ring."""
        name = f"host/{host}"
        self._store.append(name, self._seal(name, {"rank": self._rank, **hello}) + "\n")

    def introduced(self, host: str) -> list[dict[str, Any]]:
        """Return the introductions that the ranks of this host published so far."""
        name = f"host/{host}"
        lines = self._store.get(name).splitlines() if self._store.check([name]) else []
        return [hello for line in lines if (hello := self._opened(name, line)) is not None]

    def raise_alarm(self, reason: Mapping[str, Any]) -> None:
        """Make every rank report; the first alarm of a job counts."""
        if self.alarm() is None:
            self._store.set("alarm", self._seal("alarm", reason))

    def alarm(self) -> Any:
        """Return the alarm, or None while no rank raised an alarm."""
        return self._read("alarm")

    def leave(self, why: str, heads: Mapping[str, int]) -> None:
        """Publish that this rank leaves and why; `heads` is its last mark in each group."""
        number = self._store.add("left", 1)
        name = f"goodbye/{number}"
        self._store.set(name, self._seal(name, {"rank": self._rank, "why": why, "heads": dict(heads)}))
        self.tell("left", True)

    def left(self, known: int) -> list[tuple[int, str, dict[str, int]]]:
        """Return the departures after the first `known`: rank, reason, and the last mark in each group."""
        departures = []
        for number in range(known + 1, int(self._store.add("left", 0)) + 1):
            note = self._read(f"goodbye/{number}")
            if note is None:
                break  # it is about to say it
            departures.append((int(note["rank"]), str(note["why"]), dict(note["heads"])))
        return departures

    def report(self, report: RankReport) -> None:
        """Publish this rank's report."""
        self.tell("report", asdict(report))

    def collect(self, ranks: Iterable[int], limit_s: float) -> dict[int, RankReport]:
        """Reports of these ranks, as many as come within the limit."""
        missing, reports = set(ranks), {}
        deadline = time.monotonic() + limit_s
        while missing:
            for rank in sorted(missing):
                data = self.ask("report", rank)
                if data is not None:
                    reports[rank] = _report(data)
            missing -= set(reports)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S if missing else 0)
        return reports

    def wait_for(self, keys: Iterable[str], ranks: Iterable[int], limit_s: float) -> None:
        """Return when each of these ranks has told one of these keys, or the limit is over."""
        deadline = time.monotonic() + limit_s
        missing = [[f"{key}/{rank}" for key in keys] for rank in ranks]
        while missing := [names for names in missing if not any(self._store.check([name]) for name in names)]:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)


def _report(data: Mapping[str, Any]) -> RankReport:
    stamps = tuple(Stamp(**{**stamp, "shape": tuple(stamp["shape"])}) for stamp in data["stamps"])
    return RankReport(**{**data, "stamps": stamps})
