"""Optimizers of ds-ops whose states have not their parameter's elements or format: moments in 8 bits, sums of rows and columns."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_ops.optim
import ds_zero
from ds_testing import world

KINDS = {"AdamW8bit": ds_ops.optim.AdamW8bit, "Adafactor": ds_ops.optim.Adafactor}


def build(kind):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(72, 72) for _ in range(3)))
    return net, KINDS[kind](net.parameters(), lr=1e-2)


def train(net, optimizer, steps, ranks):
    for step in steps:
        for rank in ranks:
            x = torch.randn(4, 72, generator=torch.Generator().manual_seed(7 * step + rank))
            (net(x).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def dump(optimizer):
    """Put every rank's shards together by name."""
    parts = [None] * dist.get_world_size()
    local = [(s.shard.name, s.shard.shape, s.shard.interval, s.data.clone()) for s in optimizer.shards()]
    dist.all_gather_object(parts, local)
    whole = {}
    for name, shape, interval, data in (entry for part in parts for entry in part):
        whole.setdefault(name, torch.zeros(math.prod(shape), dtype=data.dtype))[interval.start : interval.stop] = data
        whole[name].shape_of_all = shape
    return whole


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@world(2)
def test_steps_equal_one_process_and_a_resume_is_exact(kind, stage):
    (net, inner), (twin, plain) = build(kind), build(kind)
    optimizer = ds_zero.shard(net, inner, stage=stage)
    train(net, optimizer, range(3), [dist.get_rank()])
    train(twin, plain, range(3), range(2))
    saved, meta = dump(optimizer), json.loads(json.dumps(optimizer.common_state_dict()))
    formats = {name.rpartition("/")[2]: value.dtype for name, value in saved.items() if name.startswith("optim/")}
    if kind == "AdamW8bit":
        assert formats["exp_avg_8bit"] is torch.uint8
        assert formats["exp_avg_absmax"] is formats["exp_avg"] is torch.float32
    else:
        assert set(formats) == {"row_var", "col_var", "variance"}
    train(net, optimizer, range(3, 5), [dist.get_rank()])
    optimizer.close()

    other, inner = build(kind)
    resumed = ds_zero.shard(other, inner, stage=stage)
    resumed.materialize({name: value.shape_of_all for name, value in saved.items()})
    resumed.load_state_dict(meta)
    for local in resumed.shards():
        assert local.data.dtype == saved[local.shard.name].dtype
        local.data.copy_(saved[local.shard.name][local.shard.interval.start : local.shard.interval.stop])
    resumed.refresh()
    train(other, resumed, range(3, 5), [dist.get_rank()])
    resumed.close()
    train(twin, plain, range(3, 5), range(2))
    for a, b, c in zip(net.parameters(), other.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=3e-4 if kind == "AdamW8bit" else 1e-6)
