"""Which optimizers may be given shards, found out by asking them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ds_zero
from ds_config.errors import UnsupportedError
from ds_ops import optim
from ds_zero.update.inner import habits_of


def params():
    return list(nn.Linear(6, 5).parameters())


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "RMSprop", "Rprop", "ASGD", "Adadelta"]
)
def test_elementwise(name):
    assert habits_of(getattr(torch.optim, name)(params(), lr=1e-2), None)[0].layout == "flat"


def test_fused_and_warming_up():
    assert habits_of(torch.optim.AdamW(params(), lr=0.0, fused=True), None)[0].layout == "flat"
    assert habits_of(torch.optim.AdamW(params(), lr=torch.tensor(1e-3)), "dim0")[0].layout == "dim0"


def test_whole_parameters_by_group():
    matrix, bias = params()
    assert habits_of(torch.optim.Muon([matrix], lr=1e-2), None)[0].layout == "whole"
    assert habits_of(torch.optim.Adafactor([matrix, bias], lr=1e-2), None)[0].layout == "whole"
    assert habits_of(optim.Lamb([matrix, bias], lr=1e-2), None)[0].layout == "whole"


@pytest.mark.parametrize("asked", ["flat", "dim0"])
def test_a_layout_that_would_be_wrong_is_refused(asked):
    with pytest.raises(UnsupportedError, match="Adafactor needs whole parameters"):
        habits_of(torch.optim.Adafactor(params(), lr=1e-2), asked)


class Coupled(torch.optim.SGD):
    """One norm over all parameters."""

    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"]]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for g in grads:
            g.div_(norm)
        return super().step(closure)


@pytest.mark.parametrize(("make", "why"), [(torch.optim.LBFGS, "closure"), (Coupled, "depends on the others")])
def test_what_cannot_be_sharded_is_refused_with_the_reason(make, why):
    net = nn.Linear(6, 5)
    with pytest.raises(UnsupportedError, match=why):
        ds_zero.shard(net, make(net.parameters(), lr=0.1), stage=2)


def test_asking_leaves_optimizer_and_randomness_alone():
    optimizer = torch.optim.AdamW(params(), lr=1e-2)
    before = torch.random.get_rng_state()
    groups = [dict(g) for g in optimizer.param_groups]
    habits_of(optimizer, None)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not optimizer.state
    assert all(a["params"] is b["params"] for a, b in zip(groups, optimizer.param_groups, strict=True))
