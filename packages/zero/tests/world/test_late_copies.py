"""On a device whose work comes late: what is copied is not overwritten before, and everything is as without a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ds_ops.optim
import ds_zero
from ds_testing import world
from ds_testing.late_device import drawn_orders, late_device
from ds_zero import OffloadPolicy
from ds_zero.offload.state_stores import ParamStore

WHOLE_UNITS = ds_zero.UnitSizePolicy(max_numel=64, persist_numel=0)


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch):
    """Native kernels would run at once on memory of the device."""
    monkeypatch.setenv("DS_OPS", "reference")


def net(frozen=False):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    for layer in list(model)[::2] if frozen else ():
        layer.requires_grad_(False)
    return model


def train(frozen=False, stage=3, between=lambda optimizer, model: None, **options):
    """Three steps; weights are looked at and written in between, frozen ones too."""
    model = net(frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = ds_zero.shard(
        model, ds_ops.optim.AdamW(trained, lr=0.1), stage=stage, policy=WHOLE_UNITS, overlap=True, **options
    )
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with ds_zero.GatheredParameters(list(model.parameters())[:2], modifier_rank=0), torch.no_grad():
                for param in list(model.parameters())[:2]:
                    param.mul_(0.9)
            between(optimizer, model)
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


def places(folder):
    return {
        "device": {},
        "host": {"offload_params": OffloadPolicy("host")},
        "host, early": {
            "offload_params": OffloadPolicy("host"),
            "offload_optimizer": OffloadPolicy("host", overlap_ratio=1.0),
        },
        "file": {"offload_params": OffloadPolicy("file", str(folder), buffer_count=2)},
        "all in files": {
            "offload_params": OffloadPolicy("file", str(folder), buffer_count=4),
            "offload_optimizer": OffloadPolicy("file", str(folder), buffer_count=2),
        },
        "no read ahead": {"offload_params": OffloadPolicy("file", str(folder), buffer_count=3, read_ahead=False)},
    }


NAMES = list(places(""))


def late(order, **options):
    with late_device(order) as device:
        return device, train(**options)


def equal(weights, expected):
    return all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


@drawn_orders
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_without_a_device(name, order, tmp_path):
    options = {"frozen": order % 2 == 1, **places(tmp_path)[name]}
    device, weights = late(order, **options)
    assert (device.copies > 0) == (name != "device")
    assert device.kernels > 100
    assert equal(weights, train(**options))


@pytest.mark.parametrize("name", ["host", "all in files"])
@world(2)
def test_weights_are_those_without_a_device_on_two_ranks(name, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_OPS", "reference")
    expected = train(**places(tmp_path)[name])
    for order in range(2):
        device, weights = late(order, **places(tmp_path)[name])
        assert device.copies > 0
        assert equal(weights, expected)


@pytest.mark.parametrize("name", ["file", "all in files", "no read ahead"])
def test_without_the_event_a_slot_is_overwritten(name, tmp_path, monkeypatch):
    """As it was: a slot went back to its ring with nothing that said until when the device reads it."""
    expected = train(**places(tmp_path)[name])
    monkeypatch.setattr(ParamStore, "lend", lambda self, after: None)
    assert not all(equal(late(order, **places(tmp_path)[name])[1], expected) for order in range(3))


@drawn_orders
@pytest.mark.parametrize("stage", [1, 3])
def test_suspended_state_comes_back(stage, order):
    def move(optimizer, model):
        optimizer.suspend()
        optimizer.resume()

    assert equal(late(order, stage=stage, between=move)[1], train(stage=stage))


def test_the_only_rank_has_no_bucket():
    """A unit's gradients are as many blocks as it has parameters, so that they fit where activations were."""
    with late_device(0):
        model = net()
        optimizer = ds_zero.shard(model, ds_ops.optim.AdamW(model.parameters(), lr=0.1), stage=2, precision="bf16")
        (unit,) = optimizer.sharding.units
        assert unit.plan.reduction is ds_zero.ReduceStrategy.SINGLE
        model(torch.randn(4, 8, dtype=torch.bfloat16)).square().mean().backward()
        assert unit.gradients.arena is None
        unit.gradients.finish()
        assert [total.numel() for total in unit.gradients.sums] == [64] * 5
        assert {total.dtype for total in unit.gradients.sums} == {torch.float32}
        assert unit.plan.bytes.grads == 4 * 64 * 5
        assert not unit.plan.bytes.arena
        optimizer.close()
