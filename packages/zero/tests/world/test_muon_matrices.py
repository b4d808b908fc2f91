"""Muon of ds-ops steps a sharded convolution as the matrix that its weight was said to be."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_ops
import ds_zero
from ds_testing import world


def build(by: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(4, 12, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(48, 6)).double()
    group = {"params": list(net.parameters())}
    if by == "parameter":
        net[0].weight.muon_matrices = "flat"
    else:
        group["muon_matrices"] = "flat"
    return net, ds_ops.optim.Muon([group], lr=1e-2)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> None:
    for step in range(3):
        losses: list[Tensor] = []
        for rank in ranks:
            x = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(7 * step + rank), dtype=torch.float64)
            losses.append(net(x).square().mean())
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("by", ["parameter", "group"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_a_sharded_convolution_is_one_matrix(stage: int, by: str) -> None:
    (net, inner), (twin, plain) = build(by), build(by)
    optimizer = ds_zero.shard(net, inner, stage=stage)
    train(net, optimizer, [dist.get_rank()])
    train(twin, plain, [0, 1])
    optimizer.close()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
