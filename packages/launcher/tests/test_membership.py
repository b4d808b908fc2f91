"""Hosts of an elastic job count up; who stops counting is lost, who says so is gone at once, who is cut off leaves."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from ds_launcher.membership import AGAIN, DONE, LEFT, HostBeats, Pulse, Round, WatchedRendezvous

if TYPE_CHECKING:
    from conftest import Sandbox

NAMES = ("alpha", "beta", "gamma")
MET = Round("t", 0, NAMES)
WORD = 10**12


class Memory:
    """A store of this process; `down` makes every call wait, as a network does that is gone."""

    def __init__(self) -> None:
        self.values: dict[str, int | str] = {}
        self.lock, self.down = threading.Lock(), False

    def add(self, key: str, amount: int) -> int:
        while self.down:
            time.sleep(0.01)
        with self.lock:
            value = int(self.values.get(key, 0)) + amount
            self.values[key] = value
            return value

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        if key not in self.values:
            raise TimeoutError(key)
        return str(self.values[key]).encode()


def within(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_does_not_count_up_is_lost_once() -> None:
    pulse = Pulse(MET, lost_after_s=10, now_s=0)
    for now_s in (4, 8, 12, 16):
        assert pulse.observe(1, now_s, now_s) == ""
        assert pulse.observe(2, 7, now_s) == ""  # where it was
    (line,) = pulse.lost(16)
    assert line.startswith("host gamma was lost: nothing heard from it for 10 s (--host-timeout)")
    assert pulse.lost(17) == []
    assert pulse.watched == (1,)


def test_a_host_that_never_counted_is_lost_as_well() -> None:
    pulse = Pulse(MET, lost_after_s=10, now_s=100)
    assert pulse.lost(109) == []
    assert len(pulse.lost(111)) == 2


@pytest.mark.parametrize(("word", "line"), [(DONE, ""), (AGAIN, ""), (LEFT, "host beta left the job")])
def test_who_says_its_last_word_is_not_waited_for(word: int, line: str) -> None:
    pulse = Pulse(MET, lost_after_s=10, now_s=0)
    assert pulse.observe(1, word * WORD + 3, 1).startswith(line)
    assert pulse.watched == (2,)
    assert [text.split()[1] for text in pulse.lost(1000)] == ["gamma"]


def lines(store: Memory, lost_after_s: float, *numbers: int) -> tuple[list[HostBeats], list[str], threading.Event]:
    said: list[str] = []
    cut = threading.Event()
    made = [HostBeats(Round("t", n, NAMES), lost_after_s, lambda: store, said.append, cut.set) for n in numbers]
    return made, said, cut


def test_a_silent_host_is_told_and_the_others_are_not() -> None:
    (one, two), said, cut = lines(Memory(), 1.0, 0, 1)
    within(lambda: one.gone and two.gone)
    assert [line.split()[1] for line in said] == ["gamma", "gamma"]
    two.close(LEFT)
    within(lambda: len(one.gone) == 2)
    assert said[-1].startswith("host beta left the job")
    one.close(DONE)
    assert not cut.is_set()


def test_who_goes_to_the_next_meeting_is_missed_by_nobody() -> None:
    (one, two, three), said, _ = lines(Memory(), 1.0, 0, 1, 2)
    two.close(AGAIN)
    three.close(DONE)
    time.sleep(1.5)
    one.close(DONE)
    assert said == []


def test_a_host_to_which_the_store_does_not_answer_leaves() -> None:
    store = Memory()
    (one,), said, cut = lines(store, 1.0, 0)
    store.down = True
    assert cut.wait(10)
    one.close(DONE)  # does not wait for the store
    store.down = False
    assert said == []


def test_a_connection_that_breaks_is_made_again() -> None:
    store, opened = Memory(), []

    def open_store() -> Memory:
        opened.append(1)
        if len(opened) == 1:
            raise ConnectionError
        return store

    line = HostBeats(MET, 10.0, open_store, lambda line: None, lambda: None)
    within(lambda: store.values.get("ds/beat/t/0"))
    line.close(DONE)
    assert store.values["ds/beat/t/0"] >= WORD


class Inner:
    """What torch's handler is to ours."""

    def __init__(self, store: Memory, hosts: int = 2) -> None:
        self.info, self.waiting, self.ended = SimpleNamespace(store=store, rank=0, world_size=hosts), 0, False

    def next_rendezvous(self) -> SimpleNamespace:
        return self.info

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def get_run_id(self) -> str:
        return "job"

    def shutdown(self) -> bool:
        self.ended = True
        return True


