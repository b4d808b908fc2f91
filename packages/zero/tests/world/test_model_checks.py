"""Kinds of models that cannot be sharded are refused by name, before anything is changed."""

from __future__ import annotations

import pytest
import torch
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


@STAGES
@world(1)
def test_scripted_modules_are_refused(stage):
    net = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    with pytest.raises(UnsupportedError, match="is scripted"):
        ds_zero.shard(net, sgd(net), stage=stage)


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
