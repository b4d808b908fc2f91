"""One norm for a model that is cut along another axis, too: here two parts, each with a copy of what lies between."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_comm
import ds_zero
from ds_comm.family import Assignment, Family, assign
from ds_testing import world

REPLICATED = frozenset({"1.weight", "1.bias"})


def part(rank):
    torch.manual_seed(rank)
    own = nn.Linear(6, 6)
    torch.manual_seed(9)
    return nn.Sequential(own, nn.LayerNorm(6))


def shard(net, **options):
    alone, everyone = ds_comm.single_group("data", dist.get_rank()), ds_comm.world_group()
    for name, param in net.named_parameters():
        if name in REPLICATED:
            assign(param, Assignment(Family("between", alone, divisor=1, copies=2)))
    return ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), group=alone, norm=everyone, **options)


def fill(net, rank):
    """Gradients as a model of two parts has them: of its own part, and the same of what both have."""
    for name, param in net.named_parameters():
        param.grad = torch.full_like(param, 3.0 if name in REPLICATED else 1.0 + rank)


@pytest.mark.parametrize("stage", [0, 1, 3])
@world(2)
def test_parts_are_added_and_copies_count_once(stage):
    net = part(dist.get_rank())
    start = [p.detach().clone() for p in net.parameters()]
    optimizer = shard(net, stage=stage, clip=1.0)
    fill(net, dist.get_rank())
    optimizer.step()
    norm = math.sqrt(42 * 1.0 + 42 * 4.0 + 12 * 9.0)
    assert optimizer.last.norm == pytest.approx(norm, rel=1e-6)
    optimizer.close()
    for (name, now), before in zip(net.named_parameters(), start, strict=True):
        grad = 3.0 if name in REPLICATED else 1.0 + dist.get_rank()
        torch.testing.assert_close(now, before - 0.1 * grad / norm)


@world(2)
def test_a_step_that_one_part_must_skip_is_skipped_by_all():
    net = part(dist.get_rank())
    optimizer = shard(net, stage=1, precision="fp16")
    fill(net, dist.get_rank())
    if dist.get_rank() == 1:
        net[0].bias.grad[0] = math.inf
    optimizer.step()
    assert optimizer.last.skipped
    assert optimizer.last.nonfinite == "0.bias"
    optimizer.close()
