"""The watchdogs of a job, as threads of one process over a store in memory: the same code, no rank to lose."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_comm.watch import alarms, peer_rings
from ds_comm.watch.alarms import SideChannel
from ds_comm.watch.call_sites import user_frame
from ds_comm.watch.peer_rings import open_peer
from ds_comm.watch.stamp_ring import Stamp, StampRing
from ds_comm.watch.watchdog import EXIT_CODE, Watchdog, WatchSettings

X = torch.ones(4)


@dataclass
class Rank:
    ring: StampRing
    watchdog: Watchdog
    ended: threading.Event
    codes: list[int]

    def stamp(self, mark: int, op: str = "all_reduce", unit: str = "layers.0", wait: bool = False) -> int:
        slot = self.ring.begin("0", "world", mark, (op, unit, -1), X)
        self.ring.waiting(slot) if wait else self.ring.ended(slot)
        return slot


@contextmanager
def job(size: int, folder: Path, deadline_s: float = 0.3, warn_s: float = 60.0) -> Iterator[list[Rank]]:
    store, ranks = dist.HashStore(), []
    for rank in range(size):
        codes: list[int] = []
        ended = threading.Event()

        def end(code: int, codes: list[int] = codes, ended: threading.Event = ended) -> None:
            codes.append(code)
            ended.set()

        ring = StampRing()
        settings = WatchSettings(deadline_s, warn_s, local_size=size, dump_dir=folder, end=end)
        watchdog = Watchdog(ring, SideChannel(store, rank), (rank, size), settings)
        watchdog.groups["0"] = tuple(range(size))
        ranks.append(Rank(ring, watchdog, ended, codes))
    starters = [threading.Thread(target=rank.watchdog.start) for rank in ranks]  # they meet: together or not at all
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    yield ranks
    for rank in ranks:
        rank.watchdog.stop("test is over")
        rank.ring.close()


def test_a_wait_beyond_the_deadline_ends_all_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with job(3, tmp_path) as ranks:
        for rank in ranks:
            rank.stamp(1)
        ranks[0].stamp(2, wait=True)
        ranks[2].stamp(2, wait=True)
        for rank in ranks:
            assert rank.ended.wait(10)
    assert [rank.codes[0] for rank in ranks] == [EXIT_CODE] * 3
    said = capfd.readouterr().err.splitlines()
    assert sum("waits since" in line and "rank 1 did not come: it is at" in line for line in said) == 2
    assert sum("rank 1 is at" in line and "did not come to all_reduce[layers.0] #2" in line for line in said) == 1
    dumps = sorted(tmp_path.glob("rank-*.json"))
    assert len(dumps) == 3
    dump = json.loads(dumps[0].read_text())
    assert [stamp["mark"] for stamp in dump["stamps"]] == [1, 2]
    assert sorted(report["rank"] for report in dump["reports"]) == [0, 1, 2]
    assert {path.stem.partition("-job-")[2] for path in dumps} == {dump["job"]}
    assert sum(f"ds comm debug {tmp_path} --job {dump['job']}" in line for line in said) == 3


def test_waits_within_the_deadline_are_left_alone(tmp_path: Path) -> None:
    with job(2, tmp_path, deadline_s=1.5) as ranks:
        slot = ranks[0].stamp(1, wait=True)
        time.sleep(1.0)
        ranks[0].ring.ended(slot)
        time.sleep(1.0)
        assert not any(rank.codes for rank in ranks)
    assert not list(tmp_path.iterdir())


def test_patience_holds_the_alarm_back(tmp_path: Path) -> None:
    with job(2, tmp_path) as ranks:
        with ranks[1].watchdog.patience(60):
            slot = ranks[0].stamp(1, wait=True)
            time.sleep(1.2)
            assert not any(rank.codes for rank in ranks)
        assert ranks[0].ended.wait(10)
        ranks[0].ring.ended(slot)


def test_a_rank_that_a_signal_stopped_gets_no_patience(tmp_path: Path) -> None:
    """It was waited for as long as it had asked for before: an hour, where it was stopped in the middle of a save."""
    with subprocess.Popen(["sleep", "60"]) as sleeper, job(2, tmp_path) as ranks, ranks[1].watchdog.patience(60):
        peer = ranks[0].watchdog._peers[1]
        assert peer is not None
        peer.pid = sleeper.pid
        slot = ranks[0].stamp(1, wait=True)
        time.sleep(1.2)
        assert not ranks[0].codes
        sleeper.send_signal(signal.SIGSTOP)
        assert ranks[0].ended.wait(10)
        ranks[0].ring.ended(slot)
        sleeper.kill()


def test_a_rank_that_a_signal_stopped_is_said_to_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It "gave no sign", or was at "an unknown place"."""
    with subprocess.Popen(["sleep", "60"]) as sleeper, job(2, tmp_path) as ranks:
        peer = ranks[0].watchdog._peers[1]
        assert peer is not None
        peer.pid = sleeper.pid
        sleeper.send_signal(signal.SIGSTOP)
        ranks[1].watchdog._stop.set()  # it does nothing
        ranks[1].watchdog._ending.set()
        slot = ranks[0].stamp(1, wait=True)
        assert ranks[0].ended.wait(20)
        ranks[0].ring.ended(slot)
        sleeper.kill()
    assert f"rank 1 was stopped by a signal (`kill -CONT {sleeper.pid}` lets it go on)" in capfd.readouterr().err


