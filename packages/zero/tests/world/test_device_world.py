"""Sharded training with everything on a device: the weights of one process there. In `nox -s gpu` between ranks on a card, with NCCL."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_ops.optim
import ds_zero
from ds_testing import world
from ds_testing.device_only import host_reads
from ds_testing.device_worlds import device_world, on_place
from ds_zero import OffloadPolicy

STEPS, MICRO = 3, 2
OPTIONS = {
    "plain": {},
    "clip": {"clip": 0.05},
    "strict": {"strict": True},
    "replicas": {"shard_size": 1},
    "norm": {"clip": math.inf},
    "host": {"clip": 0.05, "offload_optimizer": OffloadPolicy("host")},
    "weights on the host": {"offload_params": OffloadPolicy("host"), "clip": 0.05},
    "all on the host": {
        "offload_params": OffloadPolicy("host"),
        "offload_optimizer": OffloadPolicy("host"),
        "clip": 0.05,
    },
}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Net(nn.Module):
    """Two layers under activation checkpointing, a head that is the first layer's weight, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(8, 16, bias=False), nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x):
        x = self.first(x)
        for layer in self.middle:
            x = checkpoint(lambda t, layer=layer: torch.tanh(layer(t)), x, use_reentrant=False)
        return nn.functional.linear(x * self.scale, self.first.weight.T)


def make_net(device):
    torch.manual_seed(0)
    return Net().to(device)


def batch(step, micro, rank, device):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(4, 8, generator=generator).to(device)


