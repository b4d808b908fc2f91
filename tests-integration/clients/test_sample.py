"""The plain client script on the facade, in two ranks of the normal test run: the losses of one process with torch alone."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from ds_testing import world

SCRIPTS = Path(__file__).parent / "scripts"


def alone(common, rates):
    model, data = common.Next(), common.Tokens()
    optimizer = torch.optim.AdamW(model.parameters(), 0.0, betas=(0.9, 0.95), weight_decay=0.01)
    losses = []
    for step, rate in enumerate([0.0, *rates[:-1]]):  # the schedule moves after the update
        optimizer.param_groups[0]["lr"] = rate
        ids = torch.stack([data[(8 * step + i) % len(data)]["input_ids"] for i in range(8)])
        loss = model(ids, ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@world(2, backend=None)
@pytest.mark.parametrize("stage", [2, 3])
def test_plain_script(monkeypatch, tmp_path, stage):
    import deepspeed

    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    options = {"out": out, "stage": stage, "steps": 6, "mode": "own"}
    monkeypatch.setattr(sys, "argv", ["plain.py", *(f"--{name}={value}" for name, value in options.items())])
    names = runpy.run_path(str(SCRIPTS / "plain.py"))
    if deepspeed.comm.get_rank() == 0:
        found = json.loads(out.read_text())
        assert found["losses"] == pytest.approx(alone(names["common"], found["rates"]), rel=1e-5)
        assert found["losses"][-1] < found["losses"][0]
        assert min(found["norms"]) > 0
    names["engine"].destroy()
    del sys.modules["common"]
    deepspeed.comm.destroy_process_group()
