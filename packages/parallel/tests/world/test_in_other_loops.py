"""A model that tensor parallelism has cut, in programs that were written for whole ones."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from ds_comm import world_group
from ds_parallel.config import LayerSpecConfig
from ds_parallel.tensor import TensorOptions, facts_of, make_tensor_plan, parallelize_model
from ds_testing import world

SPECS = (
    LayerSpecConfig(patterns=(r"0\.weight",), partition_type="column"),
    LayerSpecConfig(patterns=(r"2\.weight",), partition_type="row"),
)


def whole():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def cut():
    model = whole()
    parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(2, specs=SPECS)), world_group())
    return model


def batch(step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(step))


def part(gradient, dim):
    return gradient.chunk(2, dim)[dist.get_rank()]


@world(2)
def test_an_average_of_the_weights() -> None:
    averages = []
    for model in (cut(), whole()):
        average, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        averages.append(average(batch(9)))
    torch.testing.assert_close(*averages)


@world(2)
def test_recomputed_and_accumulated_gradients() -> None:
    model, plain = cut(), whole()
    for step in range(2):
        checkpoint(model, batch(step), use_reentrant=False).square().mean().backward()
        plain(batch(step)).square().mean().backward()
    torch.testing.assert_close(model[0].weight.grad.to_local(), part(plain[0].weight.grad, 0))
    torch.testing.assert_close(model[2].bias.grad, plain[2].bias.grad)


@world(2)
def test_a_penalty_of_gradients() -> None:
    model, plain, found = cut(), whole(), []
    for one in (model, plain):
        x = batch(0).requires_grad_()
        (gradient,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        found.append(gradient)
    torch.testing.assert_close(*found)
    torch.testing.assert_close(model[2].weight.grad.to_local(), part(plain[2].weight.grad, 1))


@world(2)
def test_parts_are_saved_and_a_whole_state_is_no_part() -> None:
    model, other, file = cut(), cut(), io.BytesIO()
    with torch.no_grad():
        model[0].weight.mul_(2)
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(model(batch(0)), other(batch(0)))
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(whole().state_dict())
    assert all(type(p.grad) is not nn.Parameter for p in other.parameters())
