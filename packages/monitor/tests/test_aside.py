"""A sink on a thread of its own: nothing is lost or reordered, what it raises is told once, a slow one delays nobody."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ds_monitor as m
from ds_monitor import BackgroundSink, Measurement, MemorySink, RecordKind
from ds_monitor.sinks import aside


def steps(count: int) -> None:
    for step in range(1, count + 1):
        m.set_step(step)
        m.gauge("loss", 1 / step)
        m.counter("tokens", 5)


def test_all_arrives_in_order_from_one_other_thread() -> None:
    class Watching(MemorySink):
        def write(self, record: Measurement) -> None:
            super().write(record)
            seen.add(threading.get_ident())

    seen: set[int] = set()
    direct, inner = MemorySink(), Watching()
    m.configure([direct, BackgroundSink(inner)])
    m.event("config", stage=2)
    steps(50)
    m.shutdown()
    assert inner.records == direct.records
    assert inner.steps == direct.steps
    assert inner.closed
    assert len(seen) == 1
    assert threading.get_ident() not in seen


def test_an_event_does_not_wait_for_the_step() -> None:
    inner = MemorySink()
    m.configure([BackgroundSink(inner)])
    m.event("config", stage=2)
    deadline = time.monotonic() + 150
    while not inner.records and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [record.kind for record in inner.records] == [RecordKind.EVENT]


def test_a_full_disk_is_told_once_and_the_others_go_on(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "loss.csv").symlink_to("/dev/full")
    whole = MemorySink()
    m.configure([BackgroundSink(m.CsvSink(tmp_path)), BackgroundSink(m.JsonlSink("/dev/full")), BackgroundSink(whole)])

    def train() -> None:
        for step in range(1, 41):
            m.set_step(step)
            m.gauge("loss", 1 / step)
            time.sleep(0.01)
        m.shutdown()

    with pytest.warns(RuntimeWarning, match="No space left") as caught:
        train()
    told = [str(warning.message).split(" failed")[0] for warning in caught]
    assert sorted(told) == ["monitor sink CsvSink", "monitor sink JsonlSink"]
    assert len(whole.named("loss")) == 40


def test_a_sink_that_falls_behind_loses_its_oldest_records_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(MemorySink):
        def write(self, record: Measurement) -> None:
            go.wait(10)
            super().write(record)

    go, inner = threading.Event(), Slow()
    monkeypatch.setattr("ds_monitor.sinks.aside.EVERY_S", 0.0)
    m.configure([aside := BackgroundSink(inner, limit=20)])
    with pytest.warns(RuntimeWarning, match="Slow is slower than the run") as caught:
        steps(100)
    go.set()
    m.shutdown()
    assert len(caught) == 1
    assert inner.records[-1].step == 100
    assert len(inner.records) + len(inner.steps) + aside.left_out == 300
    assert aside.left_out >= 270


def test_what_fails_at_the_end_is_logged_and_the_process_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Unclosable(MemorySink):
        def close(self) -> None:
            raise OSError("no space left on device")

    m.configure([BackgroundSink(Unclosable())])
    steps(1)
    m.shutdown()
    assert "Unclosable could not be closed cleanly: OSError('no space left" in caplog.text


def test_span_seconds_add_up_within_a_step(memory: MemorySink) -> None:
    m.set_step(1)
    for name in ("comm/all_gather", "comm/all_gather", "comm/broadcast", "engine/forward"):
        with m.span(name):
            time.sleep(0.002)
    told = sum(record.value for record in memory.records if record.name.startswith("comm/"))
    assert m.span_seconds("comm/") == pytest.approx(told)
    assert told > 0.006
    m.set_step(2)
    assert m.span_seconds("comm/") == 0


def test_a_service_that_is_not_there_delays_no_step(tmp_path: Path) -> None:
    """A server that never answers: 50 steps end at once, and the end of the run waits no longer than is said."""
    code = (
        "import time, ds_monitor as m\n"
        "class Hung(m.MemorySink):\n"
        "    def end_step(self, step):\n"
        "        time.sleep(3600)\n"
        "import ds_monitor.sinks.aside as aside\n"
        "aside.CLOSE_S = 0.5\n"
        "m.configure([m.BackgroundSink(Hung())])\n"
        "begun = time.perf_counter()\n"
        "for step in range(50):\n"
        "    m.set_step(step)\n"
        "    m.gauge('loss', 1.0)\n"
        "print(time.perf_counter() - begun < 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert "Hung did not write" in done.stderr


@pytest.mark.parametrize("end", ["shutdown", "detach"])
def test_services_that_are_not_there_are_waited_for_together(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "CLOSE_S", 1.0)
    over = threading.Event()

    class Hung(MemorySink):
        def end_step(self, step: int) -> None:
            over.wait(60)

    sinks = [m.BackgroundSink(Hung()) for _ in range(6)]
    m.configure(sinks)
    m.gauge("loss", 1.0)
    m.set_step(1)
    begun = time.perf_counter()
    if end == "shutdown":
        m.shutdown()
    else:
        m.detach(sinks)
    took_s = time.perf_counter() - begun
    over.set()
    assert 0.9 < took_s < 4
