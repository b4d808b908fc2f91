"""torchao's float8 training below every stage: products are fp8 (emulated on the CPU), the weights those of averaged gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import ds_comm
import ds_zero
from ds_config.errors import UnsupportedError
from ds_testing import world

float8 = pytest.importorskip("torchao.float8")


def converted(recipe: str | None, **options: bool) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    config = (
        float8.Float8LinearConfig(**options) if recipe is None else float8.Float8LinearConfig.from_recipe_name(recipe)
    )
    return float8.convert_to_float8_training(net, config=replace(config, emulate=True))


def loss_of(net: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(10 * step + rank))
    return net(x).square().mean()


@pytest.mark.parametrize(
    ("stage", "recipe"),
    [(0, "tensorwise"), (1, "rowwise"), (2, "rowwise_with_gw_hp"), (3, "tensorwise"), (3, "rowwise")],
)
@world(2)
def test_weights_are_those_of_averaged_gradients(stage: int, recipe: str) -> None:
    group = ds_comm.world_group()
    plain, net = converted(recipe), converted(recipe)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    policy = ds_zero.UnitSizePolicy(persist_numel=0)
    optimizer = ds_zero.shard(net, torch.optim.AdamW(net.parameters(), lr=1e-2), stage=stage, policy=policy)
    for step in range(3):
        loss_of(net, step, group.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(group.size):
            (loss_of(plain, step, rank) / group.size).backward()
        reference.step()
        reference.zero_grad()
    optimizer.close()
    assert {type(module).__name__ for module in net[::2]} == {"Float8Linear"}
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@world(2)
def test_weights_that_wait_for_fsdp_are_refused() -> None:
    net = converted(None, enable_fsdp_float8_all_gather=True)
    before = dict(net.named_parameters())
    with pytest.raises(UnsupportedError, match=r"0\.weight, 2\.weight, 4\.weight") as error:
        ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3)
    assert error.value.code == "zero-fsdp-gather"
    assert all(before[name] is param for name, param in net.named_parameters())
