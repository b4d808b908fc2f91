"""Lines that programs read from the output of a run, as upstream prints them: on standard output, in its words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch, deepspeed
from torch import nn
model = nn.Linear(4, 2)
config = {
    "train_batch_size": 2, "steps_per_print": 2, "wall_clock_breakdown": True, "log_level": "INFO",
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.99]}},
    "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 2}, "zero_optimization": {"stage": 1},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(6):
    x = torch.ones(2, 4, dtype=torch.half) * (1e30 if step in (0, 1) else 1)
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    print("norm of step", step, engine.get_global_grad_norm())
engine.load_checkpoint(".")
"""


def test_lines_about_steps(tmp_path):
    source = Path(__file__).resolve().parents[1] / "src"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        capture_output=True,
        timeout=120,
        check=True,
    )
    out = done.stdout
    steps = re.findall(
        r"^\[[-0-9: ,]+\] \[INFO\] \[\S+\] \[Rank 0\] step=(\d+), skipped=(\d+), lr=\[(\S+)\], mom=\[(.*?)\]", out, re.M
    )
    assert [(int(step), int(skipped), float(lr)) for step, skipped, lr, _ in steps] == [
        (2, 2, 1e-3), (4, 2, 1e-3), (6, 2, 1e-3),
    ]  # fmt: skip
    assert {momentum for *_, momentum in steps} == {"(0.9, 0.99)"}
    speed = r"epoch=\d+/micro_step=6/global_step=6, RunningAvgSamplesPerSec=[\d.e+]+, CurrSamplesPerSec=[\d.e+]+, MemAllocated=\S+GB"
    assert re.search(speed, out)
    assert re.search(
        r"\[Rank 0\] time \(ms\) \| fwd: [\d.]+ \| bwd: [\d.]+ \| bwd_inner: [\d.]+ \| bwd_allreduce: [\d.]+ \| step: [\d.]+",
        out,
    )
    overflow = r"\[deepspeed\] OVERFLOW! Rank 0 Skipping step\. Attempted loss scale: "
    assert re.search(overflow + "16, but hysteresis is 2. Reducing hysteresis to 1", out)
    assert re.search(overflow + "16, reducing to 8", out)
    assert out.count("step=2,") == 1
    assert "holds no complete checkpoint" in done.stderr
    norms = re.findall(r"^norm of step \d (\S+)$", out, re.M)
    assert norms[:2] == ["inf", "inf"]  # of skipped steps, also where a gradient is nan
    assert all(0 < float(norm) < 100 for norm in norms[2:])
    assert "step=" not in done.stderr
