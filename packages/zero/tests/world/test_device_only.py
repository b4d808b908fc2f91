"""A world of devices alone: everything that travels in the groups of a model is on the device, as NCCL wants it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_testing import world
from ds_testing.device_only import DEVICE, device_only, device_world

OPTIONS = {
    "plain": {},
    "clip": {"clip": 1.0},
    "strict": {"strict": True},
    "replicas": {"shard_size": 1},
    "norm": {"clip": math.inf},
}


def train(options, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(device)
    policy = ds_zero.UnitSizePolicy(max_numel=150, persist_numel=0)
    optimizer = ds_zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), policy=policy, **options)
    for step in range(3):
        made = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 8, generator=made).to(device)
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


@device_world
@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_training_is_that_of_a_host(stage, name):
    options = {"stage": stage, **OPTIONS[name]}
    if name == "replicas" and stage == 0:
        pytest.skip("nothing is sharded at stage 0")
    with device_only():
        found = train(options, DEVICE)
    for a, b in zip(found, train(options, "cpu"), strict=True):
        assert torch.equal(a, b)


@device_world
@pytest.mark.parametrize("stage", [0, 3])
@world(2)
def test_weights_that_differ_are_made_those_of_the_first_rank(stage):
    with device_only():
        torch.manual_seed(dist.get_rank())
        model = nn.Linear(8, 8).to(DEVICE)
        optimizer = ds_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        optimizer.close()
        torch.manual_seed(0)
        assert torch.equal(model.weight.data, nn.Linear(8, 8).weight)
