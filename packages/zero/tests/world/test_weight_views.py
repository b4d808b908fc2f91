"""Optimizers whose `eval()` writes other weights: the same on every rank, at every stage."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import ds_zero
from ds_config.errors import UnsupportedError
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


class Writers(TwoViews):
    """Methods that write weights outside of `step`, by names that are known and others, through `.data` and without."""

    @torch.no_grad()
    def sync_lookahead(self):
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", torch.zeros_like(p))
                slow.lerp_(p, 0.5)
                p.data.copy_(slow)

    @contextlib.contextmanager
    def swap_ema_weights(self):
        self._swap()
        yield
        self._swap()

    def exchange(self):
        self._swap()

    def shrink(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.5)

    def rate(self):
        return self.param_groups[0]["lr"]


def started(stage, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    plain = copy.deepcopy(net)
    reference, inner = Writers(plain.parameters()), Writers(net.parameters())
    options = {"memory": "private", "policy": ds_zero.UnitSizePolicy(max_numel=60)} | options
    return plain, reference, net, ds_zero.shard(net, inner, stage=stage, **options)


def trained(plain, reference, net, optimizer, step):
    batch = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(step))
    reference.zero_grad()
    sum(plain(one).square().mean() / 2 for one in batch).backward()
    reference.step()
    optimizer.zero_grad()
    net(batch[dist.get_rank()]).square().mean().backward()
    optimizer.step()
    return batch[0]


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
@world(2)
def test_known_methods_publish_what_they_write(stage):
    plain, reference, net, optimizer = started(stage)
    for step in range(3):
        x = trained(plain, reference, net, optimizer, step)
        reference.sync_lookahead(), optimizer.inner.sync_lookahead()
        torch.testing.assert_close(net(x), plain(x))
        with reference.swap_ema_weights(), optimizer.inner.swap_ema_weights():
            torch.testing.assert_close(net(x), plain(x))
        torch.testing.assert_close(net(x), plain(x))
        with optimizer.publish_weights():
            optimizer.inner.exchange()
        reference.exchange()
        torch.testing.assert_close(net(x), plain(x))
        assert optimizer.inner.rate() == 0.1
    optimizer.close()


@pytest.mark.parametrize("name", ["exchange", "shrink"])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@world(2)
def test_a_method_that_writes_weights_and_publishes_nothing_is_named(stage, name):
    plain, reference, net, optimizer = started(stage)
    trained(plain, reference, net, optimizer, 0)
    with pytest.raises(UnsupportedError, match=rf"Writers\.{name}\(\) wrote") as error:
        getattr(optimizer.inner, name)()
    assert error.value.code == "zero-unpublished-weights"
    optimizer.refresh()
    optimizer.close()


def shrink_groups(optimizer):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.mul_(0.5)


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
@world(2)
def test_a_loop_over_the_groups_that_writes_weights_is_right_or_refused(stage, memory):
    plain, reference, net, optimizer = started(stage, memory=memory)
    x = trained(plain, reference, net, optimizer, 0)
    shrink_groups(reference)
    with optimizer.publish_weights():
        shrink_groups(optimizer)
    torch.testing.assert_close(net(x), plain(x))
    dist.barrier()  # in shared memory the other rank reads what this one writes
    shrink_groups(reference), shrink_groups(optimizer)
    if stage == 0:
        torch.testing.assert_close(net(x), plain(x))
        trained(plain, reference, net, optimizer, 1)
        torch.testing.assert_close(net(x), plain(x))
    else:
        with pytest.raises(UnsupportedError, match="a loop over param_groups") as error:
            net(x).sum().backward()
        assert error.value.code == "zero-unpublished-weights"
    optimizer.refresh()
    optimizer.close()


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
@world(2)
def test_weights_written_between_backward_and_step_are_stepped(stage, precision, memory):
    net = nn.Linear(4, 4)
    with torch.no_grad():
        net.weight.fill_(1.0)
    optimizer = ds_zero.shard(
        net, torch.optim.SGD(net.parameters(), lr=0.5), stage=stage, precision=precision, memory=memory
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    net(torch.ones(1, 4, dtype=dtype)).sum().backward()
    shrink_groups(optimizer)
    if memory == "shared" and precision == "fp32" and stage > 0:  # others may read that memory in their backward
        with pytest.raises(UnsupportedError, match="a loop over param_groups"):
            optimizer.step()
        optimizer.refresh()
    else:
        optimizer.step()
        assert (ds_zero.safe_get_full_fp32_param(net.weight) == 0.0).all()  # 1 * 0.5 - 0.5 * 1
        optimizer.zero_grad()
        net(torch.ones(1, 4, dtype=dtype)).sum().backward()
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_write_that_forward_has_not_seen_is_refused_on_one_rank_too(stage):
    net = nn.Linear(4, 4)
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.0), stage=stage, precision="bf16")
    shrink_groups(optimizer)
    with pytest.raises(UnsupportedError, match="a loop over param_groups"):
        net(torch.ones(1, 4).bfloat16()).sum().backward()
    optimizer.close()
