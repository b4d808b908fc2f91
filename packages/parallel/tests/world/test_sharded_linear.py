"""One layer that a program cuts itself: the numbers of the whole layer, and the whole weights back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_comm import world_group
from ds_parallel.tensor import ShardPart
from ds_parallel.tensor.dim_shards import cut_dim
from ds_parallel.tensor.sharded_linear import ShardedLinear
from ds_testing import world


@pytest.mark.parametrize("sizes", [(12,), (6, 4, 2), (5, 7)])
@pytest.mark.parametrize("dim", [0, 1])
@world(2)
def test_a_layer_of_which_each_rank_has_a_part(dim: int, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    plain = nn.Linear(5, 12) if dim == 0 else nn.Linear(12, 5)
    x, group = torch.randn(4, plain.in_features), world_group()
    cut = cut_dim(12, dim, [ShardPart(size=size) for size in sizes], group.size)
    layer = ShardedLinear(*(nn.Parameter(p.detach().clone()) for p in plain.parameters()), cut, group)
    layer.gather_output, layer.split_input = True, len(sizes) == 1
    assert layer.weight.shape[dim] == cut.width(group.rank)
    local = x if dim == 0 or layer.split_input else torch.cat([x[:, a:b] for a, b in cut.stretches(group.rank)], 1)
    whole, mine = x.clone().requires_grad_(), local.clone().requires_grad_()
    out = layer(mine)
    torch.testing.assert_close(out, plain(whole))
    out.square().sum().backward()
    plain(whole).square().sum().backward()
    shares = (
        whole.grad
        if mine.shape == whole.shape
        else torch.cat([whole.grad[:, a:b] for a, b in cut.stretches(group.rank)], 1)
    )
    torch.testing.assert_close(mine.grad, shares)
    part = layer.weight.detach().clone()
    layer.gather_params([layer.weight, layer.bias])
    layer.gather_params([layer.weight, None])
    assert torch.equal(layer.weight, plain.weight)
    assert torch.equal(layer.bias, plain.bias)
    layer.shard_params([layer.weight])
    assert torch.equal(layer.weight, part)
