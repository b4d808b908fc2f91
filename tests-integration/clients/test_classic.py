"""The classic script, started as people start it: `deepspeed script.py --deepspeed --deepspeed_config x.json`."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
import torch

SCRIPT = Path(__file__).parent / "scripts" / "classic.py"
SOURCE = str(Path(deepspeed.__path__[0]).parent)


def start(folder: Path, *arguments: str) -> None:
    there = {"PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    command = [*runner, str(SCRIPT), "--out", str(folder), *arguments]
    done = subprocess.run(command, env=os.environ | there, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]


def alone(steps: int) -> list[float]:
    """Losses of the first rank's rows, from one process that has all rows and torch alone."""
    names = runpy.run_path(str(SCRIPT))
    torch.manual_seed(3)
    model = names["Net"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    losses = []
    for rows in zip(*(names["batches"](0, steps, rank) for rank in range(2)), strict=True):
        found = [model(x, y) for x, y in rows]
        (sum(found) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found[0].item())
    return losses


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [pytest.param(s, marks=pytest.mark.slow) for s in (0, 2, 3)])
def test_it_trains_saves_and_goes_on_where_it_stopped(tmp_path, stage):
    config = tmp_path / "x.json"
    optimizer = {"type": "AdamW", "params": {"lr": 0.02}}
    section = {"train_batch_size": 8, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
    config.write_text(json.dumps(section))
    for steps in (3, 6):
        start(tmp_path, "--deepspeed", "--deepspeed_config", str(config), "--steps", str(steps))
    first, second = (json.loads((tmp_path / f"losses_{at}.json").read_text()) for at in (0, 3))
    assert first["world"] == 2
    assert (tmp_path / "latest").read_text() == "global_step6"
    assert first["losses"] + second["losses"] == pytest.approx(alone(6), rel=1e-5)
