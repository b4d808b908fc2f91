"""Reports reach the sinks placed on the axis of training; without sinks nothing happens at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc
import warnings
from pathlib import Path

import pytest

import ds_monitor as m
from ds_monitor import Measurement, MemorySink, RecordKind


class BrokenSink(MemorySink):
    """Fails at the verb it is told."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self.verb = verb

    def write(self, record: Measurement) -> None:
        if self.verb == "write":
            raise OSError("no space left on device")
        super().write(record)

    def end_step(self, step: int) -> None:
        if self.verb == "end_step":
            raise OSError("no space left on device")
        super().end_step(step)

    def close(self) -> None:
        super().close()
        if self.verb == "close":
            raise OSError("no space left on device")


def test_records_carry_kind_value_position_and_attributes(memory: MemorySink) -> None:
    m.set_step(3, samples=96)
    m.gauge("loss", 2.5)
    m.counter("tokens", 128)
    m.counter("steps")
    m.event("saved", path="here", size=3)
    assert [(r.kind, r.name, r.value, r.step, r.samples) for r in memory.records] == [
        (RecordKind.GAUGE, "loss", 2.5, 3, 96),
        (RecordKind.COUNTER, "tokens", 128.0, 3, 96),
        (RecordKind.COUNTER, "steps", 1.0, 3, 96),
        (RecordKind.EVENT, "saved", 0.0, 3, 96),
    ]
    assert dict(memory.records[3].attrs) == {"path": "here", "size": 3}
    assert dict(memory.records[0].attrs) == {}


def test_span_measures_and_tells_an_error_without_hiding_it(memory: MemorySink) -> None:
    with m.span("outer", unit="a"), pytest.raises(KeyError), m.span("inner"):
        raise KeyError("x")
    inner, outer = memory.records
    assert (inner.name, inner.attrs["error"]) == ("inner", "KeyError")
    assert (outer.name, dict(outer.attrs)) == ("outer", {"unit": "a"})
    assert 0 <= inner.value <= outer.value
    assert outer.time_s <= inner.time_s


def test_gauge_takes_what_float_takes(memory: MemorySink) -> None:
    class Scalar:
        def __float__(self) -> float:
            return 4.0

    m.gauge("loss", Scalar())  # type: ignore[arg-type]
    assert memory.records[0].value == 4.0


def test_steps_end_once_each_and_only_when_they_had_a_record(memory: MemorySink) -> None:
    m.set_step(1)
    m.gauge("a", 1)
    m.set_step(1)  # the same step goes on
    m.gauge("a", 2)
    m.set_step(2)  # ends 1
    m.set_step(3)  # nothing was reported at 2
    m.gauge("a", 3)
    m.shutdown()  # ends 3
    assert memory.steps == [1, 3]
    assert memory.closed


def test_configure_replaces_and_closes_what_was_there(memory: MemorySink) -> None:
    m.gauge("a", 1)
    second = MemorySink()
    m.configure([second])
    m.gauge("b", 1)
    assert memory.closed
    assert [r.name for r in memory.records] == ["a"]
    assert [r.name for r in second.records] == ["b"]
    m.configure([])
    assert second.closed
    assert not m.active()


def test_without_sinks_nothing_is_called_and_no_memory_is_taken() -> None:
    class Untouchable:
        def __float__(self) -> float:
            raise RuntimeError("a device tensor would be read here")

    def reports() -> None:
        for _ in range(1000):
            m.gauge("loss", untouchable)  # type: ignore[arg-type]
            m.counter("tokens", untouchable)  # type: ignore[arg-type]
            m.event("saved")
            with m.span("gather"):
                pass

    untouchable = Untouchable()
    reports()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        reports()
        grown = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    # The interpreter's own frames and loop variables; an object per call would be 4,000 objects or a peak per call.
    assert grown < 1024
    assert m.span("a") is m.span("b", x=1)


@pytest.mark.parametrize("verb", ["write", "end_step"])
def test_a_failing_sink_is_removed_and_the_others_go_on(verb: str) -> None:
    broken, whole = BrokenSink(verb), MemorySink()
    m.configure([broken, whole])

    def train() -> None:
        for step in (1, 2, 3):
            m.set_step(step)
            m.gauge("loss", step)
        m.shutdown()

    with pytest.warns(RuntimeWarning, match="BrokenSink failed.*no space left") as caught:
        train()
    assert len(caught) == 1
    assert [r.value for r in whole.records] == [1, 2, 3]
    assert whole.steps == [1, 2, 3]
    assert broken.closed


