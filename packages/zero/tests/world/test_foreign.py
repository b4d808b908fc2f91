"""Foreign optimizers move weights as in one process, at any rate: also those that need whole tensors, which nobody told of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_testing import world

sys.path.append(str(Path(__file__).parent))
import foreign

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
KINDS = pytest.mark.parametrize("kind", [*foreign.WHOLE, *foreign.ELEMENTWISE], ids=lambda kind: kind.__name__)
RATES = (1e-2, 1e-7)


def net():
    """In fp64, where a movement of 1e-9 shows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 36), nn.Tanh(), nn.Linear(36, 24), nn.Tanh(), nn.Linear(24, 2)).double()


def rows(step, rank):
    return torch.randn(5, 20, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def movement(model, optimizer, backward):
    before = [p.detach().clone() for p in net().parameters()]
    for step in range(4):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, ds_zero.ShardedOptimizer):
        optimizer.close()
    return [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]


def check(kind, stage, lr, rank, size):
    model, twin = net(), net()
    policy = ds_zero.UnitSizePolicy(max_numel=1200, persist_numel=0)
    optimizer = ds_zero.shard(model, kind(model.parameters(), lr=lr), stage=stage, policy=policy)
    moved = movement(model, optimizer, lambda m, step: m(rows(step, rank)).square().mean().backward())

    def all_ranks(m, step):
        (sum(m(rows(step, r)).square().mean() for r in range(size)) / size).backward()

    expected = movement(twin, kind(twin.parameters(), lr=lr), all_ranks)
    for a, b in zip(moved, expected, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


@STAGES
@KINDS
@world(2)
def test_movements_equal_those_of_one_process(kind, stage):
    for lr in RATES:
        check(kind, stage, lr, dist.get_rank(), 2)


@STAGES
@KINDS
def test_movements_equal_plain_torch_in_one_process(kind, stage):
    for lr in RATES:
        check(kind, stage, lr, 0, 1)
