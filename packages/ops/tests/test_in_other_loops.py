"""Optimizers of this package in loops that were written for torch's: schedules, averages, states that change hands."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ds_ops import optim
from ds_testing import world

TOLERANCE = 1e-6


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


def batch(step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(step))


def largest(found, wanted):
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(found, wanted, strict=True))


def trained(make, schedule=None, frozen=(), steps=12):
    """A loop with clipping, a schedule of rates and an average of the weights."""
    net = model()
    optimizer = make(net.parameters())
    scheduler = schedule(optimizer) if schedule else None
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(steps):
        net[0].weight.requires_grad_(step not in frozen)
        net(batch(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
        if scheduler:
            scheduler.step()
    return list(average.parameters())


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=12),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    ],
    ids=["one cycle, which sets betas", "restarts"],
)
def test_schedules_and_averages(schedule):
    found = trained(lambda p: optim.AdamW(p, 0.05), schedule)
    assert largest(found, trained(lambda p: torch.optim.AdamW(p, 0.05), schedule)) < TOLERANCE


def test_a_schedule_of_momentum():
    def schedule(o):
        return torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3)

    found = trained(lambda p: optim.SGD(p, 0.05, momentum=0.9), schedule)
    assert largest(found, trained(lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), schedule)) < TOLERANCE


def test_a_weight_that_is_frozen_for_a_while():
    found = trained(lambda p: optim.AdamW(p, 0.05), frozen=range(3, 7))
    assert largest(found, trained(lambda p: torch.optim.AdamW(p, 0.05), frozen=range(3, 7))) < TOLERANCE


@pytest.mark.parametrize(("first", "second"), [(optim, torch.optim), (torch.optim, optim), (optim, optim)])
def test_a_state_that_changes_hands(first, second):
    def run(*makers):
        net, optimizer = model(), None
        for number, make in enumerate(makers):
            state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
            optimizer = make(net.parameters(), 0.05)
            if state:
                optimizer.load_state_dict(state)
            for step in range(5):
                net(batch(5 * number + step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(net.parameters())

    plain = torch.optim.AdamW
    assert largest(run(first.AdamW, second.AdamW), run(plain, plain)) < TOLERANCE


def test_steps_within_the_backward():
    """An optimizer a parameter, stepped when its gradient is there, which is freed at once."""

    def run(make):
        net = model()
        optimizers = {p: make([p]) for p in net.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        for number in range(6):
            net(batch(number)).square().mean().backward()
        assert all(p.grad is None for p in net.parameters())
        return list(net.parameters())

    assert largest(run(lambda p: optim.AdamW(p, 0.05)), run(lambda p: torch.optim.AdamW(p, 0.05))) < TOLERANCE


def test_groups_that_are_edited_while_it_runs():
    def run(kind):
        net = model()
        optimizer = kind([{"params": [net[0].weight], "lr": 0.1, "weight_decay": 0.0}, {"params": [net[0].bias]}], 0.05)
        for step in range(8):
            net(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if step == 2:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.1
                    group["betas"] = (0.8, 0.9)
            if step == 4:
                optimizer.add_param_group({"params": list(net[3].parameters())})
        return list(net.parameters())

    assert largest(run(optim.AdamW), run(torch.optim.AdamW)) < TOLERANCE


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
@world(2, backend=None)
def test_in_torchs_own_sharder(tmp_path):
    """`ZeroRedundancyOptimizer` makes one of ours for this rank's parameters, around a DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which imports half of torch.jit

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
    whole, net = model(), DistributedDataParallel(model())
    ours = ZeroRedundancyOptimizer(net.parameters(), optim.AdamW, lr=0.05)
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.05)
    for step in range(4):
        parts = [batch(2 * step), batch(2 * step + 1)]
        net(parts[rank]).square().mean().backward()
        whole(torch.cat(parts)).square().mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert largest(net.parameters(), whole.parameters()) < TOLERANCE
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Lion, optim.SGD, optim.Adagrad])
def test_a_convolution_in_channels_last(kind):
    """Every convnet's layout today; a KernelError ended the first step."""
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=layout)
        optimizer = kind(model.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step)).to(memory_format=layout)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.weight)
    assert found[1].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(*found)
