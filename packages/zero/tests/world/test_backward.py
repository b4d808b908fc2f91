"""Backward in every way a plain PyTorch loop may call it."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_testing import world

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SMALL = ds_zero.UnitSizePolicy(max_numel=600, persist_numel=40)


class Pair:
    """A sharded net and its plain twin that sees the data of all ranks; both in fp64."""

    def __init__(self, bench, kind, stage, **options):
        self.bench = bench
        self.net, self.twin = bench.model(kind, torch.float64), bench.model(kind, torch.float64)
        self.optimizer = ds_zero.shard(self.net, bench.adamw(self.net), stage=stage, policy=SMALL, **options)
        self.plain = bench.adamw(self.twin)

    def step(self, backward, steps=3):
        """`backward(net, step, rank, share)` on this rank, and for every rank in turn on the twin."""
        for step in range(steps):
            backward(self.net, step, dist.get_rank(), 1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            for rank in range(dist.get_world_size()):
                backward(self.twin, step, rank, dist.get_world_size())
            self.plain.step()
            self.plain.zero_grad()

    def check(self, bound=1e-12):
        self.optimizer.close()
        for (name, a), b in zip(self.net.named_parameters(), self.twin.parameters(), strict=True):
            error = float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
            assert error <= bound, f"{name} off by {error}"


@STAGES
@world(2)
def test_two_backwards_of_two_forwards(bench, stage):
    pair = Pair(bench, "tied", stage)

    def backward(net, step, rank, share):
        losses = [bench.loss(net, bench.batch(step, micro, rank)) / share for micro in range(2)]
        losses[0].backward()
        losses[1].backward()

    pair.step(backward)
    pair.check()


@pytest.mark.parametrize("kind", ["tied_twice", "external_between"])
@STAGES
@world(2)
def test_a_weight_that_its_module_uses_twice_and_others_use(bench, stage, kind):
    pair = Pair(bench, kind, stage)
    pair.step(lambda net, step, rank, share: (bench.loss(net, bench.batch(step, 0, rank)) / share).backward())
    pair.check()


@STAGES
@world(2)
def test_one_backward_of_two_forwards(bench, stage):
    pair = Pair(bench, "reused", stage)
    pair.step(
        lambda net, step, rank, share: (
            sum(bench.loss(net, bench.batch(step, micro, rank)) for micro in range(2)) / share
        ).backward()
    )
    pair.check()


@STAGES
@world(2)
def test_retain_graph(bench, stage):
    pair = Pair(bench, "plain", stage)

    def backward(net, step, rank, share):
        loss = bench.loss(net, bench.batch(step, 0, rank)) / share
        loss.backward(retain_graph=True)
        loss.backward()

    pair.step(backward)
    pair.check()


@STAGES
@world(2)
def test_partial_graphs(bench, stage):
    """Two losses over different parts of the model, each with its own backward."""
    pair = Pair(bench, "plain", stage)

    def backward(net, step, rank, share):
        tokens = bench.batch(step, 0, rank)
        (net.embed(tokens).square().mean() / share).backward()
        hidden = net.body(torch.ones(2, 3, 16, dtype=torch.float64) * (rank + 1))
        (net.head(hidden).square().mean() / share).backward()

    pair.step(backward)
    pair.check()


@STAGES
@world(2)
def test_backward_of_a_tensor_with_a_gradient(bench, stage):
    pair = Pair(bench, "plain", stage)

    def backward(net, step, rank, share):
        out = net(bench.batch(step, 0, rank))
        out.backward(gradient=torch.cos(out.detach()) / share)

    pair.step(backward)
    pair.check()


@STAGES
@world(2)
def test_backward_inside_forward(bench, stage):
    """A function that runs a backward of its own while the outer graph is being built."""

    class Inner(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, tokens, share):
            hidden = self.net.embed(tokens)
            for_aux = hidden.detach().requires_grad_()
            (self.net.head(for_aux).square().mean() / share).backward()
            return self.net.head(self.net.body(hidden)) + for_aux.grad.mean() * share

    pair = Pair(bench, "plain", stage)
    pair.step(
        lambda net, step, rank, share: (
            Inner(net)(bench.batch(step, 0, rank), share).square().mean() / share
        ).backward()
    )
    pair.check()


@STAGES
@world(2)
def test_gradient_penalty(bench, stage):
    """torch.autograd.grad with create_graph, then a backward through it."""
    pair = Pair(bench, "plain", stage)

    def backward(net, step, rank, share):
        x = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(9 * step + rank))
        x.requires_grad_()
        (grad,) = torch.autograd.grad(net.body(x).square().sum(), x, create_graph=True)
        (
            (grad.square().mean() + net.head(x).mean() + net.embed.weight.sum() * 0.1) / share
            if not isinstance(net.embed.weight, ds_zero.ShardedParameter)
            else (grad.square().mean() + net.head(x).mean() + net.embed(torch.arange(31)).sum() * 0.1) / share
        ).backward()

    pair.step(backward)
    pair.check(1e-11)


@STAGES
@world(2)
def test_no_sync_and_accumulation(bench, stage):
    pair = Pair(bench, "unused", stage)

    def backward(net, step, rank, share):
        for micro in range(3):
            ours = net is pair.net and micro < 2
            with pair.optimizer.no_sync() if ours else contextlib.nullcontext():
                (bench.loss(net, bench.batch(step, micro, rank)) / share).backward()

    pair.step(backward)
    pair.check()


@STAGES
@world(2)
def test_step_closes_what_no_sync_left_open(bench, stage):
    pair = Pair(bench, "tied", stage)

    def backward(net, step, rank, share):
        with pair.optimizer.reduction(False), pair.optimizer.reduction(True):
            for micro in range(2):
                (bench.loss(net, bench.batch(step, micro, rank)) / share).backward()

    pair.step(backward)
    pair.check()


@STAGES
@world(2)
def test_gradients_set_by_hand_count(bench, stage):
    pair = Pair(bench, "plain", stage)

    def backward(net, step, rank, share):
        for i, param in enumerate(net.parameters()):
            new = torch.full(param.shape, (step + 1.0) * (rank + 2) * (i + 1) / share, dtype=torch.float64)
            param.grad = new if param.grad is None else param.grad + new

    pair.step(backward)
    pair.check()


@STAGES
@world(2)
def test_a_backward_that_raises_leaves_the_next_one_right(bench, stage):
    pair = Pair(bench, "plain", stage)

    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("planned")

    def broken():
        with pytest.raises(KeyError, match="planned"):
            pair.net.head(pair.net.body(Boom.apply(pair.net.embed(bench.batch(9, 9, 9))))).sum().backward()
        pair.optimizer.zero_grad()

    broken()
    pair.step(lambda net, step, rank, share: (bench.loss(net, bench.batch(step, 0, rank)) / share).backward())
    broken()
    pair.step(lambda net, step, rank, share: (bench.loss(net, bench.batch(step, 0, rank)) / share).backward())
    pair.check()


@STAGES
@pytest.mark.parametrize("whose", ["optimizer", "model"])
@world(2)
def test_zero_grad_drops_what_was_not_stepped(bench, stage, whose):
    pair = Pair(bench, "plain", stage)
    dropping = pair.optimizer if whose == "optimizer" else pair.net

    def backward(net, step, rank, share):
        if net is pair.net:
            bench.loss(net, bench.batch(99, 0, rank)).backward()
            dropping.zero_grad()
            with pair.optimizer.no_sync():
                bench.loss(net, bench.batch(98, 0, rank)).backward()
            dropping.zero_grad()
        (bench.loss(net, bench.batch(step, 0, rank)) / share).backward()

    pair.step(backward)
    pair.check()


@STAGES
@world(2)
def test_results_that_leave_by_a_side_door(bench, stage):
    """A block keeps part of its result in an attribute, and only that is in the loss."""

    class Stash(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net, self.kept = net, []

        def forward(self, tokens):
            hidden = self.net.body(self.net.embed(tokens))
            return self.net.head(hidden.detach())

    pair = Pair(bench, "plain", stage)

    def backward(net, step, rank, share):
        kept = []
        block = net.blocks[1]
        original = block.down.forward
        block.down.forward = lambda x: kept.append(original(x).square().mean()) or original(x.detach())
        try:
            out = Stash(net)(bench.batch(step, 0, rank))
        finally:
            del block.down.forward
        ((out.square().mean() + kept[0]) / share).backward()

    pair.step(backward)
    pair.check()


class Door(nn.Module):
    """Leaves a result behind in an attribute, and returns another one without a graph of its weight."""

    def __init__(self, width):
        super().__init__()
        drawn = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.float64, generator=drawn))
        self.door, self.left = False, torch.zeros(())

    def forward(self, x):
        y = torch.tanh(x @ self.weight)
        if not self.door:
            return y
        self.left = (y @ self.weight).square().mean()
        return x


class Owner(nn.Module):
    """A ViT in small: a module with a large parameter of its own, and children with units, before and after it is used."""

    def __init__(self, width=16):
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.place = nn.Parameter(torch.randn(6, width, dtype=torch.float64, generator=drawn))
        self.mix = nn.Bilinear(width, width, width).double()
        self.inner = nn.ModuleList(Door(width) for _ in range(3))

    def forward(self, x):
        x = self.mix(x, self.place + x)
        for layer in self.inner:
            x = x + torch.tanh(layer(x)) * self.place
        return x


@STAGES
@pytest.mark.parametrize("door_from", [0, 1, 9])
@world(2)
def test_children_of_a_module_with_a_unit_of_its_own(stage, door_from):
    """`door_from`: the first step in which children leave results through a side door."""
    torch.manual_seed(0)
    net, twin = Owner(), Owner()
    twin.load_state_dict(net.state_dict())
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage, policy=SMALL)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        for n, ranks, share in ((net, [dist.get_rank()], 1), (twin, [0, 1], 2)):
            for layer in n.inner:
                layer.door = step >= door_from
            for rank in ranks:
                x = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
                out = n(x)
                ((out.square().mean() + sum(layer.left for layer in n.inner)) / share).backward()
                for layer in n.inner:
                    layer.left = torch.zeros(())
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    optimizer.close()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@STAGES
@world(2)
def test_evaluation_between_forward_and_backward(bench, stage):
    pair = Pair(bench, "checkpointed", stage)

    def backward(net, step, rank, share):
        loss = bench.loss(net, bench.batch(step, 0, rank)) / share
        with torch.no_grad():
            net.eval()
            bench.loss(net, bench.batch(step, 1, rank))
            net.train()
        with torch.inference_mode():
            bench.loss(net, bench.batch(step, 1, rank))
        loss.backward()

    pair.step(backward)
    pair.check()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_a_graph_from_before_the_step_is_refused(bench, stage):
    net = bench.model("plain")
    optimizer = ds_zero.shard(net, bench.adamw(net), stage=stage, policy=SMALL)
    loss = bench.loss(net, bench.batch(0, 0, 0))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    optimizer.close()
