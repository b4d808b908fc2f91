"""Muon of ds-ops steps a sharded convolution as the matrix that its weight was said to be, and its directions can be clipped."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_ops
import ds_zero
from ds_ops.optim import FusedOps
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


def network(**options: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    groups = [
        {"params": [net[0].weight, net[2].weight, net[2].bias]},  # a vector among matrices
        {"params": [net[0].bias, *net[4].parameters()], "use_muon": False},
    ]
    return net, ds_ops.optim.Muon(groups, lr=2e-2, adam_lr=1e-2, weight_decay=0.1, adam_eps=1e-3, **options)


def losses(net: nn.Module, step: int, ranks: list[int]) -> Tensor:
    found: list[Tensor] = []
    for rank in ranks:
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(11 * step + rank))
        found.append(net(x.to(next(net.parameters()).dtype)).float().square().mean())
    return torch.stack(found).mean()


FILES = "files"


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("stage", "precision", "tier"),
    [
        (0, None, "device"),
        (1, None, "device"),
        (2, None, "device"),
        (3, None, "device"),
        (1, "fp16", "device"),
        (3, "fp16", "host"),
        (2, None, FILES),
    ],
)
@world(2)
def test_directions_are_clipped(stage: int, precision: str | None, tier: str, accumulation: int, tmp_path) -> None:
    """As one process that makes directions, takes their norm beside AdamW's gradients, and multiplies all; a skipped step leaves momentum."""
    (net, inner), (twin, plain) = network(clip_directions=True), network()
    placement = (
        "device"
        if tier == "device"
        else ds_zero.OffloadPolicy("host" if tier == "host" else "file", str(tmp_path) if tier == FILES else None)
    )
    recipe = precision and ds_zero.Precision(param=torch.float16, scale=ds_zero.LossScale(initial=256.0, hysteresis=1))
    optimizer = ds_zero.shard(
        net, inner, stage=stage, clip=0.5, precision=recipe, offload_optimizer=placement, memory="private",
        policy=ds_zero.UnitSizePolicy(max_numel=150, persist_numel=8) if stage == 3 else None,
    )  # fmt: skip
    for step in range(4):
        bad = precision is not None and step == 1
        for micro in range(accumulation):
            loss = losses(net, 10 * step + micro, [dist.get_rank()]) * (float("inf") if bad else 1.0)
            optimizer.scale(loss).backward()
        optimizer.divisor = accumulation
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last.skipped == bad
        if bad:
            continue
        torch.stack([losses(twin, 10 * step + micro, [0, 1]) for micro in range(accumulation)]).mean().backward()
        plain.direct(FusedOps())
        norm = torch.stack([p.grad.norm() for p in twin.parameters()]).norm().item()
        assert optimizer.last.norm == pytest.approx(norm, rel=2e-2 if precision else 1e-4)
        plain.step(fusion=FusedOps(grad_scale=0.5 / norm))
        plain.zero_grad()
    optimizer.close()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-3 if precision else 1e-5, atol=2e-3 if precision else 1e-6)
