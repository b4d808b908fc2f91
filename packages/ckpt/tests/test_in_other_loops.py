"""A loop with an average of the weights and a schedule goes on from a checkpoint as if it had not stopped."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ds_ckpt


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2), AveragedModel(model)


def step(run, number):
    model, optimizer, schedule, average = run
    model(torch.randn(6, 4, generator=torch.Generator().manual_seed(number))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    average.update_parameters(model)


def state(run):
    return {
        name: one.state_dict() for name, one in zip(("model", "optimizer", "schedule", "average"), run, strict=True)
    }


def test_a_run_with_an_average_and_a_schedule_resumes(tmp_path):
    run = parts()
    for number in range(3):
        step(run, number)
    ds_ckpt.save(tmp_path / "k", ds_ckpt.full_shards(state(run)), {"state": ds_ckpt.full_meta(state(run))})
    again = parts()
    step(again, 99)
    there = state(again)
    meta = ds_ckpt.load(tmp_path / "k", ds_ckpt.full_shards(there))
    filled = ds_ckpt.fill_state(meta["state"], there)
    for one, name in zip(again, filled, strict=True):
        one.load_state_dict(filled[name])
    for number in range(3, 6):
        step(run, number)
        step(again, number)
    assert run[2].get_last_lr() == again[2].get_last_lr()
    for one, other in ((run[0], again[0]), (run[3], again[3])):
        for name, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
