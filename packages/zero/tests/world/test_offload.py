"""State that rests in host memory or in files: the same bits as without, at every stage."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import ds_zero
from ds_testing import world
from ds_zero import Placement

HOST = Placement("host")


def filed(folder, **options):
    return Placement("file", str(folder), **{"buffers": 2, **options})


def train(bench, *, steps=4, kind="adamw", name="plain", batches=2, act=lambda net, optimizer, step: None, **options):
    """The parameters and the state after a few steps with three groups, changing rates, accumulation and clipping."""
    net = bench.model(name)
    params = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": params[i::3], "lr": 1e-2 * (i + 1), "weight_decay": 0.01 * i} for i in range(3)]
    make = {
        "adamw": lambda: torch.optim.AdamW(groups),
        "ops": lambda: ds_zero_adamw(groups),
        "momentum": lambda: torch.optim.SGD(groups, momentum=0.9),
    }
    options = {"policy": ds_zero.UnitPolicy(max_numel=600, persist_numel=40), "clip": 0.5, **options}
    optimizer = ds_zero.shard(net, make[kind](), **options)
    for step in range(steps):
        for micro in range(batches):
            bench.loss(net, bench.batch(step, micro, dist.get_rank())).backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
        act(net, optimizer, step)
    return net, optimizer


def ds_zero_adamw(groups):
    import ds_ops.optim

    return ds_ops.optim.AdamW(groups)


def result(net, optimizer):
    found = {name: ds_zero.safe_get_full_fp32_param(p).clone() for name, p in net.named_parameters()}
    for shard in optimizer.shards():
        found[shard.shard.name] = shard.data.clone()
    optimizer.close()
    return found


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_offloaded_runs_have_the_same_bits(bench, tmp_path, stage):
    for memory in ("private", "shared"):
        expected = result(*train(bench, stage=stage, memory=memory, kind="ops"))
        for tier in (
            HOST,
            Placement("host", share=0.5),
            filed(tmp_path),
            filed(tmp_path, read_ahead=False, write_behind=False),
        ):
            net, optimizer = train(bench, stage=stage, memory=memory, kind="ops", tier=tier)
            places = {str(u.plan.tier) for u in optimizer.sharding.units}
            assert str(tier) in places
            assert ("device" in places) == (tier.share < 1)
            if tier.where == "file":
                assert all(u.shard.untyped_storage().nbytes() == 0 for u in optimizer.sharding.units)
            same(result(net, optimizer), expected)
            assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["tied", "frozen", "unused"])
@world(2)
def test_parameters_that_rest_elsewhere(bench, tmp_path, name):
    expected = result(*train(bench, stage=3, memory="private", name=name))
    for tier in ("device", HOST, filed(tmp_path)):
        for rest in (HOST, filed(tmp_path)):
            net, optimizer = train(bench, stage=3, memory="private", name=name, tier=tier, rest=rest)
            for unit in optimizer.sharding.units:
                held = unit.bytes
                assert (held["full"], held["shard"]) == (unit.plan.bytes.full, unit.plan.bytes.shard), unit.plan
            assert any(u.plan.rest == rest for u in optimizer.sharding.units)
            same(result(net, optimizer), expected)
