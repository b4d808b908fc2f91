"""The curves of a run, drawn with characters, as a picture and as a page."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ds_monitor as m
from ds_config.errors import ConfigError
from ds_monitor import cli
from ds_monitor.curves import Curve, draw, read_run, select


def run(folder: Path) -> None:
    m.configure([m.CsvSink(folder / "csv", axis="samples"), m.JsonlSink(folder / "trace.jsonl", rank=1)])
    for step in range(1, 41):
        m.set_step(step, samples=8 * step)
        m.gauge("Train/Samples/train_loss", math.exp(-step / 10))
        m.counter("Train/tokens", 100)
    m.shutdown()


def test_curves_of_all_files_by_rank(tmp_path: Path) -> None:
    run(tmp_path)
    found = {curve.name: curve for curve in read_run(tmp_path)}
    assert set(found) == {
        "Train_Samples_train_loss",
        "Train_tokens",
        "rank1 Train/Samples/train_loss",
        "rank1 Train/tokens",
    }
    assert found["Train_tokens"].y[-1] == found["rank1 Train/tokens"].y[-1] == 4000
    assert found["Train_tokens"].x[-1] == 320
    assert [c.name for c in select(tuple(found.values()), ["LOSS"])] == [
        "Train_Samples_train_loss",
        "rank1 Train/Samples/train_loss",
    ]
    with pytest.raises(ConfigError, match="no metric has 'lss'") as caught:
        select(tuple(found.values()), ["lss"])
    assert "Train_tokens" in caught.value.fix


def test_a_falling_line_falls() -> None:
    text = draw(Curve("loss", tuple(range(100)), tuple(float(-i) for i in range(100))), width=60, height=4)
    lines = text.splitlines()
    assert lines[0] == "loss: -99"
    assert lines[1].startswith("  0 ┤")
    assert lines[4].startswith("-99 ┤")
    assert lines[5].split() == ["0", "99"]
    blank = chr(0x2800)
    assert [next(i for i, c in enumerate(line[5:]) if c != blank) // 13 for line in lines[1:5]] == [0, 1, 2, 3]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=30), st.integers(20, 120))
def test_any_values_are_drawn_in_the_width(values: list[float], width: int) -> None:
    lines = draw(Curve("x", tuple(range(len(values))), tuple(values)), width=width).splitlines()
    assert all(len(line) <= max(width, 30) for line in lines[1:])
    lost = sum(not math.isfinite(value) for value in values)
    assert (f"{lost} values are not finite" in lines[0]) == (lost > 0)


def test_the_command_tells_every_value_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    parser = argparse.ArgumentParser()
    cli.register(parser)
    assert cli.main(parser.parse_args(["show", str(tmp_path), "--metric", "tokens", "--json"])) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["drawn"] == []
    assert [curve["name"] for curve in told["curves"]] == ["Train_tokens", "rank1 Train/tokens"]
    assert told["curves"][0]["y"][-1] == 4000


def test_the_command_draws_into_a_png_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run(tmp_path)
    parser = argparse.ArgumentParser()
    cli.register(parser)
    png, page = tmp_path / "out/a.png", tmp_path / "out/a.html"
    assert (
        cli.main(parser.parse_args(["show", str(tmp_path), "--smooth", "0.9", "--png", str(png), "--html", str(page)]))
        == 0
    )
    assert "Train_Samples_train_loss: " in capsys.readouterr().out
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.count("<svg") == 1
    assert "<td>rank1 Train/tokens</td><td>4000</td>" in text
    assert "http" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", "")
    assert cli.main(parser.parse_args(["show", str(tmp_path / "nothing")])) == 1
    assert "no metrics" in capsys.readouterr().err
