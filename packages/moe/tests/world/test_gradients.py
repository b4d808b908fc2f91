"""A loop of one's own around experts on several ranks: averaged and clipped as in one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from ds_config.errors import ShardedAccessError
from ds_moe import clip_grad_norm_, place_experts, reduce_gradients
from ds_testing import world

CLIP = 0.5


def check(bench, ep_size, norm_type=2.0):
    rank, size = dist.get_rank(), dist.get_world_size()
    net, whole = bench.model(ep_size, rank % ep_size, k=2), bench.model(k=2)
    placed = place_experts(net)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (net, whole))
    for step in range(3):
        for number in (10, step) if step == 1 else (step,):
            net(bench.batch(rank, step=number)).backward()
            (sum(bench.dense(whole, bench.batch(r, step=number)) for r in range(size)) / size).backward()
        reduce_gradients(net)
        norm = clip_grad_norm_(net, CLIP, norm_type)
        wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP, norm_type)
        assert float(wanted) > CLIP
        assert float(norm) == pytest.approx(float(wanted), rel=1e-9)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    placed.close()
    named = {name: p.detach() for name, p in net.named_parameters()}
    bench.close(bench.logical(named, rank % ep_size, ep_size), dict(whole.named_parameters()), 1e-7)


@world(2)
def test_experts_of_two_ranks_are_clipped_as_in_one_process(bench):
    check(bench, 2)
    check(bench, 2, math.inf)
    check(bench, 1)


@world(4)
def test_experts_that_two_ranks_hold_are_clipped_as_in_one_process(bench):
    check(bench, 2)
    check(bench, 4)


@world(2)
def test_torch_clips_no_part_by_its_own_norm(bench):
    """Norms were 1.09 and 1.60 for 1.66, and ranks parted."""
    net = bench.model(2, dist.get_rank(), k=2)
    placed = place_experts(net)
    net(bench.batch(dist.get_rank())).backward()
    for foreach in (None, False):
        with pytest.raises(ShardedAccessError, match=r"ds_moe\.clip_grad_norm_") as error:
            torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP, foreach=foreach)
        assert error.value.code == "comm-part-norm"
    expert = next(net.moe.deepspeed_moe.experts.parameters())
    expert.grad.to_local().norm()
    placed.close()


@world(2)
def test_a_parameter_without_a_gradient_anywhere_keeps_none(bench):
    net = bench.model(2, dist.get_rank(), k=2)
    unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    net.register_parameter("unused", unused)
    placed = place_experts(net)
    net(bench.batch(dist.get_rank())).backward()
    reduce_gradients(net)
    assert unused.grad is None
    placed.close()
