"""Several copies of a sharded model: shards within a replica, sums of gradients across them all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ds_zero
from ds_config.errors import PlanError
from ds_testing import world

SMALL = ds_zero.UnitSizePolicy(max_numel=600, persist_numel=40)


@pytest.mark.parametrize(("stage", "memory"), [(1, "private"), (2, "shared"), (3, "private"), (3, "shared")])
@world(4)
def test_equals_one_process(bench, stage, memory):
    groups = len(dist.distributed_c10d._world.pg_map)
    expected = bench.dense("external", steps=3, micros=2, clip=1.0, world=4)
    net = bench.model("external", torch.float64)
    optimizer = ds_zero.shard(net, bench.adamw(net), stage=stage, shard_size=2, memory=memory, clip=1.0, policy=SMALL)
    unit = optimizer.sharding.units[0]
    assert (unit.layout.world, unit.groups.shard_group.ranks) == (2, ((0, 1), (2, 3))[dist.get_rank() // 2])
    for step in range(3):
        for micro in range(2):
            (bench.loss(net, bench.batch(step, micro, dist.get_rank())) / 2).backward()
        grad = ds_zero.safe_get_full_grad(net.head.weight)
        optimizer.step()
        optimizer.zero_grad()
    whole = ds_zero.safe_get_full_optimizer_state(net.head.weight, "exp_avg")
    assert grad.shape == whole.shape == net.head.weight.shape
    planned = ds_zero.plan(bench.model("external", torch.float64), 4, optimizer.sharding.options)
    assert planned.persistent_bytes["optim"] == sum(
        v.nbytes for s in optimizer.state.values() for v in s.values() if v.dim()
    )
    optimizer.close()
    for a, b in zip(net.parameters(), expected, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) <= 1e-12
    assert len(dist.distributed_c10d._world.pg_map) == groups


@pytest.mark.parametrize("shard_size", [1, 2])
@world(2)
def test_replicas_of_one_rank_and_of_all(bench, shard_size):
    net = bench.model("plain")
    optimizer = ds_zero.shard(net, bench.adamw(net), stage=3, shard_size=shard_size)
    bench.loss(net, bench.batch(0, 0, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
    for a, b in zip(net.parameters(), bench.ddp("plain", steps=1), strict=True):
        assert torch.equal(a, b)


@world(2)
def test_a_size_that_does_not_divide_the_ranks_is_refused(bench):
    net = bench.model("plain")
    with pytest.raises(PlanError, match="2 ranks cannot be cut into replicas of 3"):
        ds_zero.shard(net, bench.adamw(net), stage=1, shard_size=3)