def test_a_lost_host_is_a_reason_to_meet_again() -> None:
    store = Memory()
    store.set("ds/name/1", "beta")
    rounds: list[Round] = []

    def line(met: Round) -> HostBeats:
        rounds.append(met)
        return HostBeats(met, 1.0, lambda: store, lambda line: None, lambda: None)

    inner = Inner(store)
    handler = WatchedRendezvous(inner, "ds", line)
    assert (handler.get_backend(), handler.get_run_id()) == ("ds", "job")
    assert handler.next_rendezvous() is inner.info
    assert handler.num_nodes_waiting() == 0
    within(lambda: handler.num_nodes_waiting() == 1)
    inner.info.world_size = 1
    handler.next_rendezvous()
    assert handler.num_nodes_waiting() == 0
    inner.waiting = 2
    assert handler.num_nodes_waiting() == 2
    assert handler.shutdown()
    assert inner.ended
    assert [met.names[1] for met in rounds] == ["beta"]


def test_a_host_that_does_not_tell_its_name_is_lost_before_the_round_begins() -> None:
    handler = WatchedRendezvous(Inner(Memory()), "ds", lambda met: pytest.fail("nobody to watch"))
    handler.next_rendezvous()
    assert handler.num_nodes_waiting() == 1


# -- real agents


def of_job(box: Sandbox, name: str) -> list[int]:
    """Processes whose environment says JOB=name."""
    found = []
    for pid in box.alive():
        try:
            if f"JOB={name}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_goes_on_without_a_host_that_falls_silent(box: Sandbox) -> None:
    """Two agents on this host; all processes of one are stopped, which is what lost power looks like from the other."""
    pytest.importorskip("torch")
    script = box.script("""
        import os, pathlib, time
        world = os.environ["WORLD_SIZE"]
        pathlib.Path(f"{world}-{os.environ['RANK']}-{os.environ['JOB']}").write_text(os.environ["TORCHELASTIC_RUN_ID"])
        while world == "2" or not pathlib.Path("end").exists(): time.sleep(0.02)
    """)
    keeper = box.start("rendezvous", "--port", "0", "--json")
    assert keeper.stdout is not None
    port = json.loads(keeper.stdout.readline())["port"]
    where = ("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--run-id", "shrinks")
    words = ("run", "--nproc", "1", "--max-restarts", "3", "--host-timeout", "3", *where, script)
    stays = box.start(*words, env={"JOB": "stays"})
    falls = box.start(*words, env={"JOB": "falls"})
    box.wait(lambda: len(list(box.folder.glob("2-*"))) == 2)
    box.file("1-0-stays").unlink(missing_ok=True)  # where the other came late
    for pid in of_job(box, "falls"):
        os.kill(pid, signal.SIGSTOP)
    box.wait(box.file("1-0-stays").exists)
    assert box.file("1-0-stays").read_text() == "shrinks"
    box.file("end").touch()
    out, err = stays.communicate(timeout=200)
    assert stays.returncode == 0, out + err
    assert "was lost: nothing heard from it for 3 s (--host-timeout)" in err
    for pid in of_job(box, "falls"):
        os.kill(pid, signal.SIGKILL)
    falls.communicate(timeout=200)
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(timeout=200) == 0


def test_a_port_in_use_is_said(box: Sandbox) -> None:
    pytest.importorskip("torch")
    import socket

    with socket.create_server(("", 0)) as taken:
        done = box.ds("rendezvous", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "cannot be listened on" in done.stderr
    assert "launch-port" in done.stderr
