"""The classic script, started as people start it: `deepspeed script.py --deepspeed --deepspeed_config x.json`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest

SCRIPT = Path(__file__).parent / "scripts" / "classic.py"
SOURCE = str(Path(deepspeed.__path__[0]).parent)


def start(folder: Path, *arguments: str) -> None:
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_gpus",
        "2",
        str(SCRIPT),
        "--out",
        str(folder),
        *arguments,
    ]
    done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]


def losses(folder: Path, first: int) -> dict:
    return json.loads((folder / f"losses_{first}.json").read_text())


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_trains_saves_and_goes_on_as_if_it_had_not_stopped(tmp_path, stage):
    config = tmp_path / "x.json"
    config.write_text(json.dumps({
        "train_batch_size": 8,
        "steps_per_print": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage},
    }))  # fmt: skip
    given = ("--deepspeed", "--deepspeed_config", str(config))
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    for folder in (straight, parts):
        folder.mkdir()
    start(straight, *given, "--steps", "6")
    start(parts, *given, "--steps", "3")
    start(parts, *given, "--steps", "6")
    whole, first, second = losses(straight, 0), losses(parts, 0), losses(parts, 3)
    assert whole["world"] == 2
    assert (parts / "latest").read_text() == "global_step6"
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["lr"] == whole["lr"]
    assert whole["losses"][-1] < whole["losses"][0]
