"""What the watchdogs of a job tell each other, over their own connection to the job's store.

Keys, below a prefix of their own:

    host/H      what the ranks of host H need to open each other's rings, one JSON text a line
    state/R     once a second: digests of its operations, and until when it asked for patience
    left/R      rank R communicates no more; `left` counts them, and goodbye/N is what the Nth of them said
    alarm       the first rank that gave up waiting, and what for; it makes all ranks report
    report/R    what rank R does, for everyone's line
    hung-up/R   rank R uses the store no more, because rank 0 left
    seen/R      rank R has said its line; nobody ends before all have
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_comm.ring import Stamp
from ds_comm.verdict import Report

__all__ = ["SideChannel"]

_PATIENCE = timedelta(seconds=5)  # for one answer of the store
_POLL_S = 0.02


class SideChannel:
    """Typed access to the keys. Any method raises RuntimeError (torch's DistError) when the store is gone.

    Rank 0 usually serves the store. When it leaves while others work on, they `hang_up` first: torch prints pages where a
    connection breaks.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._open: Any = dist.PrefixStore("ds_comm/watch", store)  # Any: torch's stubs lack append
        self._open.set_timeout(_PATIENCE)
        self._rank = rank

    @property
    def _store(self) -> Any:
        if self._open is None:
            raise RuntimeError("rank 0 has ended, and the job's store with it")
        return self._open

    def hang_up(self) -> None:
        """Say that this rank uses the store no more, and do not."""
        self.tell("hung-up", True)
        self._open = None

    def tell(self, key: str, value: object) -> None:
        """Publish this rank's `key`."""
        self._store.set(f"{key}/{self._rank}", json.dumps(value))

    def ask(self, key: str, rank: int) -> Any:
        """What rank `rank` published; None when nothing."""
        name = f"{key}/{rank}"
        return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def introduce(self, host: str, hello: Mapping[str, Any]) -> None:
        """Tell the ranks of this host how to open this rank's ring."""
        self._store.append(f"host/{host}", json.dumps({"rank": self._rank, **hello}) + "\n")

    def introduced(self, host: str) -> list[dict[str, Any]]:
        """What the ranks of this host told so far."""
        name = f"host/{host}"
        return list(map(json.loads, self._store.get(name).splitlines())) if self._store.check([name]) else []

    def raise_alarm(self, reason: Mapping[str, Any]) -> None:
        """Make every rank report; the first alarm of a job counts."""
        self._store.compare_set("alarm", "", json.dumps(reason))

    def alarm(self) -> Any:
        """The alarm; None while there is none."""
        return json.loads(self._store.get("alarm")) if self._store.check(["alarm"]) else None

    def leave(self, why: str, heads: Mapping[str, int]) -> None:
        """Say goodbye; `heads` is the last mark in each group that this rank came to."""
        number = self._store.add("left", 1)
        self._store.set(f"goodbye/{number}", json.dumps({"rank": self._rank, "why": why, "heads": dict(heads)}))
        self.tell("left", True)

    def left(self, known: int) -> list[tuple[int, str, dict[str, int]]]:
        """Who said goodbye after the first `known` of them: rank, why, and the last mark in each group."""
        found = []
        for number in range(known + 1, int(self._store.add("left", 0)) + 1):
            if not self._store.check([f"goodbye/{number}"]):
                break  # it is about to say it
            note = json.loads(self._store.get(f"goodbye/{number}"))
            found.append((int(note["rank"]), str(note["why"]), dict(note["heads"])))
        return found

    def report(self, report: Report) -> None:
        """Publish this rank's report."""
        self.tell("report", asdict(report))

    def collect(self, ranks: Iterable[int], limit_s: float) -> dict[int, Report]:
        """Reports of these ranks, as many as come within the limit."""
        missing, found = set(ranks), {}
        deadline = time.monotonic() + limit_s
        while missing:
            for rank in sorted(missing):
                data = self.ask("report", rank)
                if data is not None:
                    found[rank] = _report(data)
            missing -= set(found)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S if missing else 0)
        return found

    def wait_for(self, keys: Iterable[str], ranks: Iterable[int], limit_s: float) -> None:
        """Return when each of these ranks has told one of these keys, or the limit is over."""
        deadline = time.monotonic() + limit_s
        missing = [[f"{key}/{rank}" for key in keys] for rank in ranks]
        while missing := [names for names in missing if not any(self._store.check([name]) for name in names)]:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)


def _report(data: Mapping[str, Any]) -> Report:
    stamps = tuple(Stamp(**{**stamp, "shape": tuple(stamp["shape"])}) for stamp in data["stamps"])
    return Report(**{**data, "stamps": stamps})
