"""Foreign optimizers move weights as in one process, at any rate: also those that need whole tensors, which nobody told of."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_config.errors import UnsupportedError
from ds_testing import world
from ds_zero.runtime.sharded_model import sharding_of

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


COUPLED = pytest.mark.parametrize("kind", foreign.COUPLED, ids=lambda kind: kind.__name__)


@COUPLED
@world(2)
def test_what_needs_all_tensors_moves_as_in_one_process_where_every_rank_has_them(kind):
    for lr in RATES:
        check(kind, 0, lr, dist.get_rank(), 2)
    for options in ({"stage": 1}, {"stage": 3}, {"stage": 0, "offload_optimizer": "host"}):
        model = net()
        with pytest.raises(UnsupportedError, match="depends on the others, which are not all on each rank"):
            ds_zero.shard(model, kind(model.parameters()), **options)
        assert sharding_of(next(model.parameters())) is None


@STAGES
@COUPLED
def test_what_needs_all_tensors_moves_as_plain_torch_in_one_process(kind, stage):
    for lr in RATES:
        check(kind, stage, lr, 0, 1)


@world(2)
def test_a_rate_that_all_parameters_have_found_is_saved_and_goes_on():
    """Settings that an optimizer writes into its groups, and its state of each parameter."""

    def run(model, optimizer, steps):
        for step in steps:
            model(rows(step, dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, later = net(), net()
    one = ds_zero.shard(model, foreign.Found(model.parameters(), lr=1e-2), stage=0)
    run(model, one, range(3))
    saved, meta = {s.shard.name: s.data.clone() for s in one.shards()}, json.loads(json.dumps(one.common_state_dict()))
    run(model, one, range(3, 6))
    two = ds_zero.shard(later, foreign.Found(later.parameters(), lr=1e-2), stage=0)
    two.materialize({s.shard.name: s.shard.shape for s in one.shards()})
    two.load_state_dict(meta)
    for local in two.shards():
        local.data.copy_(saved[local.shard.name])
    two.refresh()
    run(later, two, range(3, 6))
    assert two.param_groups[0]["found"] == one.param_groups[0]["found"]
    for a, b in zip(later.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
