"""Reports of a training loop that nobody wrote for this package: what sinks have equals what the loop wrote down itself."""

from __future__ import annotations

import csv
import json
import logging
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ds_monitor as m
from ds_monitor import MemorySink
from ds_monitor.plot import read_curve


def train(begin: int, end: int, x: float) -> list[tuple[int, float, float]]:
    """Gradient descent on x**2 with a rate that falls; (step, loss, rate) as the loop wrote them down."""
    noted = []
    for step in range(begin, end):
        rate = 0.3 * 0.9**step
        m.set_step(step, samples=8 * step)
        with m.span("step"):
            loss = x * x
            x -= rate * 2 * x
            m.gauge("loss", loss)
            m.gauge("lr", rate)
            m.counter("samples", 8)
        noted.append((step, loss, rate))
    return noted


def test_files_have_what_the_loop_noted(tmp_path: Path) -> None:
    m.configure([m.CsvSink(tmp_path / "csv"), m.JsonlSink(tmp_path / "run.jsonl")])
    noted = train(1, 21, 2.0)
    m.shutdown()
    (file,) = (tmp_path / "csv").glob("*loss*.csv")
    rows = list(csv.reader(file.open()))[1:]
    assert [float(row[1]) for row in rows] == pytest.approx([loss for _, loss, _ in noted])
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    rates = [(line["step"], line["value"]) for line in lines if line.get("name") == "lr"]
    assert rates == [(step, rate) for step, _, rate in noted]
    curve = read_curve(tmp_path / "run.jsonl", "loss")
    assert list(curve.y) == [loss for _, loss, _ in noted]


def test_threads_of_a_loader_and_of_an_evaluation_lose_no_count(memory: MemorySink) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: [m.counter("read", 1) for _ in range(50)], range(8)))
    assert sum(record.value for record in memory.records if record.name == "read") == 400


def work(count: int) -> int:
    for _ in range(count):
        m.counter("read", 1)
    return count


def test_workers_that_are_forked_write_nothing_into_the_parents_file(tmp_path: Path) -> None:
    """Loader workers inherit open files; twice the same line, or half a line, was in many loggers' files."""
    path = tmp_path / "run.jsonl"
    m.configure([m.JsonlSink(path)])
    m.set_step(1)
    m.gauge("loss", 1.0)  # in a buffer when the process forks
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert sum(pool.map(work, [20, 20])) == 40
    m.gauge("loss", 0.5)
    m.shutdown()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["value"] for line in lines if line.get("name") == "loss"] == [1.0, 0.5]
    assert not [line for line in lines if line.get("name") == "read"]


def test_a_loop_that_catches_errors_and_goes_on(memory: MemorySink) -> None:
    for step in range(4):
        m.set_step(step)
        try:
            with m.span("step"):
                if step == 2:
                    raise RuntimeError("out of memory")
                m.gauge("loss", float(step))
        except RuntimeError:
            logging.getLogger("train").debug("skipped")
    assert [(r.step, r.value) for r in memory.records if r.name == "loss"] == [(0, 0.0), (1, 1.0), (3, 3.0)]
