"""Curves come back from what the sinks wrote, and become a PNG."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import ds_monitor as m
from ds_config.errors import ConfigError
from ds_monitor.curves import read_run
from ds_monitor.plot import Curve, page, plot_curves, read_curve, smooth


def test_the_same_curve_from_csv_and_jsonl(tmp_path: Path) -> None:
    m.configure([m.CsvSink(tmp_path), m.JsonlSink(tmp_path / "a.jsonl")])
    for step in (1, 2, 3):
        m.set_step(step)
        m.gauge("Train/loss", 50.0)
        m.gauge("Train/loss", 1 / step)
        m.gauge("other", 7)
    m.shutdown()
    from_csv = read_curve(tmp_path / "Train_loss.csv")
    from_jsonl = read_curve(tmp_path / "a.jsonl", "Train/loss")
    assert (from_csv.x, from_csv.y) == (from_jsonl.x, from_jsonl.y) == ((1.0, 2.0, 3.0), (1.0, 0.5, 1 / 3))
    assert (from_csv.name, from_jsonl.name) == ("Train_loss", "Train/loss")


def test_smoothing_keeps_a_constant_and_the_first_value() -> None:
    assert smooth([3.0] * 5) == pytest.approx([3.0] * 5)
    assert smooth([1.0, 2.0], weight=0) == (1.0, 2.0)
    assert smooth([0.0, 1.0], weight=0.9) == pytest.approx((0.0, 0.1 / 0.19))


def test_png_is_written_and_its_directory_made(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = plot_curves([Curve("loss", (1, 2, 3), (3.0, 2.0, 1.0))], tmp_path / "new" / "loss.png", title="t")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20], "big") == 960  # width in pixels: 8 inches at 120 dpi


def test_bad_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        read_curve(tmp_path / "no.csv")
    path = tmp_path / "a.jsonl"
    m.configure([m.JsonlSink(path)])
    m.gauge("loss", 1)
    m.shutdown()
    with pytest.raises(ConfigError, match="called 'lose'"):
        read_curve(path, "lose")


def test_a_moving_average_goes_on_after_a_value_that_is_not_finite() -> None:
    """One skipped step ended the line for good."""
    values = [1.0, 2.0, math.nan, 3.0, math.inf, 4.0]
    smoothed = smooth(values)
    finite = [value for value in smoothed if math.isfinite(value)]
    assert finite == pytest.approx(smooth([1.0, 2.0, 3.0, 4.0]))
    assert [math.isfinite(value) for value in smoothed] == [math.isfinite(value) for value in values]


def test_pictures_say_what_they_cannot_show(tmp_path: Path) -> None:
    assert Curve("loss", (1, 2), (math.nan, 1.0)).title == "loss  (1 values are not finite)"
    pytest.importorskip("matplotlib")
    written = page(
        [Curve("gone", (1, 2), (math.nan, math.nan)), Curve("loss", (1, 2), (math.nan, 1.0))], tmp_path / "a.html"
    )
    rows = written.read_text(encoding="utf-8").split("<table>")[1]
    assert "<td>loss</td><td>1</td><td>1</td><td>1</td>" in rows
    assert "<td>gone</td><td>nan</td><td>nan</td><td>nan</td>" in rows


@pytest.mark.parametrize("begin", [0, 3])
def test_a_resumed_job_repeats_no_step_of_a_curve(tmp_path: Path, begin: int) -> None:
    """The line ran back to the step of the checkpoint, and counters counted steps twice."""
    for job, steps in enumerate((range(1, 6), range(begin + 1, 5))):
        m.configure([m.CsvSink(tmp_path), m.JsonlSink(tmp_path / "a.jsonl")])
        for step in steps:
            m.set_step(step)
            m.gauge("loss", 10 * job + step)
            m.counter("tokens", 4)
        m.shutdown()
    second = [10 + step for step in range(begin + 1, 5)]
    wanted = (*range(1, begin + 1), *second, 5)
    for curve in (read_curve(tmp_path / "loss.csv"), read_curve(tmp_path / "a.jsonl", "loss")):
        assert curve.x == (1, 2, 3, 4, 5)
        assert curve.y == wanted
    totals = {curve.name: curve for curve in read_run(tmp_path / "a.jsonl")}["tokens"]
    assert totals.y == (4, 8, 12, 16)