def test_patience_for_others_is_none_for_the_rank_itself(tmp_path: Path) -> None:
    """A rank that leads may be waited for as long as it likes; what it waits for has the deadline."""
    with job(2, tmp_path) as ranks, ranks[0].watchdog.patience(60, own_waits=False):
        slot = ranks[1].stamp(1, wait=True)
        time.sleep(1.2)
        assert not any(rank.codes for rank in ranks)
        ranks[1].ring.ended(slot)
        ranks[0].stamp(2, wait=True)
        assert ranks[0].ended.wait(10)


def test_patience_is_no_error_where_the_store_is_gone(tmp_path: Path) -> None:
    with job(2, tmp_path, deadline_s=300) as ranks:
        for rank in ranks:
            rank.watchdog._side._open = None
        with ranks[0].watchdog.patience(60):  # a save goes on
            assert not ranks[0].codes


def test_a_store_that_gives_no_answer_does_not_stop_the_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 serves it, as under `ds run`, and was stopped by a signal: the watchdogs of the others waited for it for ever, and so did their ranks."""
    monkeypatch.setattr(alarms, "_PATIENCE", timedelta(seconds=0.2))
    released = threading.Event()

    class Silent:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: released.wait(60)

    with job(2, tmp_path, deadline_s=2) as ranks:
        ranks[1].watchdog._side._open._store = Silent()
        time.sleep(1.5)
        slot = ranks[1].stamp(1, wait=True)
        time.sleep(1)
        assert not ranks[1].codes  # no earlier than a rank that does not answer
        assert ranks[1].ended.wait(5)
        ranks[1].ring.ended(slot)
        ranks[1].watchdog._goodbye("is over")  # returns
        released.set()


def test_a_goodbye_ends_who_waits_before_the_deadline(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with job(3, tmp_path, deadline_s=300) as ranks:
        for rank in ranks:
            rank.stamp(1)
        ranks[2].stamp(2, wait=True)
        ranks[1].watchdog.stop("ValueError: boom at train.py:3 in step")
        assert ranks[2].ended.wait(20)
    assert "rank 1 has ended (ValueError: boom at train.py:3 in step)" in capfd.readouterr().err


def test_a_goodbye_after_its_part_ends_nobody(tmp_path: Path) -> None:
    with job(2, tmp_path, deadline_s=300) as ranks:
        ranks[1].stamp(1)
        ranks[0].stamp(1, wait=True)  # still sending, say
        ranks[1].watchdog.stop("exited")
        time.sleep(1.5)
        assert not ranks[0].codes


def test_different_operations_that_block_nobody_are_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with job(2, tmp_path, deadline_s=2) as ranks:
        for mark in range(1, 80):
            ranks[0].stamp(mark, unit=f"layers.{mark % 3}")
            ranks[1].stamp(mark, unit=f"layers.{(mark + (mark > 40)) % 3}")
        assert ranks[0].ended.wait(10)
        assert ranks[1].ended.wait(10)
    assert "did different operations among #1 to #64 of group 'world'" in capfd.readouterr().err


def test_equal_operations_are_no_finding(tmp_path: Path) -> None:
    with job(3, tmp_path, deadline_s=1) as ranks:
        for mark in range(1, 300):
            for rank in ranks:
                rank.stamp(mark, unit=f"layers.{mark % 3}")
        time.sleep(1.5)
        assert not any(rank.codes for rank in ranks)


def test_a_failed_operation_is_explained_by_who_left(tmp_path: Path) -> None:
    with job(2, tmp_path, deadline_s=300) as ranks:
        slot = ranks[0].stamp(1, wait=True)
        stamp = ranks[0].ring.stamp(slot)
        assert stamp is not None
        assert ranks[0].watchdog.explain(stamp, limit_s=0.1) is None
        ranks[1].watchdog.stop("exited")
        finding = ranks[0].watchdog.explain(stamp)
        assert finding is not None
        assert finding.code == "comm-peer-left"
        ranks[0].ring.ended(slot)


class Handle:
    """An operation of a device."""

    def __init__(self, error: str = "") -> None:
        self.done, self.error = False, error

    def __call__(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.done


def test_operations_that_only_the_device_waits_for_are_followed(tmp_path: Path) -> None:
    with job(2, tmp_path, deadline_s=0.6) as ranks:
        first, second = Handle(), Handle()
        slots = [ranks[0].stamp(mark, wait=True) for mark in (1, 2)]
        for slot, handle in zip(slots, (first, second), strict=True):
            ranks[0].watchdog.follow(slot, "0", handle)
        first.done = True
        time.sleep(0.3)
        stamps = [ranks[0].ring.stamp(slot) for slot in slots]
        assert [stamp is not None and stamp.waits for stamp in stamps] == [False, True]
        assert ranks[0].ended.wait(10), "the second does not move"


def test_streams_of_different_groups_end_in_any_order(tmp_path: Path) -> None:
    with job(2, tmp_path, deadline_s=300) as ranks:
        handles = [Handle(), Handle()]
        slots = [ranks[0].stamp(mark, wait=True) for mark in (1, 2)]
        for key, slot, handle in zip("01", slots, handles, strict=True):
            ranks[0].watchdog.follow(slot, key, handle)
        handles[1].done = True
        held = weakref.ref(handles.pop())
        time.sleep(0.5)
        stamps = [ranks[0].ring.stamp(slot) for slot in slots]
        assert [stamp is not None and stamp.waits for stamp in stamps] == [True, False]
        del handle
        assert held() is None, "what is over is not kept"


@pytest.mark.parametrize(
    "error", ["CUDA error: device-side assert triggered", "operation not permitted on an event in a graph"]
)
def test_a_device_that_cannot_be_asked_does_not_end_the_watch(tmp_path: Path, error: str) -> None:
    with job(2, tmp_path, deadline_s=0.6) as ranks:
        ranks[0].watchdog.follow(ranks[0].stamp(1, wait=True), "0", Handle(error))
        time.sleep(0.5)
        assert ranks[0].watchdog.watching
        ranks[0].stamp(2, wait=True)
        assert ranks[0].ended.wait(10)


def test_a_look_that_fails_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job(2, tmp_path, deadline_s=0.6) as ranks:
        looks: list[float] = []
        look = Watchdog._look

        def fails_once(self: Watchdog, blocked_s: float) -> None:
            looks.append(blocked_s)
            if len(looks) == 1:
                raise ZeroDivisionError("a mistake")
            look(self, blocked_s)

        monkeypatch.setattr(Watchdog, "_look", fails_once)
        ranks[0].stamp(1, wait=True)
        assert ranks[0].ended.wait(10)


def test_hellos_are_read_until_the_ranks_of_the_host_have_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    introduced = SideChannel.introduced
    monkeypatch.setattr(SideChannel, "introduced", lambda self, host: [reads.append(host), introduced(self, host)][1])
    with job(2, tmp_path, deadline_s=0.4) as ranks:
        met = len(reads)
        time.sleep(0.8)
        assert len(reads) == met
        monkeypatch.setattr(ranks[0].watchdog, "_size", 64)  # the others are on other hosts
        time.sleep(0.5)
        assert len(reads) == met


@pytest.mark.slow
def test_a_goodbye_is_read_once_by_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job(4, tmp_path, deadline_s=2) as ranks:
        asked: list[str] = []
        ask = SideChannel.ask
        monkeypatch.setattr(SideChannel, "ask", lambda self, key, rank: [asked.append(key), ask(self, key, rank)][1])
        for rank in ranks[2:]:
            rank.watchdog.stop("exited")
        time.sleep(1.5)
        assert "left" not in asked
        assert sorted(ranks[1].watchdog._left) == [2, 3]
        ranks[1].stamp(1, wait=True)
        assert ranks[1].ended.wait(10)


def test_a_stranger_cannot_end_the_job(tmp_path: Path) -> None:
    """It can write to the store, and read what stands there, but it does not know the job's secret."""
    store = dist.HashStore()
    ours, theirs = SideChannel(store, 0, b"secret"), SideChannel(store, 1, b"guess")
    theirs.raise_alarm({"rank": 1, "why": "I say so"})
    theirs.leave("gone", {})
    theirs.tell("state", {"pause_until_s": 1e12})
    theirs.introduce("host", {"pid": 1, "fd": 0})
    assert ours.alarm() is None
    assert ours.left(0) == []
    assert ours.ask("state", 1) is None
    assert ours.introduced("host") == []
    theirs.agree_on_job("theirs")
    assert ours.agree_on_job("ours") == "ours"
    ours.raise_alarm({"rank": 0, "why": "a wait"})
    assert SideChannel(store, 2, b"secret").alarm() == {"rank": 0, "why": "a wait"}
    sealed = dist.PrefixStore("ds_comm/watch", store).get("alarm")
    dist.PrefixStore("ds_comm/watch", store).set("state/0", sealed)  # its code is for another place
    assert ours.ask("state", 0) is None


