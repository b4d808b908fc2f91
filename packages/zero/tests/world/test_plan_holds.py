"""What was planned is what there is, and what is sent: drawn models, groups, rules, stages and memories."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_comm
import ds_monitor
import ds_zero
from ds_comm.reduction_group import ParamSharding, ReductionGroup, set_param_sharding
from ds_testing import world
from ds_zero.planning.unit_plan import ParamStorage, ReduceStrategy


def draw(seed):
    """(a model, an optimizer on it, options), the same on every rank."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [chance.randint(1, 40) for _ in range(chance.randint(2, 6))]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b, bias=chance.random() < 0.6)]
        layers += [nn.LayerNorm(b)] if chance.random() < 0.4 else []
    net = nn.Sequential(*layers)
    for param in list(net.parameters())[1:]:
        param.requires_grad_(chance.random() < 0.85)
    if chance.random() < 0.3 and dist.get_world_size() == 2:
        alone = ds_comm.self_group("mine", dist.get_rank())
        for key, param in net[-1].named_parameters():
            set_param_sharding(
                param,
                ParamSharding(ReductionGroup("expert", alone, 2), f"experts.{dist.get_rank()}.{key}"),
            )
    params = list(net.parameters())
    decay, rest = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}] + ([{"params": rest, "weight_decay": 0.0}] if rest else [])
    kind = chance.choice(["adamw", "sgd", "momentum", "adagrad"])
    make = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=1e-3, amsgrad=chance.random() < 0.3),
        "sgd": lambda: torch.optim.SGD(groups, lr=1e-3),
        "momentum": lambda: torch.optim.SGD(groups, lr=1e-3, momentum=0.9),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=1e-3),
    }
    rules = (ds_zero.PrecisionRule("*.bias", param=torch.float32),) if chance.random() < 0.3 else ()
    param = chance.choice([None, torch.bfloat16])
    policy = ds_zero.UnitSizePolicy(
        max_numel=chance.choice([None, 1, 500]), persist_numel=chance.choice([0, 50]), persist_total=chance.choice([None, 100])
    )  # fmt: skip
    options = {
        "stage": chance.randint(0, 3), "precision": ds_zero.Precision(param=param, rules=rules), "policy": policy,
        "memory": chance.choice(["private", "shared"]), "layout": chance.choice([None, "flat", "dim0"]),
    }  # fmt: skip
    return net, make[kind](), options


def check(seed):
    net, inner, options = draw(seed)
    optimizer = ds_zero.shard(net, inner, **options)
    plan, units = optimizer.sharding.plan, optimizer.sharding.units
    assert [u.plan for u in units] == list(plan.units)
    for _ in range(2):
        for param in net.parameters():
            if param.requires_grad:
                param.grad = torch.full(param.shape, 0.1, dtype=param.dtype)
        optimizer.step()
        optimizer.zero_grad()
    names = [name for unit in plan.units for name in unit.spec.shapes]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    for unit in units:
        held, planned = unit.bytes, unit.plan.bytes
        # Of memory that a host shares each rank counts its part.
        full = held["full"] // (unit.layout.world if unit.plan.storage is ParamStorage.SHARED else 1)
        assert (full, held["shard"]) == (planned.full, planned.shard), (seed, unit.plan)
        state = [v for part in unit.parts for v in inner.state[part.tensor].values() if v.dim()]
        if unit.plan.layout.kind == "flat":
            assert sum(v.nbytes for v in state) == planned.optim, (seed, unit.plan)
        else:  # padding of rows has no state
            padding = (unit.layout.shard_numel - sum(p.interval.numel for p in unit.owned)) * 3 * 4
            assert planned.optim - padding <= sum(v.nbytes for v in state) <= planned.optim
        if unit.plan.reduction is ReduceStrategy.ARENA:
            assert held["grad_full"] + held["grad_shard"] <= planned.grads + planned.arena, (seed, unit.plan)
    optimizer.close()


@world(2)
def test_plans_hold():
    for seed in range(12):
        check(seed)


@pytest.mark.slow
@world(2, timeout=600)
def test_three_hundred_plans_hold():
    for seed in range(300):
        check(seed)


@pytest.mark.slow
@world(3, timeout=300)
def test_plans_hold_on_three_ranks():
    for seed in range(1000, 1060):
        check(seed)


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@world(2)
def test_bytes_on_the_wire_are_those_of_the_plan(memory, dtype):
    """Counted where every collective passes: of one step at stage 3, two gathers and one reduction a unit."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 16, bias=False)).to(dtype)
    policy = ds_zero.UnitSizePolicy(max_numel=1, persist_numel=0)
    optimizer = ds_zero.shard(
        net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, memory=memory, policy=policy, overlap=False
    )
    x = torch.ones(2, 32, dtype=dtype)
    sink = ds_monitor.MemorySink()
    for step in range(3):
        net(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            ds_monitor.attach([sink])
    ds_monitor.detach([sink])
    for unit in optimizer.sharding.plan.units:
        spans = [r.attrs for r in sink.records if r.attrs.get("unit") == unit.name]
        gathered = sum(f["nbytes"] for f in spans if f["group"].endswith("gather"))
        reduced = sum(f["nbytes"] for f in spans if not f["group"].endswith("gather"))
        assert (gathered, reduced) == (2 * unit.sent["gather"], unit.sent["reduce"]), (unit, spans)
    optimizer.close()


@pytest.mark.parametrize("stage", [1, 3])
@world(2)
def test_frozen_parameters_have_no_master_and_gathers_recast_nothing(stage):
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4))
    net[0].requires_grad_(False)
    policy = ds_zero.UnitSizePolicy(persist_numel=0)
    optimizer = ds_zero.shard(
        net, torch.optim.AdamW(net.parameters(), lr=0.01), stage=stage, precision="bf16", policy=policy
    )
    frozen = [u for u in optimizer.sharding.units if not u.spec.trained]
    assert {u.dtypes.master for u in frozen} == {torch.bfloat16}
    assert ds_zero.safe_get_full_fp32_param(net[0].weight).dtype == torch.float32
    trained = next(u for u in optimizer.sharding.units if u.spec.trained)
    if stage == 3:
        assert trained.storage.sent.dtype == torch.bfloat16
        assert all(u.storage.sent is None for u in frozen)
    net(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    shard = trained.shard.to(torch.bfloat16)
    own = trained.storage.chunks()[0] if stage == 1 else trained.storage.sent
    assert torch.equal(own, shard)
    optimizer.close()