def test_a_sink_that_cannot_close_does_not_keep_the_others_open() -> None:
    broken, whole = BrokenSink("close"), MemorySink()
    m.configure([broken, whole])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m.shutdown()
    assert broken.closed
    assert whole.closed
    assert not m.active()


def test_threads_report_whole_records(memory: MemorySink) -> None:
    def work(number: int) -> None:
        for _ in range(200):
            m.counter(f"thread{number}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [memory.total(f"thread{i}") for i in range(4)] == [200.0] * 4


def run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=200)


def test_sinks_are_complete_after_an_uncaught_exception(tmp_path: Path) -> None:
    done = run(
        "import ds_monitor as m\nm.configure([m.CsvSink('out')])\nm.set_step(1)\nm.gauge('loss', 3.0)\nraise SystemExit(7)",
        tmp_path,
    )
    assert done.returncode == 7
    assert (tmp_path / "out/loss.csv").read_text().splitlines() == ["step,loss", "1,3.0"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_does_not_write_into_the_parents_files(tmp_path: Path) -> None:
    done = run(
        "import os, ds_monitor as m\n"
        "m.configure([m.JsonlSink('a.jsonl')])\n"
        "m.gauge('parent', 1)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    m.gauge('child', 1)\n"
        "    m.shutdown()\n"
        "    os._exit(3 if m.active() else 0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n",
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "a.jsonl").read_text()
    assert text.count("parent") == 1
    assert "child" not in text


def test_import_is_light_and_does_nothing(tmp_path: Path) -> None:
    done = run(
        "import os, sys, threading\n"
        "environment = dict(os.environ)\n"
        "import ds_monitor\n"
        "heavy = {'torch', 'pydantic', 'rich', 'matplotlib', 'tensorboard', 'wandb', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert threading.active_count() == 1\n"
        "assert dict(os.environ) == environment\n",
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_attached_sinks_join_those_that_listen_and_leave_alone() -> None:
    first, second = MemorySink(), MemorySink()
    m.configure([first])
    m.attach([second])
    m.gauge("a", 1)
    m.detach([second])
    m.gauge("a", 2)
    assert [record.value for record in second.records] == [1]
    assert [record.value for record in first.records] == [1, 2]
    assert m.active()
    m.detach([second])  # passed over: it left before
    m.detach([first])
    assert not m.active()


def test_runs_of_a_process_have_metrics_of_their_own() -> None:
    all_of_them, first, second = MemorySink(), MemorySink(), MemorySink()
    runs = m.Run(), m.Run()
    m.configure([all_of_them])
    for run, sink in zip(runs, (first, second), strict=True):
        m.attach([sink], run)
    for step in (1, 2):
        for run, value in zip(runs, (10, 20), strict=True):
            with run:
                m.set_step(step + value, samples=step)
                m.gauge("lr", value)
                assert m.current_step() == step + value
    m.gauge("nobody's", 5)
    told = [[(r.name, r.value, r.step) for r in sink.records] for sink in (first, second)]
    assert told == [
        [("lr", 10, 11), ("lr", 10, 12), ("nobody's", 5, 12)],
        [("lr", 20, 21), ("lr", 20, 22), ("nobody's", 5, 22)],
    ]
    assert [r.value for r in all_of_them.records] == [10, 20, 10, 20, 5]
    assert (first.steps, second.steps, all_of_them.steps) == ([11], [21], [11, 21, 12])
    m.detach([first])
    with runs[0]:
        m.gauge("lr", 1)
    assert (len(first.records), len(second.records), len(all_of_them.records)) == (3, 3, 6)


def test_attaching_nothing_changes_nothing() -> None:
    m.attach([])
    assert not m.active()


def test_a_sink_that_fails_while_it_is_detached_is_closed_once() -> None:
    broken, other = BrokenSink("end_step"), MemorySink()
    m.configure([other])
    m.attach([broken])
    m.gauge("a", 1)
    with pytest.warns(RuntimeWarning, match="BrokenSink"):
        m.detach([broken])
    m.gauge("a", 2)
    assert [record.value for record in other.records] == [1, 2]
