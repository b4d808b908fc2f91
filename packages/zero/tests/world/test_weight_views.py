"""Optimizers whose `eval()` writes other weights: the same on every rank, at every stage."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import ds_zero
from ds_testing import world


class TwoViews(Optimizer):
    """Plain averaging: trains one view, evaluates the other."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", p.clone())
                    p.sub_(group["lr"] * p.grad)
                    mean.lerp_(p, 0.25)

    @torch.no_grad()
    def _swap(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "mean" in self.state[p]:
                    kept = p.clone()
                    p.copy_(self.state[p]["mean"])
                    self.state[p]["mean"].copy_(kept)

    def eval(self):
        self._swap()

    def train(self):
        self._swap()


@pytest.mark.parametrize("direct", [True, False], ids=["inner", "wrapper"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_both_views_are_whole_on_every_rank(stage, direct):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    plain = copy.deepcopy(net)
    reference, inner = TwoViews(plain.parameters()), TwoViews(net.parameters())
    optimizer = ds_zero.shard(net, inner, stage=stage, policy=ds_zero.UnitSizePolicy(max_numel=60), memory="private")
    switch = inner if direct else optimizer
    x = torch.randn(4, 2, 5, 6)
    for batch in x:
        reference.zero_grad()
        sum(plain(one).square().mean() / 2 for one in batch).backward()
        reference.step()
        optimizer.zero_grad()
        net(batch[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        for turn in ("eval", "train"):
            getattr(reference, turn)()
            getattr(switch, turn)()
            torch.testing.assert_close(net(batch[0]), plain(batch[0]))
    optimizer.close()
    assert "eval" not in vars(inner)


@world(1)
def test_an_optimizer_of_one_view_has_no_switch():
    net = nn.Linear(2, 2)
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert not hasattr(optimizer, "eval")
    optimizer.close()