def test_a_world_agrees_on_the_name_of_its_job(tmp_path: Path) -> None:
    store = dist.HashStore()
    assert SideChannel(store, 1).agree_on_job("20261125-1-a") == "20261125-1-a"
    assert SideChannel(store, 0).agree_on_job("20261125-2-b") == "20261125-1-a"
    other = dist.HashStore()
    dist.PrefixStore("ds_comm/watch", other).set("job", '"../../etc/x"')  # it would be part of a path
    assert SideChannel(other, 0).agree_on_job("20261125-2-b") == "20261125-2-b"


def test_what_a_rank_leaves_is_its_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    with job(2, folder) as ranks:
        ranks[0].stamp(1, wait=True)
        assert ranks[0].ended.wait(10)
        assert ranks[1].ended.wait(10)
        assert os.fstat(ranks[0].ring.fd).st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("jitter", [False, True])
def test_where_the_deadline_is_far_a_long_wait_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], jitter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = Watchdog._longest_wait

    def seen(watchdog: Watchdog) -> Stamp | None:  # what torch recorded has a time of another clock
        wait = longest(watchdog)
        return wait and replace(wait, waited_s=wait.waited_s + random.random() / 1e3)

    if jitter:
        monkeypatch.setattr(Watchdog, "_longest_wait", seen)
    with job(2, tmp_path, deadline_s=300, warn_s=0.6) as ranks:
        ranks[0].stamp(1, wait=True)
        time.sleep(2.5)
        assert not ranks[0].codes
    (line,) = capfd.readouterr().err.splitlines()
    assert "rank 0 waits since 1 s for all_reduce[layers.0] #1" in line
    assert "at 300 s all ranks say where they are" in line


