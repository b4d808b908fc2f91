"""Losses that use weights outside the modules they belong to: penalties, tied heads chunk by chunk, transforms of functions."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ds_zero
from ds_config.errors import ShardedAccessError
from ds_testing import world

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SMALL = ds_zero.UnitSizePolicy(max_numel=300, persist_numel=0)


class Encoder(nn.Module):
    """Whose embedding is its head, too, outside of its forward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens):
        return self.second(torch.tanh(self.first(self.embed(tokens))))


def squares(net):
    return 0.1 * sum(p.pow(2).sum() for p in net.parameters())


def norms(net):
    return 0.1 * sum(p.norm() for p in net.parameters())


def penalty_after(net, tokens):
    return net(tokens).pow(2).mean() + squares(net)


def penalty_gathered(net, tokens):
    with gathered(net):
        penalty = squares(net)
    return net(tokens).pow(2).mean() + penalty


def norm_gathered(net, tokens):
    loss = net(tokens).pow(2).mean()
    with gathered(net):
        return loss + norms(net)


def forward_gathered(net, tokens):
    with gathered(net):
        return net(tokens).pow(2).mean() + squares(net)


def head_gathered(net, tokens):
    hidden = net(tokens)
    with gathered(net):
        return sum((c @ net.embed.weight.T).logsumexp(-1).mean() for c in hidden.split(2))


def head_in_chunks(net, tokens):
    return sum(functional.linear(c, net.embed.weight).logsumexp(-1).mean() for c in net(tokens).split(2))


def head_recomputed(net, tokens):
    def loss(chunk):
        return functional.linear(chunk, net.embed.weight).logsumexp(-1).mean()

    return sum(checkpoint(loss, chunk, use_reentrant=False) for chunk in net(tokens).split(2))


def head_backward_by_chunk(net, tokens):
    """Each chunk goes backward at once, and the body once for all of them."""
    hidden = net(tokens)
    leaf = hidden.detach().requires_grad_()
    for chunk in leaf.split(2):
        functional.linear(chunk, net.embed.weight).logsumexp(-1).mean().backward()
    return (hidden * leaf.grad).sum()


def gathered(net):
    return ds_zero.GatheredParameters(net)


LOSSES = {
    loss.__name__: loss
    for loss in (
        penalty_after, penalty_gathered, norm_gathered, forward_gathered, head_gathered, head_in_chunks, head_recomputed,
        head_backward_by_chunk,
    )
}  # fmt: skip


def trained(net, optimizer, loss, batches):
    """Three steps; of one process that sees the batches of all ranks where there are several."""
    for step in range(3):
        optimizer.zero_grad()
        for tokens in batches[step]:
            loss(net, tokens).backward()
        for param in net.parameters() if len(batches[step]) > 1 else ():
            param.grad /= len(batches[step])
        optimizer.step()


def check(loss, stage):
    torch.manual_seed(0)
    net = Encoder()
    plain = copy.deepcopy(net)
    batches = torch.randint(0, 12, (3, dist.get_world_size(), 6))
    trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1), loss, [list(step) for step in batches])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = ds_zero.shard(net, optimizer, stage=stage, policy=SMALL, memory="private")
    assert (type(net.embed.weight) is ds_zero.ShardedParameter) == (stage == 3 and dist.get_world_size() > 1)
    trained(net, optimizer, loss, batches[:, dist.get_rank()][:, None])
    optimizer.close()
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@STAGES
@pytest.mark.parametrize("loss", LOSSES)
@world(2)
def test_a_loss_may_use_weights_outside_their_modules(loss, stage):
    """Leaves that autograd saves itself were read without memory: a segmentation fault."""
    check(LOSSES[loss], stage)


@pytest.mark.parametrize("loss", ["penalty_after", "penalty_gathered", "head_in_chunks"])
@world(1)
def test_the_same_in_one_process(loss):
    check(LOSSES[loss], 3)


@world(2)
def test_between_steps_weights_are_refused_as_before():
    """One rank alone may ask then, so nobody may wait for the others."""
    net = Encoder()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = ds_zero.shard(net, optimizer, stage=3, policy=SMALL, memory="private")
    for _ in range(2):
        if dist.get_rank() == 0:
            with pytest.raises(ShardedAccessError, match=r"embed\.weight"):
                net.embed.weight.norm()
        net(torch.arange(6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        net(torch.arange(6))
    with pytest.raises(ShardedAccessError, match=r"embed\.weight"):
        net.embed.weight.norm()
    optimizer.close()


@world(2)
def test_a_graph_from_gathered_weights_is_refused_after_their_update():
    net = Encoder()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = ds_zero.shard(net, optimizer, stage=3, policy=SMALL, memory="private")
    with ds_zero.GatheredParameters(net.first):
        penalty = net.first.weight.pow(2).sum()
    net(torch.arange(6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="inplace operation"):
        penalty.backward()
    optimizer.close()


def squared_jvp(net, tokens):
    hidden = net.embed(tokens)
    output, tangent = torch.func.jvp(
        lambda x: net.second(torch.tanh(net.first(x))), (hidden,), (torch.ones_like(hidden),)
    )
    return output.square().mean() + tangent.square().mean()


def gradient_penalty(net, tokens):
    slope = torch.func.grad(lambda x: net.second(torch.tanh(net.first(x))).square().mean())(net.embed(tokens).detach())
    return net(tokens).square().mean() + slope.square().sum()


def jacobian_penalty(net, tokens):
    row = torch.func.jacrev(lambda x: net.second(torch.tanh(net.first(x))))(net.embed(tokens[0]).detach())
    return net(tokens).square().mean() + row.square().mean()


TRANSFORMS = {loss.__name__: loss for loss in (squared_jvp, gradient_penalty, jacobian_penalty)}


@STAGES
@pytest.mark.parametrize("loss", TRANSFORMS)
@world(2)
def test_transforms_of_functions(loss, stage):
    """A gather inside of one allocated a tensor of the transform."""
    check(TRANSFORMS[loss], stage)
