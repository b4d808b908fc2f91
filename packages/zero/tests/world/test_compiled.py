"""torch.compile of a model that is sharded at stage 3, over gloo: our hooks run between the graphs, and numbers are those of an eager model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ds_zero
from ds_testing import world


def train(how):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)))
    policy = ds_zero.UnitSizePolicy(max_numel=256, persist_numel=0)
    optimizer = ds_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, policy=policy)
    call = torch.compile(model, backend="eager") if how == "torch.compile" else model
    if how == "module.compile":
        model.compile(backend="eager")
    for step in range(3):
        call(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
@world(2, timeout=120)
def test_it_trains_as_without_a_compiler(how):
    for a, b in zip(train(how), train("eager"), strict=True):
        torch.testing.assert_close(a, b)
