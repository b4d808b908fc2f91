"""The thread that ends silent hangs: it watches this rank's waits, compares ranks, and lets each say what it sees.

Started by `init_distributed` in a world of more than one rank. Off the path of training: it reads rings, never tensors,
and talks over its own connection to the job's store.

    five times a second   how long has a thread of this rank been blocked? (20 us)
    once a second         publish digests of the last operations, compare with one other rank, check for an alarm
    at the deadline       raise the alarm: every rank reports, reads the others' reports, prints one line, writes a dump
                          and ends with EXIT_CODE

An alarm is raised before the deadline when a rank that others wait for has ended, or when digests show that ranks did
different operations without blocking. `extend_timeout` is how a rank says that it will be long.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_accel import streams
from ds_comm.watch.alarms import SideChannel, StoreSilentError
from ds_comm.watch.call_sites import user_frame
from ds_comm.watch.dumps import dump_name, new_job
from ds_comm.watch.peer_rings import Peer, open_peer
from ds_comm.watch.stamp_ring import Stamp, StampRing
from ds_comm.watch.torch_calls import TorchCalls
from ds_comm.watch.verdict import Finding, RankReport, differs, judge, judge_wait

__all__ = ["DEFAULT_DEADLINE_S", "EXIT_CODE", "WatchSettings", "Watchdog"]

_log = logging.getLogger(__name__)
DEFAULT_DEADLINE_S = 60.0
EXIT_CODE = 86
_SUSPECT_S = 0.5  # a wait of this length makes the watchdog check the others
_REPORTED = 48  # stamps in a report; the dump has all
_MEET_S = 1.0
_JOINING_S = 120.0  # after which no more rank of this host is expected to introduce itself
_COLLECT_S = 2.5
_SEEN_S = 1.0
_MANY_RANKS = 256  # above it only the rank that raised the alarm reads all reports


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """How patient to be, and what to do at the end.

    Attributes:
        deadline_s: How long a rank may be blocked in one operation.
        warn_s: After which it says so once, where that is before the deadline.
        local_size: Ranks of this host, as far as known.
        dump_dir: Where each rank writes what it knew.
        end: Called at the end with the exit code; ends the process.
    """

    deadline_s: float = DEFAULT_DEADLINE_S
    warn_s: float = DEFAULT_DEADLINE_S
    local_size: int = 1
    dump_dir: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / f"ds-comm-{os.getuid()}")
    end: Callable[[int], Any] = os._exit

    @property
    def poll_s(self) -> float:
        return min(0.2, self.deadline_s / 10)

    @property
    def tick_s(self) -> float:
        return min(1.0, self.deadline_s / 4)


class Watchdog:
    """One rank's watcher. `start`, then `stop`; in between it may end the process.

    Attributes:
        groups: Ranks of each group that this rank has stamped an operation of, by torch's name. The recorder fills it.
    """

    def __init__(
        self,
        ring: StampRing,
        side: SideChannel,
        place: tuple[int, int],
        settings: WatchSettings,
        torch_calls: TorchCalls | None = None,
    ) -> None:
        """`place` is this rank and the size of the world; without `torch_calls` only what `ring` has is watched."""
        self.groups: dict[str, tuple[int, ...]] = {}
        self._torch_calls = torch_calls
        self._ring, self._side, self._settings = ring, side, settings
        self._rank, self._size = place
        self._left: dict[int, tuple[str, dict[str, int]]] = {}  # ranks that said goodbye, with what they said
        self._peers: dict[int, Peer | None] = {self._rank: None}
        self._digests: dict[str, dict[int, int]] = {}
        # By group: operations whose end only the device knows, in the order of its stream.
        self._on_device: dict[str, deque[tuple[int, Callable[[], bool]]]] = {}
        self._relaxed = False
        self._device = streams.current_device()
        self._wait_until_s = 0.0  # as `_pause_until_s`, for the waits of this rank itself
        self._pause_until_s = 0.0  # on the clock of time.time(), which hosts share well enough
        self._next_tick_s = 0.0
        self._joining_until_s = time.monotonic() + _JOINING_S
        self._ticks = 0
        self._warned_s = -1.0
        self._launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._host = socket.gethostname()
        self._store_error = ""
        self._job = new_job()
        self._stop, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ds-comm-watchdog", daemon=True)
        self._world = weakref.ref(dist.group.WORLD) if dist.group.WORLD is not None else None

    def start(self) -> None:
        """Begin to watch, once all ranks of this host are there: what one of them does from now on survives it."""
        self._job = self._side.agree_on_job(self._job)
        self._side.introduce(self._host, {"pid": os.getpid(), "fd": self._ring.fd})
        deadline = time.monotonic() + _MEET_S
        while len(self._peers) < self._settings.local_size and time.monotonic() < deadline:
            self._connect_peers()
            time.sleep(0.005)
        self._thread.start()

    @property
    def watching(self) -> bool:
        """Whether it still runs, for the process groups that there are; it ends by itself with torch's default one."""
        return self._thread.is_alive() and not self._world_is_over()

    def stop(self, why: str) -> None:
        """Tell the others that this rank communicates no more, and end the thread."""
        if not self._stop.is_set():
            self._stop.set()
            over = not self._thread.is_alive()
            self._thread.join(timeout=5)
            if not over:
                self._goodbye(why)

    @contextmanager
    def patience(self, seconds: float, own_waits: bool = True) -> Iterator[None]:
        """Let the others wait for this rank that long; where `own_waits`, this rank may wait so long as well."""
        before = self._pause_until_s
        if own_waits:
            self._wait_until_s = time.time() + seconds
        self._ask_until(time.time() + seconds)
        try:
            yield
        finally:
            # Who waited that long is past its deadline, and this rank needs a moment to come.
            after_s = max(before, time.time() + self._settings.deadline_s)
            self._wait_until_s = after_s if own_waits else self._wait_until_s
            self._ask_until(after_s)

    def _ask_until(self, when_s: float) -> None:
        self._pause_until_s = when_s
        if self.watching:  # when the process groups are gone, nobody waits for this rank
            try:
                self._publish()
            except (
                RuntimeError
            ) as error:  # as in _run: a store that is gone is no reason to end what works, such as a save
                self._store_error = str(error).splitlines()[0]

    def follow(self, slot: int, key: str, done: Callable[[], bool]) -> None:
        """Stamp the end of an operation of group `key` once `done` returns True; only the device knows that end."""
        self._on_device.setdefault(key, deque()).append((slot, done))

    def explain(self, wait: Stamp, limit_s: float = 2.0) -> Finding | None:
        """Return why an operation of this rank failed, if another rank explains it; wait briefly for its report.

        None when the watched world has ended: the last reports of its ranks explain no failure of a later world.
        """
        if self._world_is_over():
            return None
        deadline = time.monotonic() + limit_s
        while True:
            if self._ending.is_set():  # the operation failed because another rank said its line and ended first
                time.sleep(_COLLECT_S + 2 * _SEEN_S)
            finding = self._blame_different(wait) or self._blame_gone(wait)
            if finding is not None or time.monotonic() > deadline:
                return finding
            time.sleep(0.05)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with streams.on_device(self._device):  # events that it drops last would make a context on device 0
            self._watch_all()

    def _watch_all(self) -> None:
        while not self._stop.wait(self._settings.poll_s):
            if self._world_is_over():
                self._goodbye("destroyed its process groups")
                return
            blocked_s = 0.0
            try:
                self._follow_device()
                since = self._ring.blocked_since() or self._torch_blocked_since()
                blocked_s = time.monotonic() - since if since else 0.0
                self._look(blocked_s)
            except StoreSilentError as error:
                self._store_error = str(
                    error
                )  # it is waited for as the ranks are, and whoever serves it may be why this one waits
                if blocked_s > self._settings.deadline_s and time.time() > self._wait_until_s:
                    self._end(
                        {"rank": self._rank, "why": f"rank {self._rank} was blocked for {blocked_s:.1f} s, and {error}"}
                    )
            except RuntimeError as error:
                # Rank 0 or the launcher serves the store; with them it is gone. That is no reason to end a rank that
                # works, but one that waits will not be released any more.
                self._store_error = str(error).splitlines()[0]
                if blocked_s > min(self._settings.deadline_s, 2.0):
                    self._end({"rank": self._rank, "why": "the job's store is gone"})
            except Exception:  # whatever is wrong with one check, the next may be the one that ends a hang
                _log.warning("the watchdog of rank %d could not check the others", self._rank, exc_info=True)

    def _torch_blocked_since(self) -> float:
        return 0.0 if self._torch_calls is None else self._torch_calls.blocked_since()

    def _world_is_over(self) -> bool:
        return self._world is not None and (self._world() is None or self._world() is not dist.group.WORLD)

    def _follow_device(self) -> None:
        if self._on_device and not self._relaxed:
            self._relaxed = True
            streams.relax_capture()
        # The stream of a group runs them in order, so only the first can be the one that does not move, since it became the
        # first. Streams of different groups run in any order.
        for queue in list(self._on_device.values()):
            done = False
            while queue and _is_over(queue[0][1]):
                self._ring.ended(queue.popleft()[0])
                done = True
            if done and queue:
                self._ring.waiting(queue[0][0])

    def _look(self, blocked_s: float) -> None:
        now = time.monotonic()
        if now < self._next_tick_s and blocked_s < _SUSPECT_S:
            return
        self._next_tick_s = now + self._settings.tick_s
        if now < self._joining_until_s:
            self._connect_peers()
        self._read_goodbyes()
        if 0 in self._left and self._rank and not self._launcher_serves:
            self._side.hang_up()
        if self._side.alarm() is None:
            why = self._reason(blocked_s)
            if why is None:
                self._publish()
                return
            self._side.raise_alarm({"rank": self._rank, "why": why})
        self._end(self._side.alarm())

    def _reason(self, blocked_s: float) -> str | None:
        """Return why this rank raises an alarm now; None if there is no reason."""
        wait = self._longest_wait() if blocked_s > _SUSPECT_S else None
        if wait is not None:
            finding = self._blame_gone(wait)
            if finding is not None:
                return finding.line
            if self._settings.warn_s < blocked_s < self._settings.deadline_s:
                self._warn(wait, blocked_s)
            if blocked_s > self._settings.deadline_s and not self._asked_for_patience(self.groups.get(wait.key, ())):
                return f"rank {self._rank} was blocked for {blocked_s:.1f} s in {wait}"
        return self._compare()

    def _warn(self, wait: Stamp, blocked_s: float) -> None:
        # The same wait is told once; torch's times come from another clock, each time a little off.
        if abs(self._warned_s - wait.waited_s) < 1.0:
            return
        self._warned_s = wait.waited_s
        limit_s = self._settings.deadline_s
        sys.stderr.write(
            f"[ds-comm] rank {self._rank} waits since {blocked_s:.0f} s for {wait} at {user_frame(wait.thread)}; "
            f"at {limit_s:.0f} s all ranks say where they are and end. DS_COMM_DEADLINE_S sets that limit.\n"
        )

    def _longest_wait(self) -> Stamp | None:
        return next(iter(self._own_report().waits()), None)

    def _blame_gone(self, wait: Stamp) -> Finding | None:
        """Explain an operation that will not end because a required rank has ended; None when none has."""
        gone = {rank: why for rank, why in self._gone().items() if rank in self.groups.get(wait.key, ())}
        for rank, (why, heads) in gone.items():
            report = self._left_behind(rank, why, heads)
            finding = judge_wait(wait, self._own_report(), {rank: report}, [rank])
            if finding is not None:
                return finding
        return None

    def _blame_different(self, wait: Stamp) -> Finding | None:
        """Explain an operation whose mark stands for a different operation on another rank of this host.

        None when there is no such rank.
        """
        for rank, peer in self._peers.items():
            if peer is not None and rank in self.groups.get(wait.key, ()):
                report = self._left_behind(rank, "" if peer.alive() else peer.end(), {})
                stamp = report.at(wait.key, wait.mark) if wait.mark else None
                if stamp is not None and differs(wait, stamp):
                    return judge_wait(wait, self._own_report(), {rank: report}, [rank])
        return None

    def _gone(self) -> dict[int, tuple[str, dict[str, int]]]:
        """Ranks that said goodbye or whose process is dead: why, and how far they came in each group."""
        ended = dict(self._left)
        for rank, peer in self._peers.items():
            if peer is not None and rank not in ended and not peer.alive():
                ended[rank] = peer.end(), {}
        return ended

    def _read_goodbyes(self) -> None:
        for rank, why, heads in self._side.left(len(self._left)):
            self._left[rank] = why, heads

    def _left_behind(self, rank: int, why: str, heads: Mapping[str, int]) -> RankReport:
        peer = self._peers.get(rank)
        stamps = () if peer is None else tuple(peer.stamps()[-_REPORTED:])
        stopped = peer is not None and not why and peer.stopped()
        standstill = f"was stopped by a signal (`kill -CONT {peer.pid}` lets it go on)" if peer and stopped else ""
        return RankReport(rank, why, "", time.monotonic(), stamps, dict(heads), standstill)

    def _asked_for_patience(self, ranks: tuple[int, ...]) -> bool:
        if self._rank in ranks and self._wait_until_s > time.time():
            return True
        stopped = {
            rank for rank, peer in self._peers.items() if peer is not None and peer.stopped()
        }  # whatever it asked for
        states = (self._side.ask("state", rank) for rank in ranks if rank != self._rank and rank not in stopped)
        return any(state is not None and state["pause_until_s"] > time.time() for state in states)

    def _compare(self) -> str | None:
        """Compare digests with another rank, another one at every tick."""
        self._ticks += 1
        other = (self._rank + 1 + self._ticks % (self._size - 1)) % self._size
        state = self._side.ask("state", other)
        for key, blocks in (state["digests"] if state is not None else {}).items():
            for block, digest in blocks.items():
                local_digest = self._digests.get(key, {}).get(int(block))
                if local_digest is not None and local_digest != digest:
                    first, last = self._ring.block_marks(int(block))
                    name = next((s.group for s in self._ring.stamps() if s.key == key), key)
                    return f"ranks {self._rank} and {other} did different operations among #{first} to #{last} of group {name!r}"
        return None

    def _publish(self) -> None:
        for key, blocks in self._ring.digests(self._digests).items():
            history = self._digests.setdefault(key, {})
            history.update(blocks)
            for old in sorted(history)[:-8]:
                del history[old]
        self._side.tell("state", {"pause_until_s": self._pause_until_s, "digests": self._digests})

    def _connect_peers(self) -> None:
        if len(self._peers) >= min(
            self._size, self._settings.local_size if self._settings.local_size > 1 else self._size
        ):
            return
        for hello in self._side.introduced(self._host):
            if hello["rank"] not in self._peers:
                with suppress(OSError):  # tried again at the next tick
                    self._peers[hello["rank"]] = open_peer(hello["pid"], hello["fd"])

    def _goodbye(self, why: str) -> None:
        self._ring.goodbye(why)
        heads: dict[str, int] = {}
        for stamp in [*self._ring.stamps(), *self._called_by_torch(waiting=False)]:
            heads[stamp.key] = max(stamp.mark, heads.get(stamp.key, 0))
        try:
            self._side.leave(why, heads)
            if self._rank == 0 and not self._launcher_serves:
                self._side.wait_for(["left", "hung-up"], range(1, self._size), 1.5 * self._settings.tick_s)
        except RuntimeError as error:  # the others are gone as well
            _log.debug("no goodbye: %s", error)
        self._side.close()
        for peer in self._peers.values():
            if peer is not None:
                peer.close()
        self._peers = {self._rank: None}

    # -- the end -------------------------------------------------------------------------------------------------------

    def _own_report(self, stamps: int = _REPORTED) -> RankReport:
        recorded = self._ring.stamps()
        reported = [s for s in recorded[:-stamps] if s.waits] + recorded[-stamps:]
        reported = _merged(reported, self._called_by_torch(waiting=not any(s.waits for s in reported))[-stamps:])
        thread = next((stamp.thread for stamp in reported if stamp.waits), None)
        return RankReport(self._rank, "", user_frame(thread), time.monotonic(), tuple(reported), {})

    def _called_by_torch(self, waiting: bool) -> list[Stamp]:
        """Return what torch's own functions called; a call of ours that waits is there, too, and is the one to speak of."""
        if self._torch_calls is None:
            return []
        self.groups.update(self._torch_calls.groups())
        return self._torch_calls.stamps(waiting)

    def _end(self, alarm: Mapping[str, Any]) -> None:
        self._ending.set()
        report = self._own_report()
        reports = {self._rank: report}
        try:
            self._side.report(report)
            reports |= self._side.collect(self._requested_ranks(alarm), _COLLECT_S)
            self._read_goodbyes()
        except RuntimeError as error:
            self._store_error = self._store_error or str(error).splitlines()[0]
        for rank, (why, heads) in self._gone().items():
            if rank not in reports:
                reports[rank] = self._left_behind(rank, why, heads)
        for rank, peer in self._peers.items():  # the rings of this host can still be read
            if rank not in reports and peer is not None and (self._store_error or peer.stopped()):
                reports[rank] = self._left_behind(rank, "", {})
        finding = judge(report, reports, self.groups)
        self._say(finding, alarm, reports)
        self._settings.end(EXIT_CODE)
        self._stop.set()

    def _requested_ranks(self, alarm: Mapping[str, Any]) -> set[int]:
        """Whose reports this rank reads."""
        if self._size > _MANY_RANKS and alarm["rank"] != self._rank:
            return {alarm["rank"]}
        return set(range(self._size)) - {self._rank}

    def _say(self, finding: Finding, alarm: Mapping[str, Any], reports: Mapping[int, RankReport]) -> None:
        dump = self._settings.dump_dir / dump_name(self._rank, os.getpid(), self._job)
        line = f"[ds-comm] {finding.line}."
        if finding.code == "comm-hang" and not alarm["why"].startswith(f"rank {self._rank} was"):
            line += f" Alarm: {alarm['why']}."
        try:
            dump.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            content = {
                "job": self._job,
                "line": finding.line,
                "code": finding.code,
                "alarm": dict(alarm),
                "reports": [asdict(other) for other in reports.values()],
                "stamps": [asdict(stamp) for stamp in [*self._ring.stamps(), *self._called_by_torch(waiting=True)]],
            }
            with open(dump, "w", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as file:
                json.dump(content, file)
            line += f" Details: ds comm debug {dump.parent} --job {self._job}"
        except OSError as error:
            line += f" No dump: {error}"
        sys.stderr.write(f"{line} ds explain {finding.code}\n")
        sys.stderr.flush()
        sys.stdout.flush()
        try:
            # The end of one process breaks the connections of the others: all speak first.
            self._side.tell("seen", True)
            self._side.wait_for(["seen"], set(reports) - {self._rank}, _SEEN_S)
            if self._rank == 0:  # the store may live in this process
                time.sleep(_SEEN_S / 4)
        except RuntimeError as error:
            _log.debug("the store is gone: %s", error)


def _merged(stamps: list[Stamp], torchs: list[Stamp]) -> list[Stamp]:
    """Put calls of torch among the stamps of this package, by time; those that this package made come first: its own stamps speak for them."""
    spans = [(stamp.began_s, stamp.ended_s or math.inf) for stamp in stamps]
    inner = [call for call in torchs if any(began <= call.began_s <= ended for began, ended in spans)]
    outer = [call for call in torchs if call not in inner]
    return [*inner, *sorted([*stamps, *outer], key=lambda stamp: stamp.began_s)] if outer else [*inner, *stamps]


def _is_over(done: Callable[[], bool]) -> bool:
    """Whether an operation on a device is over. While another thread captures a graph that is not known: it is asked again.

    One that can never be asked (a device error, a captured event) is not waited for.
    """
    try:
        return done()
    except RuntimeError as error:
        _log.debug("an operation of the device cannot be asked: %s", error)
        return "stream is capturing" not in str(error)
