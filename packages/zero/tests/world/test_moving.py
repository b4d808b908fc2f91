"""State that leaves the device and comes back: the same bits, every byte accounted for, and no use meanwhile."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ds_zero
from ds_config.errors import ShardedAccessError, UnsupportedError
from ds_testing import world


def step(bench, net, optimizer, number):
    bench.loss(net, bench.batch(number, 0, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("stage", "precision"), [(0, None), (1, None), (2, "bf16"), (3, None), (3, "bf16")])
@world(2)
def test_suspend_gives_every_byte_back_and_resume_the_same_bits(bench, stage, precision):
    nets = [bench.model("external") for _ in range(2)]
    policy = ds_zero.UnitSizePolicy(max_numel=600, persist_numel=40)
    sharded = [ds_zero.shard(n, bench.adamw(n), stage=stage, precision=precision, policy=policy) for n in nets]
    for net, optimizer in zip(nets, sharded, strict=True):
        step(bench, net, optimizer, 0)
    held = {}
    for unit in sharded[0].sharding.units:
        for what, size in unit.bytes.items():
            held[what] = held.get(what, 0) + size
    buffers = sharded[0].sharding.pool.bytes + held["grad_shard"]
    planned = ds_zero.plan(bench.model("external"), 2, sharded[0].sharding.options).persistent_bytes
    freed = sharded[0].suspend()
    assert (freed["parameters"], freed["masters"]) == (held["full"], held["shard"])
    assert freed["parameters"] == planned["full"]
    assert freed["optimizer"] == planned["optim"]
    assert freed["buffers"] == buffers
    assert all(u.full.untyped_storage().nbytes() == 0 for u in sharded[0].sharding.units)
    with pytest.raises(ShardedAccessError, match="away from the device"):
        nets[0](bench.batch(1, 0, 0))
    with pytest.raises(ShardedAccessError, match="away from the device"):
        sharded[0].step()
    sharded[0].resume()
    for net, optimizer in zip(nets, sharded, strict=True):
        step(bench, net, optimizer, 1)
        optimizer.close()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a, b)


@world(2)
def test_what_is_left_stays_usable(bench):
    """Without its optimizer state a model still computes, and closing brings everything back."""
    net = bench.model("plain")
    optimizer = ds_zero.shard(net, bench.adamw(net), stage=2)
    step(bench, net, optimizer, 0)
    before = net(bench.batch(0, 0, 0)).detach()
    freed = optimizer.suspend(["optimizer"])
    assert freed["optimizer"] > 0
    assert set(freed) == {"optimizer", "buffers"}
    assert torch.equal(net(bench.batch(0, 0, 0)), before)
    with pytest.raises(UnsupportedError, match="no state 'weights'"):
        optimizer.suspend(["weights"])
    optimizer.suspend()
    optimizer.close()
    assert torch.equal(net(bench.batch(0, 0, 0)), before)