def wanted(device, clip=None, steps=STEPS):
    """What one process makes of the batches of all ranks."""
    net, size = make_net(device), dist.get_world_size()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    for step in range(steps):
        for micro in range(MICRO):
            for rank in range(size):
                (net(batch(step, micro, rank, device)).square().mean() / size).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def train(net, optimizer, device, steps=STEPS):
    for step in range(steps):
        for micro in range(MICRO):
            net(batch(step, micro, dist.get_rank(), device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def shard(device, stage, **options):
    net = make_net(device)
    policy = ds_zero.UnitSizePolicy(max_numel=300, persist_numel=0)
    # ds-ops' optimizer writes weights in the pass of the update, where they are on its device. Its kernels take no stand-in of a card.
    kind = ds_ops.optim.AdamW if "offload_params" in options and device.type == "cuda" else torch.optim.AdamW
    adamw = kind(net.parameters(), lr=0.02)
    return net, ds_zero.shard(net, adamw, stage=stage, policy=policy, **options)


@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@device_world(2)
def test_training_is_that_of_one_process(stage, name, device):
    if name == "replicas" and stage == 0:
        pytest.skip("nothing is sharded at stage 0")
    if "offload_params" in OPTIONS[name] and stage < 3:
        pytest.skip("weights leave the device at stage 3")
    net, optimizer = shard(device, stage, **OPTIONS[name])
    train(net, optimizer, device)
    optimizer.state_dict()
    optimizer.close()
    assert {p.device for p in net.parameters()} == {device}
    for a, b in zip(net.parameters(), wanted(device, OPTIONS[name].get("clip")), strict=True):
        torch.testing.assert_close(a.detach(), b, **CLOSE)


@pytest.mark.parametrize("stage", [0, 3])
@device_world(2)
def test_weights_that_differ_are_made_those_of_the_first_rank(stage, device):
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(8, 8).to(device)
    optimizer = ds_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    optimizer.close()
    torch.manual_seed(0)
    assert torch.equal(model.weight.data.cpu(), nn.Linear(8, 8).weight.data.cpu())


@pytest.mark.parametrize("stage", [1, 2, 3])
@device_world(2)
def test_state_that_is_loaded_goes_on(stage, device):
    net, optimizer = shard(device, stage)
    train(net, optimizer, device, 1)
    saved = {item.shard: item.data.clone() for item in optimizer.shards()}
    meta, shapes = optimizer.common_state_dict(), {shard.name: shard.shape for shard in saved}
    optimizer.close()
    net, optimizer = shard(device, stage)
    optimizer.materialize(shapes)
    optimizer.load_state_dict(meta)
    for item in optimizer.shards():
        item.data.copy_(saved[item.shard])
    optimizer.refresh()
    for step in range(1, STEPS):
        for micro in range(MICRO):
            net(batch(step, micro, dist.get_rank(), device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    for a, b in zip(net.parameters(), wanted(device), strict=True):
        torch.testing.assert_close(a.detach(), b, **CLOSE)


@device_world(4)
def test_four_ranks_in_two_groups(device):
    net, optimizer = shard(device, 3, shard_size=2, clip=0.05)
    train(net, optimizer, device)
    optimizer.close()
    for a, b in zip(net.parameters(), wanted(device, 0.05), strict=True):
        torch.testing.assert_close(a.detach(), b, **CLOSE)


@pytest.mark.parametrize("stage", [1, 3])
@device_world(2)
def test_a_step_waits_and_comes_back(stage, device):
    """State leaves the device between steps, and a whole parameter is read there."""
    net, optimizer = shard(device, stage)
    train(net, optimizer, device, 2)
    whole = ds_zero.safe_get_full_fp32_param(net.first.weight)
    assert whole.shape == (16, 8)
    optimizer.suspend()
    optimizer.resume()
    train_from = 2
    for micro in range(MICRO):
        net(batch(train_from, micro, dist.get_rank(), device)).square().mean().backward()
    optimizer.step()
    optimizer.close()
    for a, b in zip(net.parameters(), wanted(device), strict=True):
        torch.testing.assert_close(a.detach(), b, **CLOSE)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("place", ["device-and-host", "device-only"])
@world(2)
def test_how_often_the_host_reads_the_device(place, stage):
    """Once a step, for the norm. Where groups take tensors of a device alone, also what ranks agree on: once a backward, a step, and a forward of stage 3."""
    with on_place(place) as device:
        net, optimizer = shard(device, stage, clip=0.05)
        train(net, optimizer, device, 2)
        with host_reads() as reads:
            for micro in range(MICRO):
                net(batch(2, micro, dist.get_rank(), device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    agreed = 0 if place == "device-and-host" else 1 + MICRO * (2 if stage == 3 else 1)
    assert len(reads) <= 1 + agreed, "; ".join(reads)


@device_world(2)
def test_a_model_made_on_the_host_inside_init(device):
    if device.type != "cuda":
        pytest.skip("what stands for a card does not see where the values go when a parameter is used")
    torch.manual_seed(dist.get_rank())
    with ds_zero.Init():
        net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
        nn.init.constant_(net[2].bias, 0.5)
    with ds_zero.GatheredParameters(list(net.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            net[0].bias.data.fill_(0.25)
    copied = copy.deepcopy(net)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).to(device)
    with torch.no_grad():
        plain[0].bias.fill_(0.25)
        plain[2].bias.fill_(0.5)
    for made in (net, copied):
        made.to(device)
        optimizer = ds_zero.shard(made, torch.optim.SGD(made.parameters(), lr=0.1), stage=3)
        x = torch.randn(4, 6, device=device)
        torch.testing.assert_close(made(x), plain(x))
        optimizer.close()


@device_world(2)
def test_a_model_that_moves_to_the_host_while_it_is_whole_is_back_afterwards(device):
    if device.type != "cuda":
        pytest.skip("what stands for a card is no other device than the host")
    net, optimizer = shard(device, 3)
    with ds_zero.GatheredParameters(list(net.parameters())):
        assert {p.device.type for p in net.cpu().parameters()} == {"cpu"}
    train(net, optimizer, device)
    optimizer.close()
    for a, b in zip(net.parameters(), wanted(device), strict=True):
        torch.testing.assert_close(a.detach(), b, **CLOSE)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 12), nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))

    def forward(self, x, route):
        x = self.first(x)
        for number in route:
            x = x + self.experts[number](x).tanh()
        return self.last(x)


@device_world(2)
def test_ranks_that_take_other_paths(device):
    """A stream waited for a sum that another rank sent only after a gather, which came behind that wait: with NCCL both waited for ever."""
    torch.manual_seed(0)
    net, plain = Experts().to(device), Experts().to(device)
    plain.load_state_dict(net.state_dict())
    policy = ds_zero.UnitSizePolicy(max_numel=1, persist_numel=0)
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, policy=policy)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(8):
        routes = {4: ([0, 1, 2], [5]), 5: ([], [3, 4]), 6: ([5, 0], [0, 5])}.get(step, ([0, 1, 2],) * 2)
        for rank, route in enumerate(routes):
            x = batch(step, 0, rank, device)[:, :4]
            if rank == dist.get_rank():
                net(x, route).square().mean().backward()
            (plain(x, route).square().mean() / 2).backward()
        for one in (optimizer, sgd):
            one.step()
            one.zero_grad()
    optimizer.close()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), **CLOSE)


class Uneven(nn.Module):
    """Sizes that leave gaps, a layer that not every batch uses, and one whose gradient is a view of another's."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.rare = nn.Linear(8, 5), nn.Linear(5, 8), nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.zeros(4, 5))

    def forward(self, x, *, rare):
        x = self.last(torch.tanh(self.first(x) + self.shift.view(4, 5)))
        return self.rare(x) if rare else x


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@device_world(1)
def test_gradients_of_the_only_rank_stay_where_autograd_made_them(stage, precision, device):
    torch.manual_seed(0)
    net = Uneven().to(device)
    reference = copy.deepcopy(net)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.02)
    optimizer = ds_zero.shard(
        net, torch.optim.AdamW(net.parameters(), lr=0.02), stage=stage, precision=precision, clip=0.5
    )
    units = optimizer.sharding.units
    for step in range(4):
        working = reference if precision == "fp32" else copy.deepcopy(reference).to(torch.bfloat16)
        wide = [None] * len(list(reference.parameters()))
        for micro in range(MICRO):
            x = batch(step, micro, 0, device).to(next(net.parameters()).dtype)
            for model in (net, working):
                model(x, rare=(step + micro) % 3 == 0).float().square().mean().backward()
            for i, p in enumerate(working.parameters()):
                if p.grad is not None:
                    wide[i] = p.grad.float() + (0 if wide[i] is None else wide[i])
                    p.grad = None
        for p, total in zip(reference.parameters(), wide, strict=True):
            p.grad = total
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    expected = ds_zero.ReduceStrategy.SINGLE if device.type == "cuda" else ds_zero.ReduceStrategy.ARENA
    assert {unit.plan.reduction for unit in units} == {expected}
    tolerance = CLOSE if precision == "fp32" else {"rtol": 0.02, "atol": 0.005}
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach().float(), q.detach(), **tolerance)
    optimizer.close()
