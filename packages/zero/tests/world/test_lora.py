"""A frozen base cut over ranks, with a low-rank update: the same numbers as with the whole base."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ds_zero
from ds_comm import world_group
from ds_config.errors import PlanError
from ds_ops.formats import FP8_E4M3
from ds_testing import world
from ds_zero.policies.tiled_layers import LoRALinear


def make(quantized=None, group=None, base=None):
    torch.manual_seed(3)
    layer = LoRALinear(24, 8, rank=4, alpha=8.0, group=group, quantized=quantized, group_size=8)
    if base is not None:
        layer.load_state_dict({"weight": base})
    torch.manual_seed(5)
    layer.start()
    return layer


@pytest.mark.parametrize("quantized", [None, FP8_E4M3])
@pytest.mark.parametrize("stage", [0, 1, 3])
@world(2)
def test_a_cut_base_trains_as_a_whole_one(stage, quantized):
    rank = world_group().rank
    torch.manual_seed(1)
    base = torch.randn(8, 24)
    results = []
    for group in (None, world_group()):
        layer = make(quantized, group, base)
        net = nn.Sequential(nn.Linear(6, 24), layer, nn.Linear(8, 2))
        torch.manual_seed(7)
        for linear in (net[0], net[2]):
            linear.reset_parameters()
        rows = layer.weight.shape[0]
        assert rows == (8 if group is None else 4)
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizer = ds_zero.shard(net, torch.optim.AdamW(trained, lr=0.05), stage=stage)
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            loss = net(torch.randn(5, 6)).square().mean()
            optimizer.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        with ds_zero.GatheredParameters(list(net.parameters())):
            results.append([p.detach().clone() for p in net.parameters() if p.requires_grad])
        optimizer.close()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_the_written_formula():
    layer = make()
    nn.init.normal_(layer.lora_B.weight)
    plain = copy.deepcopy(layer)
    x = torch.randn(3, 24, requires_grad=True)
    y = torch.randn(3, 24)
    y.data.copy_(x.data)
    y.requires_grad_()
    layer(x).square().sum().backward()
    whole = plain.weight + plain.scale * plain.lora_B.weight @ plain.lora_A.weight
    (y @ whole.T).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    assert layer.weight.grad is None
    assert layer.lora_A.weight.grad is not None


def test_a_layer_without_its_update_says_so():
    layer = LoRALinear(4, 4, rank=2, alpha=2.0)
    with pytest.raises(PlanError, match="before its update began"):
        layer(torch.ones(1, 4))
    with pytest.raises(PlanError, match="rank 0"):
        LoRALinear(4, 4, rank=0, alpha=1.0)
