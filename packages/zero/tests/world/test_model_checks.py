"""Kinds of models that cannot be sharded are refused by name, before anything is changed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_config.errors import PlanError, UnsupportedError
from ds_testing import world

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))

    def forward(self, x):
        return (x.to(torch.cfloat) @ self.weight).abs()


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


@STAGES
@world(2)
def test_complex_parameters_are_refused_by_name(stage):
    net = Complex()
    with pytest.raises(UnsupportedError, match="weight: complex parameters") as error:
        ds_zero.shard(net, sgd(net), stage=stage)
    assert error.value.code == "zero-complex"


@world(1)
def test_complex_parameters_of_one_process_are_trained():
    net = Complex()
    before = net.weight.detach().clone()
    optimizer = ds_zero.shard(net, sgd(net), stage=0, clip=1.0)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.close()
    assert not torch.equal(net.weight, before)


@STAGES
@world(2)
def test_embeddings_that_write_in_forward_are_refused(stage):
    net = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 1))
    with pytest.raises(UnsupportedError, match=r"0 has max_norm=0\.5") as error:
        ds_zero.shard(net, sgd(net), stage=stage)
    assert error.value.code == "zero-max-norm"


@world(1)
def test_scripted_modules_are_refused_at_stage_3():
    net = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 1))
    with pytest.raises(UnsupportedError, match="0 is scripted") as error:
        ds_zero.shard(net, sgd(net), stage=3)
    assert error.value.code == "zero-scripted"


@pytest.mark.parametrize("kind", ["all", "script", "trace"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@world(2)
def test_scripted_modules_train_below_stage_3(stage, kind):
    """What is scripted reads new weights in C++: also where it is called by itself, right after a step."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 1)
        )

    plain, net = make(), make()
    if kind == "all":
        net = torch.jit.script(net)
    else:
        net[1] = torch.jit.script(net[1]) if kind == "script" else torch.jit.trace(net[1], torch.ones(2, 8))
    theirs, ours = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, net))
    optimizer = ds_zero.shard(net, ours, stage=stage, policy=ds_zero.UnitSizePolicy(8, 64))
    for step in range(4):
        xs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(step))
        (plain(xs[0]).square().mean() / 2 + plain(xs[1]).square().mean() / 2).backward()
        net(xs[dist.get_rank()]).square().mean().backward()
        for one in (theirs, optimizer):
            one.step()
            one.zero_grad()
        part, whole = (getattr(one, "1") for one in (net, plain))
        torch.testing.assert_close(part(torch.ones(2, 8)), whole(torch.ones(2, 8)))
    optimizer.close()


@STAGES
@world(1)
def test_norms_whose_buffers_stay_wide_name_the_key(stage):
    def make():
        return nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4))

    net = make()
    with pytest.raises(PlanError, match=r"1, a BatchNorm1d, .*bfloat16 and buffers in float32") as error:
        ds_zero.shard(net, sgd(net), stage=stage, precision="bf16")
    assert error.value.code == "zero-buffer-format"


@STAGES
@world(2)
def test_frozen_weights_of_8_bits_stay_as_they_are(stage):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x @ self.codes.to(x.dtype) * self.scale

    net = Net()
    optimizer = torch.optim.SGD([net.scale], lr=0.1)
    optimizer = ds_zero.shard(net, optimizer, stage=stage, precision="bf16")
    assert net.codes.dtype == torch.float8_e4m3fn
    net(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.close()
    assert net.codes.dtype == torch.float8_e4m3fn
