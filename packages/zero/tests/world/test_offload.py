"""State that rests in host memory or in files: the same bits as without, at every stage."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_testing import world
from ds_zero import OffloadPolicy

HOST = OffloadPolicy("host")


def filed(folder, **options):
    return OffloadPolicy("file", str(folder), **{"buffer_count": 2, **options})


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
    options = {"policy": ds_zero.UnitSizePolicy(max_numel=600, persist_numel=40), "clip": 0.5, **options}
    optimizer = ds_zero.shard(net, make[kind](), **options)
    for step in range(steps):
        for micro in range(batches):
            bench.loss(net, bench.batch(step, micro, dist.get_rank())).backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
        optimizer.zero_grad()
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


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
@world(2)
def test_offloaded_runs_have_the_same_bits(bench, tmp_path, stage):
    for memory in ("private", "shared"):
        expected = result(*train(bench, stage=stage, memory=memory, kind="ops"))
        for tier in (
            HOST,
            OffloadPolicy("host", ratio=0.5),
            filed(tmp_path),
            filed(tmp_path, read_ahead=False, write_behind=False),
        ):
            net, optimizer = train(bench, stage=stage, memory=memory, kind="ops", offload_optimizer=tier)
            places = {str(u.plan.offload_optimizer) for u in optimizer.sharding.units}
            assert str(tier) in places
            assert ("device" in places) == (tier.ratio < 1)
            if tier.device == "file":
                assert all(u.shard.untyped_storage().nbytes() == 0 for u in optimizer.sharding.units)
            optimizer.refresh()  # whole access need not come before it
            optimizer.shards()
            optimizer.sharding.put_away()
            same(result(net, optimizer), expected)
            assert os.listdir(tmp_path) == []


@world(2)
def test_files_are_read_while_gradients_are_computed(bench, tmp_path):
    net, optimizer = train(bench, stage=3, memory="private", kind="ops", offload_optimizer=filed(tmp_path))
    ring = next(u.state_store.ring for u in optimizer.sharding.units if u.state_store.alone)
    before = ring.reads
    until = time.monotonic() + 150
    while not ring.free() and time.monotonic() < until:  # nothing is read ahead while the last step is being written
        time.sleep(0.001)
    net(bench.batch(0, 0, 0)).sum().backward()
    assert ring.ahead
    assert ring.reads > before
    optimizer.step()
    optimizer.zero_grad()
    assert not ring.ahead
    optimizer.close()


@pytest.mark.parametrize("name", ["tied", "frozen", "unused"])
@world(2)
def test_parameters_that_rest_elsewhere(bench, tmp_path, name):
    expected = result(*train(bench, stage=3, memory="private", name=name))
    for tier in ("device", HOST, filed(tmp_path)):
        for rest in (HOST, filed(tmp_path)):
            net, optimizer = train(
                bench, stage=3, memory="private", name=name, offload_optimizer=tier, offload_params=rest
            )
            for unit in optimizer.sharding.units:
                held = unit.bytes
                assert (held["full"], held["shard"]) == (unit.plan.bytes.full, unit.plan.bytes.shard), unit.plan
            assert any(u.plan.offload_params == rest for u in optimizer.sharding.units)
            same(result(net, optimizer), expected)


@world(2)
def test_a_model_without_an_optimizer_rests_elsewhere(bench, tmp_path):
    for precision in (None, "bf16"):
        expected = bench.model("plain").requires_grad_(False)
        if precision is not None:
            expected = expected.bfloat16()
        for rest in (HOST, filed(tmp_path)):
            net = bench.model("plain").requires_grad_(False)
            policy = ds_zero.UnitSizePolicy(max_numel=600, persist_numel=40)
            sharding = ds_zero.shard(net, None, stage=3, offload_params=rest, precision=precision, policy=policy)
            tokens = bench.batch(0, 0, 0)
            for _ in range(3):
                with torch.no_grad():
                    assert torch.equal(net(tokens), expected(tokens))
            resting = [u for u in sharding.units if u.releases]
            assert resting
            assert all(u.plan.offload_params == rest and u.bytes["full"] == u.bytes["shard"] == 0 for u in resting)
            assert sum(s.data.numel() for s in sharding.param_shards()) > 0
            sharding.close()
            for a, b in zip(net.parameters(), expected.parameters(), strict=True):
                assert torch.equal(a.to(b.dtype), b)


def muon(net):
    import ds_ops.optim

    params = [p for p in net.parameters() if p.requires_grad]
    matrices = [p for p in params if p.dim() > 1]
    rest = [p for p in params if p.dim() <= 1]
    return ds_ops.optim.Muon([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}])


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
@world(2)
def test_whole_parameters_skips_replans_and_suspensions(bench, tmp_path, stage):
    def run(tier):
        net = bench.model("plain")
        policy = ds_zero.UnitSizePolicy(max_numel=600, persist_numel=40)
        optimizer = ds_zero.shard(
            net, muon(net), stage=stage, memory="private", precision="fp16", policy=policy, offload_optimizer=tier
        )
        for step in range(5):
            loss = bench.loss(net, bench.batch(step, 0, dist.get_rank()))
            if step == 2:
                loss = loss * float("inf")
            optimizer.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                optimizer.suspend(pin_memory=False)
                optimizer.resume()
            if step == 3:
                net.head.weight.requires_grad_(False)
                optimizer.replan()
        return result(net, optimizer)

    expected = run("device")
    for tier in (HOST, filed(tmp_path)):
        same(run(tier), expected)


@world(1)
def test_gradients_of_equal_matrices_land_in_memory_of_their_own(bench, tmp_path):
    """A device's gradients of one unit are on the host together: those of two matrices of a size had the same memory."""
    net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    optimizer = ds_zero.shard(net, muon(net), stage=0, memory="private", offload_optimizer=filed(tmp_path))
    for unit in optimizer.sharding.units:
        unit.state_store.fetch()
        places = [unit.state_store.landing(part.tensor).data_ptr() for part in unit.parts]
        assert len(places) == len(set(places)) == len(unit.params) == 2
        assert places == [unit.state_store.landing(part.tensor).data_ptr() for part in unit.parts]
        unit.state_store.store()
