"""A rank with other options, or other values in its optimizer's groups, is told on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_config.errors import PlanError
from ds_testing import world

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def make(net, rank=0, **values):
    """AdamW with `values` on rank 1, and torch's on all others."""
    return torch.optim.AdamW(net.parameters(), **(values if rank else {}))


@STAGES
@pytest.mark.parametrize(
    ("key", "value"), [("lr", 0.5), ("weight_decay", 0.3), ("betas", (0.5, 0.9)), ("amsgrad", True)]
)
@world(2)
def test_other_values_of_an_optimizer_are_refused_before_anything_is_changed(stage, key, value):
    net = nn.Linear(4, 4)
    before = net.weight.clone()
    optimizer = make(net, dist.get_rank(), **{key: value})
    with pytest.raises(PlanError, match=rf"{key}.* of group 0: .* on rank 0 and .* on rank 1") as error:
        ds_zero.shard(net, optimizer, stage=stage)
    assert error.value.code == "zero-ranks-differ"
    assert torch.equal(net.weight, before)
    assert optimizer.param_groups[0]["params"][0] is net.weight


@pytest.mark.parametrize(
    "options",
    [{"clip": 1.0}, {"precision": "bf16"}, {"policy": ds_zero.UnitSizePolicy(max_numel=8)}, {"stage": 2}, {"layout": "whole"}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
@world(2)
def test_other_options_are_refused(options):
    net = nn.Linear(4, 4)
    with pytest.raises(PlanError, match=f"{next(iter(options))}.* on rank 0 and .* on rank 1"):
        ds_zero.shard(net, make(net), **{"stage": 1, **(options if dist.get_rank() else {})})


@STAGES
@world(2)
def test_a_rate_that_one_rank_changes_is_refused_by_the_next_step(stage):
    """Each rank updates its shard by its own rate: other weights than any process has, and nobody sees it."""
    net = nn.Linear(4, 4)
    optimizer = ds_zero.shard(net, make(net), stage=stage)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(3):
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with ds_zero.GatheredParameters(net):
        before = net.weight.clone()
    net(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(
        PlanError,
        match=r"the ranks step with different settings:\n  lr of group 0: 0\.000125 on rank 0 and 0\.01 on rank 1",
    ):
        optimizer.step()
    with ds_zero.GatheredParameters(net):
        assert torch.equal(net.weight, before)
    optimizer.param_groups[0]["lr"] = 0.01  # and once they agree the step is made
    optimizer.step()
    optimizer.zero_grad()
    with ds_zero.GatheredParameters(net):
        assert not torch.equal(net.weight, before)
    optimizer.close()


@world(2)
def test_a_rate_that_is_a_tensor_is_read_in_every_step():
    """The tensor is the same one, and equal to itself, when its value is another."""
    net = nn.Linear(4, 4)
    made = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1))
    optimizer = ds_zero.shard(net, made, stage=1)
    for step in range(3):
        net(torch.ones(2, 4)).sum().backward()
        if step == 2:
            optimizer.param_groups[0]["lr"].fill_(0.1 + dist.get_rank())
            with pytest.raises(PlanError, match=r"lr of group 0: 0\.1\d* on rank 0 and 1\.1\d* on rank 1"):
                optimizer.step()
            optimizer.param_groups[0]["lr"].fill_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


@world(2)
def test_another_divisor_is_refused():
    net = nn.Linear(4, 4)
    optimizer = ds_zero.shard(net, make(net), stage=1)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.divisor = 1.0 + dist.get_rank()
    with pytest.raises(PlanError, match=r"divisor: 1\.0 on rank 0 and 2\.0 on rank 1"):
        optimizer.step()
    optimizer.divisor = 1.0
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()


@world(2)
def test_what_is_of_one_rank_may_differ(tmp_path):
    """Scratch folders, and what optimizers count for themselves."""
    net = nn.Linear(4, 4)
    folder = tmp_path / str(dist.get_rank())
    optimizer = make(net)
    optimizer.param_groups[0]["seen"] = dist.get_rank()
    place = ds_zero.OffloadPolicy("file", folder=str(folder))
    optimizer = ds_zero.shard(net, optimizer, stage=1, offload_optimizer=place)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
