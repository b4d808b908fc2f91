"""On a device whose work comes late: rows go to experts of two ranks and back, and where each expert's rows end goes to the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_moe import place_experts
from ds_moe.shm_dispatch import Windows
from ds_testing import world
from ds_testing.late_device import drawn_orders, late_device


def run(bench: Any) -> list[torch.Tensor]:
    rank = dist.get_rank()
    net = bench.model(2, rank, k=2, drop=False, kind="uneven")
    placed = place_experts(net)
    loss = net(bench.batch(rank, "uneven"))
    loss.backward()
    found = [loss.detach(), *(param.grad for param in net.parameters() if param.grad is not None)]
    placed.close()
    return found


@drawn_orders
@world(2)
def test_rows_to_experts_of_two_ranks(order: int, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_OPS", "reference")
    monkeypatch.setattr(Windows, "ask", lambda windows, group: False)  # as on a device
    expected = run(bench)
    with late_device(order) as device:
        found = run(bench)
    assert device.copies > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
