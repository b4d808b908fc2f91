"""Optimizer state that is in host memory while nobody reads it: the same bits, and nothing on the device meanwhile."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_engine.compiling.verbs import Graphs
from ds_testing import world


def held(optimizer):
    """Bytes of the optimizer's state on the device."""
    values = [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.dim()
    ]
    return sum(
        storage.nbytes() for storage in {v.untyped_storage().data_ptr(): v.untyped_storage() for v in values}.values()
    )


def train(stage, *, park, steps=4):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4))
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer = ds_zero.shard(net, inner, stage=stage, policy=ds_zero.UnitSizePolicy(max_numel=600))
    graphs, least = Graphs(optimizer.sharding), []
    parking = graphs.park(pin=True) if park else None
    for step in range(steps):
        for unit in range(len(graphs.units)):
            graphs.put_state(unit)  # as a forward graph does
        least.append(held(optimizer))
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        net(torch.randn(8, 16, generator=generator)).square().mean().backward()
        graphs.get_state(0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:  # whoever reads it finds it there
            for unit in range(len(graphs.units)):
                graphs.put_state(unit)
            assert all(shard.data.abs().sum() >= 0 for shard in optimizer.shards())
            assert parking is None or parking.bytes == {}
    found = {name: ds_zero.safe_get_full_fp32_param(p).clone() for name, p in net.named_parameters()}
    state = {name: ds_zero.safe_get_full_optimizer_state(p, "exp_avg").clone() for name, p in net.named_parameters()}
    whole = held(optimizer)
    graphs.stay()
    graphs.put_state(0)
    assert held(optimizer) == whole
    optimizer.close()
    return (found, state), least, whole


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_parked_state_has_the_same_bits_and_is_not_on_the_device(stage):
    expected, before, whole = train(stage, park=False)
    found, least, _ = train(stage, park=True)
    for one, other in zip(expected, found, strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name]), name
    assert before == [0, whole, whole, whole]
    assert least == [0, 0, 0, 0]
