"""What people do to a run, all of it in one, gives the same bits wherever state rests."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import ds_ops.optim
import ds_zero
from ds_testing import world
from ds_zero import OffloadPolicy
from ds_zero.layout.dtypes_plan import Precision

POLICY = ds_zero.UnitSizePolicy(max_numel=600, persist_numel=40)
SKIPPING = Precision(skip_nonfinite=True)


def tiers(folder):
    return [
        {"offload_optimizer": OffloadPolicy("host")},
        {"offload_optimizer": OffloadPolicy("host", ratio=0.3)},
        {"offload_optimizer": OffloadPolicy("file", str(folder), buffer_count=2)},
        {"offload_optimizer": OffloadPolicy("file", str(folder), buffer_count=3, ratio=0.6)},
    ]


def param_tiers(folder):
    file = OffloadPolicy("file", str(folder), buffer_count=2)
    return [
        {"offload_params": OffloadPolicy("host")},
        {"offload_optimizer": OffloadPolicy("host"), "offload_params": file},
        {"offload_optimizer": file, "offload_params": file},
    ]


def grouped(net):
    """Three groups whose parameters take turns."""
    params = list(net.parameters())
    return [{"params": params[i::3], "lr": 1e-2 * (i + 1), "weight_decay": 0.01 * i} for i in range(3)]


def edit(net, optimizer, step):
    """What programs do between steps."""
    weight = net.head.weight
    if step == 0:
        with ds_zero.GatheredParameters([weight, net.embed.weight], modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                weight.mul_(0.75)
    if step == 2:
        ds_zero.safe_set_full_fp32_param(weight, torch.linspace(-1, 1, weight.ds_numel).view(weight.ds_shape))
        ds_zero.safe_set_full_optimizer_state(net.blocks[0].norm.weight, torch.full((16,), 0.01), "exp_avg_sq")
        ds_zero.safe_set_local_fp32_param(
            net.blocks[1].norm.bias, ds_zero.safe_get_local_fp32_param(net.blocks[1].norm.bias) + 0.125
        )


def run(bench, options):
    net = bench.model("plain")
    for param in net.parameters():
        param.ds_shape, param.ds_numel = tuple(param.shape), param.numel()
    optimizer = ds_zero.shard(
        net, ds_ops.optim.AdamW(grouped(net)), policy=POLICY, clip=0.2, precision=SKIPPING, **options
    )
    skipped = []
    for step in range(5):
        for micro in range(2):
            loss = bench.loss(net, bench.batch(step, micro, dist.get_rank()))
            (loss * float("inf") if step == 1 and dist.get_rank() == 1 else loss).backward()
        if step == 3:
            grad = ds_zero.safe_get_full_grad(net.head.weight)
            ds_zero.safe_set_full_grad(net.head.weight, grad * 0.5)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.last.skipped)
        edit(net, optimizer, step)
    assert skipped == [False, True, False, False, False]
    found = {name: ds_zero.safe_get_full_fp32_param(p).clone() for name, p in net.named_parameters()}
    for key in ("exp_avg", "exp_avg_sq"):
        for name, p in net.named_parameters():
            found[f"{name}/{key}"] = ds_zero.safe_get_full_optimizer_state(p, key).clone()
    optimizer.close()
    return found


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2, 3]
)
@world(2)
def test_edits_skips_rates_clipping_and_accumulation(bench, tmp_path, stage):
    expected = run(bench, {"stage": stage})
    for options in tiers(tmp_path) + (param_tiers(tmp_path) if stage == 3 else []):
        found = run(bench, {"stage": stage, **options})
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), (name, options)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("stage", [0, 2, 3])
@world(1)
def test_bf16_is_the_host_optimizers_own_result(bench, tmp_path, stage):
    """bf16 parameters, fp32 masters that ds-ops' AdamW updates with fp32 sums of bf16 gradients: written down by hand."""
    masters = [torch.nn.Parameter(p.detach().clone()) for p in bench.model("plain").parameters()]
    net = bench.model("plain").bfloat16()
    reference = ds_ops.optim.AdamW(masters, lr=1e-2, weight_decay=0.05)
    for step in range(4):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for micro in range(2):
            bench.loss(net, bench.batch(step, micro, 0)).backward()
            for master, param in zip(masters, net.parameters(), strict=True):
                master.grad += param.grad
                param.grad = None
        reference.step()
        with torch.no_grad():
            for master, param in zip(masters, net.parameters(), strict=True):
                param.copy_(master)
    for options in [{}, *tiers(tmp_path), *(param_tiers(tmp_path) if stage == 3 else [])]:
        own = bench.model("plain")
        inner = ds_ops.optim.AdamW(own.parameters(), lr=1e-2, weight_decay=0.05)
        optimizer = ds_zero.shard(own, inner, stage=stage, precision="bf16", policy=POLICY, **options)
        for step in range(4):
            for micro in range(2):
                bench.loss(own, bench.batch(step, micro, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for master, param in zip(masters, own.parameters(), strict=True):
            assert torch.equal(ds_zero.safe_get_full_fp32_param(param), master), options
        optimizer.close()


@world(2)
def test_a_function_may_say_the_tier_of_each_unit(bench, tmp_path):
    """Device, host and file in one model."""
    places = ["device", OffloadPolicy("host"), OffloadPolicy("file", str(tmp_path), buffer_count=2)]
    seen: dict[str, object] = {}

    def tier(spec):
        return seen.setdefault(spec.name, places[len(seen) % 3])

    expected = run(bench, {"stage": 2})
    found = run(bench, {"stage": 2, "offload_optimizer": tier})
    assert {str(place) for place in seen.values()} == {"device", "host", "file"}
    assert all(torch.equal(found[name], value) for name, value in expected.items())