def test_without_its_store_a_rank_that_works_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with job(2, tmp_path) as ranks:
        ranks[0].watchdog.stop("exited")
        time.sleep(0.6)
        assert not ranks[1].codes
        ranks[1].stamp(1, wait=True)
        assert ranks[1].ended.wait(10)
    assert "rank 0 has ended (exited)" in capfd.readouterr().err


@pytest.mark.parametrize("dump_dir", ["dumps", "absolute"])
def test_a_hang_ends_where_the_working_directory_is_gone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dump_dir: str
) -> None:
    """A scratch cleaner removed the job's folder while the job runs."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.chdir(folder)
    where = Path(dump_dir) if dump_dir == "dumps" else tmp_path / "dumps"
    with job(2, where) as ranks:
        folder.rmdir()
        ranks[0].stamp(1, wait=True)
        assert ranks[0].ended.wait(10)
        assert ranks[1].ended.wait(10)
    said = capfd.readouterr().err
    assert "rank 1 did not come: it is at" in said
    assert "could not check" not in said
    assert ("No dump" in said) == (dump_dir == "dumps")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES])
def test_a_rank_that_cannot_look_takes_nobody_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with job(2, tmp_path, deadline_s=300) as ranks:
        read = Path.read_text

        def fails(self: Path, *args: Any, **more: Any) -> str:
            if self.match("/proc/*/stat"):
                raise OSError(number, os.strerror(number), str(self))
            return read(self, *args, **more)

        monkeypatch.setattr(Path, "read_text", fails)
        ranks[0].stamp(1, wait=True)
        assert not ranks[0].ended.wait(2.0)
        monkeypatch.undo()


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError])
def test_a_process_that_is_gone_is_dead(monkeypatch: pytest.MonkeyPatch, error: type[OSError]) -> None:
    ring = StampRing()
    peer = open_peer(os.getpid(), ring.fd)
    assert peer is not None
    assert peer.alive()

    def fails(self: Path, *args: Any, **more: Any) -> str:
        raise error

    monkeypatch.setattr(Path, "read_text", fails)
    assert not peer.alive()
    peer.close()
    ring.close()


def test_a_peer_that_could_not_be_opened_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, failures = peer_rings.RingReader, iter([errno.EMFILE] * 3)

    def reader(pid: int, fd: int) -> Any:
        if (number := next(failures, None)) is not None:
            raise OSError(number, os.strerror(number))
        return opened(pid, fd)

    monkeypatch.setattr(peer_rings, "RingReader", reader)
    with job(2, tmp_path, deadline_s=300) as ranks:
        assert all(set(rank.watchdog._peers) == {0, 1} for rank in ranks)
        assert all(rank.watchdog._peers[1 - i] is not None for i, rank in enumerate(ranks))


def test_an_operation_that_a_capture_forbids_to_ask_about_is_asked_again(tmp_path: Path) -> None:
    """It was called over, and a hang after it was not seen."""
    with job(2, tmp_path, deadline_s=300) as ranks:
        handle = Handle("CUDA error: operation not permitted when stream is capturing")
        slot = ranks[0].stamp(1, wait=True)
        ranks[0].watchdog.follow(slot, "0", handle)
        time.sleep(0.5)
        stamp = ranks[0].ring.stamp(slot)
        assert stamp is not None
        assert stamp.waits
        handle.error, handle.done = "", True
        until = time.monotonic() + 150
        while (stamp := ranks[0].ring.stamp(slot)) is not None and stamp.waits and time.monotonic() < until:
            time.sleep(0.05)
        assert stamp is None or not stamp.waits


@pytest.mark.parametrize("library", ["deepspeed.runtime", "ds_engine.engine", "torch.nn"])
def test_a_wait_is_told_at_the_users_line(library: str) -> None:
    """A program that knows only `deepspeed` cannot use a line of the facade."""
    names: dict[str, Any] = {"__name__": library, "user_frame": user_frame, "thread": threading.get_ident()}
    exec("def backward():\n    return user_frame(thread)", names)
    assert names["backward"]().endswith("in test_a_wait_is_told_at_the_users_line")
