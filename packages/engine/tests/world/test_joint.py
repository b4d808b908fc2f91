"""Gradients of several units in one message: the same bits as one message each, and fewer of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_comm as comm
import ds_zero
from ds_engine.compiling.joint import JointMessage
from ds_engine.compiling.verbs import Graphs
from ds_testing import world

MESSAGES = ("all_to_all_pieces", "reduce_scatter_single", "all_reduce")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x.to(self.up.weight.dtype))))).to(x.dtype)


class Net(nn.Module):
    """Embedding, three blocks, head; a kind changes one thing."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 16), nn.Linear(16, 31, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.twice = kind == "reentrant_reused"
        if kind == "tied":
            self.head.weight = self.embed.weight
        elif kind == "unused":
            self.spare = nn.Linear(16, 5)
        elif kind == "frozen":
            self.blocks[1].requires_grad_(False)
            self.embed.requires_grad_(False)
        elif kind == "mixed":
            self.blocks[1].to(torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(2 if self.twice else 1):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True) if self.twice else block(x)
        return self.head(x)


def train(stage, limit, monkeypatch, *, steps=3, kind="plain"):
    """Parameters after a few steps of two backwards each, and how many messages of gradients were sent."""
    torch.manual_seed(0)
    net = Net(kind)
    inner = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    optimizer = ds_zero.shard(net, inner, stage=stage, policy=ds_zero.UnitSizePolicy(max_numel=600))
    graphs = Graphs(optimizer.sharding)
    if limit:
        graphs.sum_together(graphs.buckets(limit))
    sent = []
    with monkeypatch.context() as patch:
        for call in MESSAGES:
            send = getattr(comm, call)
            patch.setattr(
                comm,
                call,
                lambda *args, send=send, **kwargs: [sent.append(kwargs.get("unit")), send(*args, **kwargs)][1],
            )
        for step in range(steps):
            for micro in range(2):
                made = torch.Generator().manual_seed(10_000 * step + 100 * micro + dist.get_rank())
                tokens = torch.randint(0, 31, (3, 7), generator=made)
                nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    units = [unit.spec.name for unit in optimizer.sharding.units]
    found = {name: ds_zero.safe_get_full_fp32_param(p).clone() for name, p in net.named_parameters()}
    optimizer.close()
    return found, [unit for unit in sent if unit and unit.partition("+")[0] in units]


@pytest.mark.parametrize("anywhere", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_one_message_for_several_units_has_the_same_bits(monkeypatch, stage, anywhere):
    if not anywhere:  # as on a device: gradients are summed by reduce-scatter of an arena
        monkeypatch.setattr("ds_zero.runtime.unit_groups.sends_from_anywhere", lambda group, device: False)
    expected, alone = train(stage, 0, monkeypatch)
    found, together = train(stage, 10**6, monkeypatch)
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    assert len(together) < len(alone)
    assert any("+" in unit for unit in together)


@world(2)
def test_units_that_are_tied_unused_frozen_or_used_twice_keep_their_bucket(monkeypatch):
    for kind in ("tied", "unused", "frozen", "reentrant_reused", "mixed"):
        expected, _ = train(2, 0, monkeypatch, kind=kind)
        found, _ = train(2, 10**6, monkeypatch, kind=kind)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=0, rtol=0, msg=key)


@world(2, backend="shm")
def test_ranks_that_share_memory_send_nothing_together(monkeypatch):
    made = []
    monkeypatch.setattr(JointMessage, "send", lambda self: made.append(self))
    train(2, 10**6, monkeypatch, steps=1)
    assert made == []
