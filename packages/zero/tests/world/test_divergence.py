"""Ranks that take different paths: absent gradients are zeros, and nobody waits for ever."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_config.errors import PlanError
from ds_testing import world

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SMALL = ds_zero.UnitSizePolicy(max_numel=300, persist_numel=8)


class Routed(nn.Module):
    """Each call goes through the experts its caller names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.last = nn.Linear(16, 1)

    def forward(self, x, route):
        x = self.first(x)
        for i in route:
            x = x + torch.tanh(self.experts[i](x))
        return self.last(x)


def make():
    torch.manual_seed(0)
    return Routed().double()


def data(step, rank):
    made = torch.Generator().manual_seed(1000 * step + rank)
    route = torch.randperm(6, generator=made)[: int(torch.randint(0, 4, (), generator=made))].tolist()
    return torch.randn(4, 8, generator=made, dtype=torch.float64), route


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def check_routing(stage, steps, memory="private"):
    net, twin = make(), make()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=SMALL, memory=memory)
    plain = sgd(twin)
    for step in range(steps):
        x, route = data(step, dist.get_rank())
        net(x, route).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            x, route = data(step, rank)
            (twin(x, route).square().mean() / 2).backward()
        plain.step()
        plain.zero_grad()
    optimizer.close()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@STAGES
@world(2, timeout=120)
def test_random_routing_for_many_steps(stage):
    check_routing(stage, 120)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "memory"), [*((s, "private") for s in range(4)), (2, "shared"), (3, "shared")])
@world(2, timeout=300)
def test_random_routing_for_500_steps(stage, memory):
    check_routing(stage, 500, memory)


@STAGES
@world(2)
def test_a_rank_skips_a_module_only_once(stage):
    """The order is learned from steps that agree, and must hold when they stop to."""
    net, twin = make(), make()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=SMALL)
    plain = sgd(twin)
    routes = {4: ([0, 1, 2], [5]), 5: ([], [3, 4]), 6: ([5, 0], [0, 5])}
    for step in range(8):
        for rank in range(2):
            x = data(step, rank)[0]
            route = routes.get(step, ([0, 1, 2], [0, 1, 2]))[rank]
            if rank == dist.get_rank():
                net(x, route).square().mean().backward()
            (twin(x, route).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    optimizer.close()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@STAGES
@world(2)
def test_strict_raises_on_every_rank(stage):
    net = make()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=SMALL, strict=True)
    net(data(0, 0)[0], [0, 1]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    net(data(0, 0)[0], [0] if dist.get_rank() else [0, 1]).sum().backward()
    with pytest.raises(PlanError, match=r"experts\.1\.weight"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.close()


@STAGES
@world(2)
def test_what_no_rank_used_is_an_error_on_all_where_it_is_not_ignored(stage):
    net = make()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=SMALL, ignore_unused_parameters=False)
    x = data(0, 0)[0]
    net(x, [0, 1, 2] if dist.get_rank() else [3, 4, 5]).sum().backward()  # each is used by one rank
    optimizer.step()
    optimizer.zero_grad()
    net(x, [0, 2, 3, 4, 5]).sum().backward()
    with pytest.raises(PlanError, match=r"ignore_unused_parameters.*experts\.1\.weight") as caught:
        optimizer.step()
    assert caught.value.code == "zero-unused"
    assert "experts.2" not in caught.value.message
    optimizer.zero_grad()
    optimizer.close()


@STAGES
@world(2)
def test_parameters_that_no_rank_used_have_no_step(stage):
    """As in torch: no decay, no moment, no step count for a parameter without a gradient."""
    net, twin = make(), make()
    optimizer = ds_zero.shard(
        net, torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5), stage=stage, policy=SMALL
    )
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(9):
        route = [step % 3]
        for rank in range(2):
            x = data(step, rank)[0]
            if rank == dist.get_rank():
                net(x, route).square().mean().backward()
            (twin(x, route).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    optimizer.close()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@world(2)
def test_different_models_are_refused_on_every_rank():
    net = nn.Linear(4, 4 + dist.get_rank())
    with pytest.raises(PlanError, match="different models"):
        ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=1)


@STAGES
@world(2)
def test_different_values_become_rank_zeros(stage):
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[1].running_mean += dist.get_rank()
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage)
    optimizer.close()
    torch.manual_seed(0)
    assert torch.equal(net[0].weight, nn.Linear(4, 4).weight)
    assert not net[1].running_mean.any()
