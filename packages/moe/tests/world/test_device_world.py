"""Experts over ranks with everything on a device: outputs and gradients of a dense loop in one process. In `nox -s gpu` on a card."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_comm
from ds_moe import MoE, MoEOptions, expert_load, place_experts
from ds_moe.dispatch import through_experts
from ds_moe.expert_groups import alone
from ds_testing import world
from ds_testing.device_only import host_reads
from ds_testing.device_worlds import device_world, on_place


def wanted(bench, size, device, **how):
    net = bench.model(**how).to(device)
    losses = [bench.dense(net, bench.batch(rank, how.get("kind", "even")).to(device)) for rank in range(size)]
    (sum(losses) / size).backward()
    return losses, {name: param.grad for name, param in net.named_parameters()}


def check(bench, ep_size, device, run=lambda net, x: net(x), **how):
    """The loss of this rank, and gradients averaged over the ranks of their family."""
    size, rank = dist.get_world_size(), dist.get_rank()
    net = bench.model(ep_size, rank % ep_size, **how).to(device)
    placed = place_experts(net)
    loss = run(net, bench.batch(rank, how.get("kind", "even")).to(device))
    loss.backward()
    grads = {}
    for name, param in net.named_parameters():
        family = ds_comm.param_sharding(param).family
        if family is None or family.group.size > 1:
            ds_comm.all_reduce(param.grad, group=None if family is None else family.group)
        grads[name] = param.grad / (size if family is None else family.divisor)
    losses, expected = wanted(bench, size, device, **how)
    torch.testing.assert_close(loss, losses[rank], atol=1e-9, rtol=1e-9)
    bench.close(bench.logical(grads, rank % ep_size, ep_size), expected, 1e-9)
    placed.close()


@pytest.mark.parametrize("kind", ["even", "uneven", "none", "one"])
@pytest.mark.parametrize("k", [1, 2])
@device_world(2)
def test_experts_over_two_ranks(k, kind, bench, device):
    check(bench, 2, device, k=k, drop=False, kind=kind)


@pytest.mark.parametrize("k", [1, 2])
@device_world(2)
def test_tokens_over_capacity_are_dropped_as_in_one_process(k, bench, device):
    check(bench, 2, device, k=k, drop=True, kind="uneven")


@device_world(4)
def test_copies_of_experts(bench, device):
    check(bench, 2, device, k=2, drop=False, kind="even")


@device_world(2)
def test_under_activation_checkpointing(bench, device):
    def run(net, x):
        return checkpoint(net, x, use_reentrant=False)

    check(bench, 2, device, run, k=2, drop=False, kind="uneven")


@device_world(2)
def test_the_load_of_a_rank_is_that_of_its_tokens(bench, device):
    rank = dist.get_rank()
    net = bench.model(2, rank, k=1).to(device)
    placed = place_experts(net)
    net(bench.batch(rank).to(device))
    loads = expert_load(net)
    assert sum(sum(load.counts) for load in loads.values()) == bench.batch(rank).shape[0]
    placed.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@device_world(2)
def test_training_at_every_stage(stage, bench, device):
    """Three steps with clipping, beside all experts in one process."""
    size, rank = dist.get_world_size(), dist.get_rank()
    net = bench.model(2, rank, k=2).to(device)
    placed = place_experts(net)
    ds_zero = pytest.importorskip("ds_zero")
    optimizer = ds_zero.shard(net, torch.optim.AdamW(net.parameters(), lr=1e-2), stage=stage, clip=0.3)
    whole = bench.model(k=2).to(device)
    plain = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(3):
        net(bench.batch(rank, step=step).to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        (sum(whole(bench.batch(r, step=step).to(device)) for r in range(size)) / size).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.3)
        plain.step()
        plain.zero_grad()
    optimizer.close()
    named = {name: param.detach() for name, param in net.named_parameters()}
    expected = {name: param.detach() for name, param in whole.named_parameters()}
    bench.close(bench.logical(named, rank, 2), expected, 1e-6)
    placed.close()


@pytest.mark.parametrize("k", [1, 2])
@world(2)
def test_the_host_reads_the_device_once_a_layer(k, bench, monkeypatch):
    """How many rows go to each rank; the backward pass knows it."""
    monkeypatch.setattr("ds_moe.shm_dispatch.Windows.ask", lambda *_: False)  # memory that processes of the host share
    with on_place("device-and-host") as device:
        net = bench.model(2, dist.get_rank(), k=k).to(device)
        placed = place_experts(net)
        x = bench.batch(dist.get_rank()).to(device)
        net(x).backward()
        with host_reads() as reads:
            net(x).backward()
        placed.close()
    assert len(reads) == 1, "; ".join(reads)


@world(1)
def test_on_one_rank_the_host_reads_no_counts():
    """Grouped products find the ends of their rows on the device."""
    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    with on_place("device-and-host") as device:
        net = MoE(8, expert, num_experts=4, k=2, drop_tokens=False, options=MoEOptions(grouped=True)).to(device)
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(device)
        with host_reads() as reads:
            routed = net.deepspeed_moe.gate(x)
            through_experts(x, routed, lambda rows, ends: rows * ends.ends.numel(), alone()).sum().backward()
    assert reads == []
