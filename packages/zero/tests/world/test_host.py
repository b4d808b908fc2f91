"""Memory shared by the ranks of a host: the same numbers, and nobody sees what is not his."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_config.errors import UnsupportedError
from ds_testing import world

BF16 = ds_zero.Precision(param=torch.bfloat16)


def edited_run(memory, edit, precision=None):
    """Train two steps, let every rank edit the parameters, train two more."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 40))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = ds_zero.shard(net, sgd, stage=2, memory=memory, precision=precision)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                edit(net)
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(7 * step + dist.get_rank()))
        x = x.to(next(net.parameters()).dtype)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shards = [s.data.clone() for s in optimizer.shards() if s.shard.name.startswith("param/")]
    optimizer.close()
    return shards, [p.detach().clone() for p in net.parameters()]


def by_data(net):
    for p in net.parameters():
        p.data.mul_(0.5)


def by_name(net):
    net[0].weight.mul_(0.5)
    net[2].bias.add_(1.0)


# An edit through `.data` of a bf16 copy is seen in shared memory only (`Unit.adopt_edits`), so there is no such case.
@pytest.mark.parametrize(
    ("edit", "precision"), [(by_data, None), (by_name, None), (by_name, BF16)], ids=["data", "name", "bf16"]
)
@world(2)
def test_edits_of_every_rank_count_once(edit, precision):
    private, shared = edited_run("private", edit, precision), edited_run("shared", edit, precision)
    for a, b in zip(private[0] + private[1], shared[0] + shared[1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("memory", ["private", "shared"])
@world(2)
def test_what_is_written_to_the_shards_replaces_edits_before(memory):
    torch.manual_seed(0)
    net = nn.Linear(40, 40)
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.0), stage=2, memory=memory, precision=BF16)
    weight = net.weight.detach().clone()
    by_data(net)
    optimizer.refresh()  # as a load does
    for _ in range(2):
        assert torch.equal(net.weight, weight)
        net(torch.ones(1, 40, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
@world(2)
def test_parameters_exist_once_and_steady_steps_take_nothing(stage):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = ds_zero.shard(net, torch.optim.AdamW(net.parameters()), stage=stage, memory="shared")
    pool, host = optimizer.sharding.pool, optimizer.sharding.units[0].groups.host

    def step():
        net(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    before = pool.fresh, host.nbytes, [p.data_ptr() for p in net.parameters()]
    for _ in range(5):
        step()
    assert (pool.fresh, host.nbytes, [p.data_ptr() for p in net.parameters()]) == before
    assert host.edited() == []  # every page of every parameter is the host's one copy
    assert all(u.storage.home.data_ptr() != u.full.data_ptr() and u.plan.aliased for u in optimizer.sharding.units)
    optimizer.close()


@world(2)
def test_gathered_writes_reach_every_rank():
    torch.manual_seed(0)
    net = nn.Linear(30, 30)
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.0), stage=3, memory="shared")
    with ds_zero.GatheredParameters(net.weight, modifier_rank=1):
        if dist.get_rank() == 1:
            net.weight.data.fill_(5.0)
    assert ds_zero.safe_get_full_fp32_param(net.weight).eq(5.0).all()
    ds_zero.safe_set_full_fp32_param(net.bias, torch.full((30,), 2.0))
    assert net.bias.eq(2.0).all()
    net(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
    assert net.weight.eq(5.0).all()
    assert net.bias.eq(2.0).all()


@world(2)
def test_private_is_the_default_on_gloo_and_shared_on_one_rank_is_refused_by_nothing():
    net = nn.Linear(4, 4)
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3)
    assert optimizer.sharding.units[0].groups.host is None
    optimizer.close()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, group=alone, memory="shared")
    assert optimizer.sharding.units[0].groups.host is None
    optimizer.close()


@world(2)
def test_what_cannot_be_shared_is_told(monkeypatch):
    monkeypatch.setattr("ds_zero.runtime.unit_groups.host_refusal", lambda group: "the ranks are on 2 hosts")
    net = nn.Linear(4, 4)
    with pytest.raises(UnsupportedError, match="2 hosts"):
        ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, memory="shared")
