"""On a device whose work comes late: the numbers of experts are read once they are on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_moe import MoE, expert_load
from ds_testing.late_device import LateEvent, drawn_orders, late_device


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native kernels would run at once on memory of the device."""
    monkeypatch.setenv("DS_OPS", "reference")


def counted() -> dict[str, tuple[int, ...]]:
    torch.manual_seed(0)
    layer = MoE(6, nn.Linear(6, 6), 4, k=2, use_rts=False, top2_2nd_expert_sampling=False)
    model = nn.Sequential(nn.Linear(6, 6), nn.Identity())
    hidden = model(torch.randn(20, 6, generator=torch.Generator().manual_seed(1)))
    out, _, _ = layer(hidden)
    out.square().mean().backward()
    return {name: load.counts for name, load in expert_load(layer).items()}


@drawn_orders
def test_counts_of_experts(order: int) -> None:
    expected = counted()
    with late_device(order) as device:
        assert counted() == expected
    assert device.copies > 0


def test_read_without_the_event_they_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, wrong = counted(), 0
    monkeypatch.setattr(LateEvent, "synchronize", lambda self: None)
    for order in range(3):
        with late_device(order):
            try:
                wrong += counted() != expected
            except ValueError:  # NaN is no count
                wrong += 1
    assert wrong > 0
