"""On a device whose work comes late: parked optimizer state and saved activations come back with the values they had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_zero
from ds_accel import streams
from ds_engine.compiling import ops
from ds_engine.compiling.config import CompileConfig
from ds_engine.compiling.parking import Parking
from ds_engine.device_placement import to_device
from ds_testing.late_device import drawn_orders, late_device


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native kernels would run at once on memory of the device."""
    monkeypatch.setenv("DS_OPS", "reference")


def trained(park: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    policy = ds_zero.UnitSizePolicy(max_numel=64, persist_numel=0)
    optimizer = ds_zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=1, policy=policy)
    parking = Parking(optimizer.sharding.units, pin=True) if park else None
    for step in range(3):
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        if parking is not None:
            for unit in optimizer.sharding.units:
                parking.put(unit.number)
        loss.backward()
        if parking is not None and step != 1:  # else the step brings it back
            for unit in optimizer.sharding.units:
                parking.begin(unit.number)
        optimizer.step()
        optimizer.zero_grad()
    if parking is not None:
        assert parking.moved > 0
        parking.close()
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@drawn_orders
def test_parked_state(order: int) -> None:
    with late_device(order) as device:
        found = trained(True)
    assert device.copies > 0
    assert same(found, trained(False))


class Target:
    section = CompileConfig()


@drawn_orders
def test_saved_activations(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = Target()
    with late_device(order) as device:
        monkeypatch.setitem(ops._targets, 1, target)
        first = torch.ones(64) * 3
        host = ops._store(first, 1)
        ops._free([first])
        other = torch.zeros(64) + 7  # may lie where it was
        back = ops._fetch(host, torch.device("cpu"))
        total = (back + other).sum()
        assert float(total) == 640
        assert device.copies == 2


@drawn_orders
def test_a_batch_of_page_locked_memory(order: int) -> None:
    with late_device(order):
        batch = {"x": streams.pin(torch.arange(32.0)), "n": [1, "two"]}
        moved = to_device(batch, torch.device("cpu"), torch.float64)
        assert moved["n"] == [1, "two"]
        assert float((moved["x"] * 2).sum()) == 992
