"""One norm for a model that is cut along another axis, too: here two parts, each with a copy of what lies between."""

from __future__ import annotations

import math
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_comm
import ds_zero
from ds_comm.reduction_group import ParamSharding, ReductionGroup, set_param_sharding
from ds_testing import world
from ds_zero.runtime import reduce_runtime

REPLICATED = frozenset({"1.weight", "1.bias"})


def part(rank):
    torch.manual_seed(rank)
    own = nn.Linear(6, 6)
    torch.manual_seed(9)
    return nn.Sequential(own, nn.LayerNorm(6))


def shard(net, **options):
    alone, everyone = ds_comm.self_group("data", dist.get_rank()), ds_comm.world_group()
    for name, param in net.named_parameters():
        if name in REPLICATED:
            set_param_sharding(param, ParamSharding(ReductionGroup("between", alone, divisor=1, copies=2)))
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
    optimizer.zero_grad()
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
    optimizer.zero_grad()
    assert optimizer.last.skipped
    assert optimizer.last.nonfinite == "0.bias"
    optimizer.close()


def norm_of_a_large_unit(stage, precision):
    """What a step measures of 4 M elements, of which torch's norm in fp32 is off by 1e-4, and the norm in fp64."""
    net = nn.Linear(2048, 2048, bias=False)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = ds_zero.shard(net, sgd, stage=stage, clip=math.inf, precision=precision)
    # The same on all ranks, so that the average is exact in bf16, too.
    grad = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(3)).mul_(1e-3).to(net.weight.dtype)
    net.weight.grad = grad.clone()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
    return optimizer.last.norm, float(grad.double().square().sum().sqrt())


STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
FORMATS = pytest.mark.parametrize("precision", ["fp32", "bf16"])
BACKENDS = pytest.mark.parametrize("backend", ["", "torch", "reference"])


@STAGES
@FORMATS
@BACKENDS
@world(2)
def test_large_units_have_an_exact_norm(stage, precision, backend):
    with mock.patch.dict(os.environ, {"DS_OPS": backend}):
        found, exact = norm_of_a_large_unit(stage, precision)
    assert found == pytest.approx(exact, rel=1e-8)


@STAGES
@FORMATS
@BACKENDS
def test_large_units_have_an_exact_norm_in_one_process(stage, precision, backend):
    with mock.patch.dict(os.environ, {"DS_OPS": backend}):
        found, exact = norm_of_a_large_unit(stage, precision)
    assert found == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize("stage", [0, 1, 3])
@world(2)
def test_gradients_outside_of_the_optimizer_are_dropped_with_a_warning(stage):
    """Each rank had its own in `clip_grad_norm_`, which scaled each rank's part by another factor."""
    torch.manual_seed(0)
    rank, net = dist.get_rank(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = ds_zero.shard(net, torch.optim.SGD(net[1].parameters(), lr=0.1), stage=stage)
    with mock.patch.object(reduce_runtime, "_log") as log:
        for step in range(2):
            net(torch.full((2, 4), 1.0 + rank + step)).square().sum().backward()
    assert [call.args[1].split(".")[0] for call in log.warning.call_args_list] == (["2"] if rank == 0 else [])
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    assert all((param.grad is None) == (not name.startswith("1.")) for name, param in net.named_parameters())
    norms = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(norms, norm.detach().clone())
    assert torch.equal(*norms)
    optimizer.step()
