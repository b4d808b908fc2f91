"""What was written before the vocabulary was renamed is still read: a checkpoint, traces of two ranks, a folder of trials.

`before_renames/` was written at the commit before `tools/repo/renames.csv` was carried out, by its `train.py` on two ranks and by `ds tune`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import ds_engine
from ds_monitor.tracing.matching import match
from ds_monitor.tracing.trace_reader import read_ranks

BEFORE = Path(__file__).parent / "before_renames"


def test_a_checkpoint_of_two_ranks_gives_its_output() -> None:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    config = json.loads((BEFORE / "ds.json").read_text()) | {"zero_optimization": {"stage": 1}}
    engine, *_ = ds_engine.initialize(model=model, config=config)
    try:
        engine.load_checkpoint(str(BEFORE / "checkpoint"), tag="three")
        assert engine.global_steps == 3
        expected = json.loads((BEFORE / "expected.json").read_text())["output_of_ones"]
        # Hosts add up a product in other orders: the last bit of fp32.
        torch.testing.assert_close(engine(torch.ones(1, 8)), torch.tensor([[expected]]), rtol=1e-6, atol=0.0)
        loss = engine(torch.ones(1, 8)).square().mean()
        engine.backward(loss)
        engine.step()  # the optimizer's state came along
    finally:
        engine.close()


def test_traces_of_two_ranks_are_matched() -> None:
    ranks = read_ranks(BEFORE / "trace")
    assert len(ranks) == 2
    assert len(match(ranks)) > 0


def test_a_tuning_goes_on_where_it_was(tmp_path: Path) -> None:
    shutil.copytree(BEFORE, tmp_path / "run")
    options = ["--config", "ds.json", "--nproc", "2", "--micro", "4:8", "--trials", "2", "--steps", "2"]
    command = [sys.executable, "-m", "ds_launcher", "tune", *options, "train.py"]
    results = tmp_path / "run" / "autotuning_results"
    before = {file: file.read_bytes() for file in results.glob("z0*/*.json")}
    done = subprocess.run(command, cwd=tmp_path / "run", capture_output=True, text=True, timeout=120, check=True)
    assert "best of 8: z0_gas1_tmbspg8" in done.stdout
    assert {file: file.read_bytes() for file in before} == before  # no trial ran again
