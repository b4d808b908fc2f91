"""The sweep covers its grid, measures something, and its answer is a section the configuration takes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from ds_ops import cli_io
from ds_ops.io import IOSettings
from ds_ops.io_bench import IOBandwidth, IOCase, IOGrid, best_section, cases, measure, table


def test_the_grid_is_every_combination_writes_first() -> None:
    todo = cases(IOGrid(backends=("threads", "python"), block_bytes=(4096, 8192), queue_depths=(1,), workers=(1, 2)))
    assert len(todo) == len(set(todo)) == 2 * 2 * 2 * 2
    assert [case.write for case in todo] == [True] * 8 + [False] * 8


def test_the_best_settings_are_good_in_both_directions() -> None:
    lopsided, balanced = IOSettings(block_bytes=4096), IOSettings(block_bytes=8192, queue_depth=3, workers=2)
    rows = [
        IOBandwidth(IOCase(True, lopsided), 10.0),
        IOBandwidth(IOCase(False, lopsided), 1.0),
        IOBandwidth(IOCase(True, balanced), 8.0),
        IOBandwidth(IOCase(False, balanced), 8.0),
    ]
    assert best_section(rows) == {"block_size": 8192, "queue_depth": 3, "intra_op_parallelism": 2}
    assert table(rows).splitlines()[1].endswith("0.00")


def test_a_measurement_leaves_nothing_behind(tmp_path: Path) -> None:
    grid = IOGrid(
        backends=("python",), block_bytes=(65536,), queue_depths=(1,), workers=(1,), total_bytes=1 << 20, loops=2
    )
    rows = measure(grid, tmp_path)
    assert len(rows) == 2
    assert all(row.bytes_per_s > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli_io.register(parser)
    return cli_io.main(parser.parse_args(words))


def test_tune_prints_a_configuration_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--size", "1M", "--block-size", "64K", "--queue-depth", "2", "--workers", "1", "--loops", "1"]
    record = tmp_path / "all.json"
    assert run("tune", str(tmp_path), "--backend", "python", "--json", str(record), *small) == 0
    section = json.loads(capsys.readouterr().out)["aio"]
    assert section == {"block_size": 65536, "queue_depth": 2, "intra_op_parallelism": 1}
    assert len(json.loads(record.read_text())[str(tmp_path)]) == 2
    assert run("tune", str(tmp_path), "--backend", "python", *small, "--json") == 0
    told = json.loads(capsys.readouterr().out)[str(tmp_path)]
    assert told["aio"]["block_size"] == 65536
    assert len(told["measured"]) == 2
    assert run("bench", str(tmp_path), "--backend", "python", *small, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)[str(tmp_path)]) == 2
    assert run("bench", str(tmp_path), "--backend", "python", *small) == 0
    assert "GB/s" in capsys.readouterr().out


def test_a_missing_folder_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", str(tmp_path / "absent"), "--backend", "python", "--size", "1M") == 1
    assert "absent" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("bench", str(tmp_path), "--size", "many")
