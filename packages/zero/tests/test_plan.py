"""Bytes before anything is allocated."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import ds_zero
from ds_zero.layout.dtypes_plan import Precision
from ds_zero.layout.units import STAGES, ModuleInfo, ParamInfo, UnitBytes, plan_units
from ds_zero.planning.unit_plan import ParamStorage, ReduceStrategy, ShardGroupInfo, passing_bytes, plan_unit


def net():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


NUMEL = 4 * (64 * 64 + 64)
NO_PERSIST = ds_zero.UnitSizePolicy(max_numel=64 * 64 + 64, persist_numel=0)


@pytest.mark.parametrize(
    ("stage", "precision", "bytes_per_element"),
    # world 4; per element: full, shard, grads, optim
    [(0, "fp32", (4, 0, 4, 8)), (1, "fp32", (4, 0, 1, 2)), (2, "fp32", (4, 0, 1, 2)), (3, "fp32", (0, 1, 1, 2)),
     (0, "bf16", (2, 4, 2 + 4, 8)), (1, "bf16", (2, 1, 1, 2)), (2, "bf16", (2, 1, 1, 2)), (3, "bf16", (0.5, 1, 1, 2))],
)  # fmt: skip
def test_kept_bytes_are_the_papers_and_at_stage_1_only_a_shard_of_gradients(stage, precision, bytes_per_element):
    options = ds_zero.ShardOptions(stage=stage, precision=precision, policy=NO_PERSIST)
    found = ds_zero.plan(net(), 4, options)
    assert tuple(found.persistent_bytes.values()) == tuple(NUMEL * b for b in bytes_per_element)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_equals_what_is_allocated_in_one_process(stage, precision):
    options = ds_zero.ShardOptions(stage=stage, precision=precision)
    found = ds_zero.plan(net(), 1, options, state_tensors=1)
    model = net()
    optimizer = ds_zero.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), stage=stage, precision=precision
    )
    for _ in range(2):
        model(torch.ones(2, 64, dtype=model[0].weight.dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = [u.bytes for u in optimizer.sharding.units]
    assert sum(h["full"] for h in held) == found.persistent_bytes["full"]
    assert sum(h["shard"] for h in held) == found.persistent_bytes["shard"]
    assert sum(h["grad_full"] + h["grad_shard"] for h in held) == found.persistent_bytes["grads"]
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert state == found.persistent_bytes["optim"]
    optimizer.close()


def test_at_stage_1_every_gradient_may_wait_for_the_last_microbatch():
    options = [ds_zero.ShardOptions(stage=stage, policy=NO_PERSIST) for stage in (1, 2)]
    one, two = (ds_zero.plan(net(), 4, o).passing for o in options)
    assert one == NUMEL * 4
    assert two == NUMEL * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_doubling_the_ranks_halves_what_is_sharded(stage):
    options = ds_zero.ShardOptions(stage=stage, precision="bf16", policy=NO_PERSIST)
    small, large = (ds_zero.plan(net(), world, options).persistent_bytes for world in (8, 16))
    assert small["optim"] == pytest.approx(2 * large["optim"], rel=0.05)  # chunks are whole lines
    assert small["shard"] == pytest.approx(2 * large["shard"], rel=0.05)


def test_seventy_billion_parameters_from_records_in_no_time():
    modules, params = [ModuleInfo(""), ModuleInfo("layers", callable=False)], []
    for i in range(80):
        modules.append(ModuleInfo(f"layers.{i}"))
        params += [ParamInfo(f"layers.{i}.w{j}", (8192, 13_000), "bfloat16", f"layers.{i}", 0) for j in range(8)]
    began = time.process_time()
    found = ds_zero.plan(params, 1024, ds_zero.ShardOptions(stage=3, precision="bf16"), modules=modules)
    assert time.process_time() - began < 60  # a hang, not a speed
    assert len(found.units) == 80
    assert found.persistent_bytes["optim"] == pytest.approx(8 * 80 * 8 * 8192 * 13_000 / 1024, rel=1e-3)
    assert "80 units on 1024 ranks" in str(found)
    assert found.peak == sum(found.persistent_bytes.values()) + found.passing


def test_a_model_on_the_meta_device_is_enough():
    with torch.device("meta"):
        model = nn.Linear(1 << 15, 1 << 15)
    assert ds_zero.plan(model, 8, ds_zero.ShardOptions(stage=3)).persistent_bytes["shard"] == pytest.approx(
        (1 << 30) * 4 / 8, rel=1e-3
    )


def test_state_of_a_format_of_its_own_is_counted():
    rule = ds_zero.PrecisionRule("1.*", state=torch.bfloat16)
    found = ds_zero.plan(
        net(), 4, ds_zero.ShardOptions(stage=2, precision=ds_zero.Precision(rules=(rule,)), policy=NO_PERSIST)
    )
    assert found.persistent_bytes["optim"] == 2 * (64 * 64 + 64) // 4 * (3 * 4 + 2)


@pytest.mark.parametrize(("stage", "passing"), [(0, 9 + 40), (1, 9 + 40), (2, 9 + 20), (3, 9 + 30)])
def test_the_unit_in_use_the_next_one_and_two_or_three_buffers_pass(stage, passing):
    units = [UnitBytes(gathered=n, arena=10) for n in (3, 5, 4, 1)]
    assert passing_bytes(units, STAGES[stage]) == passing
    assert passing_bytes(units[:1], STAGES[stage]) == 3 + 10
    assert passing_bytes([], STAGES[stage]) == 0


@pytest.mark.parametrize(
    ("ranks", "stage", "storage", "reduction"),
    [
        (ShardGroupInfo(4), 2, ParamStorage.PRIVATE, ReduceStrategy.ARENA),
        (ShardGroupInfo(4, anywhere=True), 2, ParamStorage.PRIVATE, ReduceStrategy.EXCHANGE),
        (ShardGroupInfo(4, anywhere=True), 3, ParamStorage.RELEASED, ReduceStrategy.EXCHANGE),
        (ShardGroupInfo(4, shared=True), 3, ParamStorage.SHARED, ReduceStrategy.POSTING),
        (ShardGroupInfo(4, anywhere=True), 0, ParamStorage.PRIVATE, ReduceStrategy.ARENA),
    ],
)
def test_a_unit_is_kept_and_reduced_as_its_ranks_can(ranks, stage, storage, reduction):
    info = ParamInfo("w", (64, 64), "float32", "", group=0)
    (spec,) = plan_units([info], [ModuleInfo("")], STAGES[stage], NO_PERSIST)
    found = plan_unit(spec, Precision.of("bf16"), ranks)
    assert (found.storage, found.reduction) == (storage, reduction)
    world = 4 if stage else 1
    chunk = 0 if ranks.shared else 64 * 64 // world * (world - 1)
    assert found.sent["gather"] == 2 * chunk
    assert found.sent["reduce"] == found.dtypes.reduce.itemsize * chunk


def test_a_plan_says_its_bytes_in_mebibytes():
    found = ds_zero.plan(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), 4, ds_zero.ShardOptions(stage=3))
    words = {line.split()[0]: float(line.split()[1]) for line in str(found).splitlines()[1:] if line.endswith("MiB")}
    assert words["passing"] == pytest.approx(found.passing / 2**20, abs=0.06) != 0
    assert words["peak"] == pytest.approx(found.peak / 2**20, abs=0.06) != 0
    for name, nbytes in found.persistent_bytes.items():
        assert words[name] == pytest.approx(nbytes / 2**20, abs=0.06)
