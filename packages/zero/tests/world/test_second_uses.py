"""Units that are needed twice in a phase, and branches that only some ranks take, both at once: over gloo, where each gather waits for all."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ds_zero
from ds_testing import world

SMALL = ds_zero.UnitSizePolicy(max_numel=80, persist_numel=0)


class Mixed(nn.Module):
    """Text, and on some ranks an image: the tower is registered behind the embedding that the head shares."""

    def __init__(self, head: str, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(10, 8)
        self.vision = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.block = nn.Linear(8, 8)
        self.audio = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 10, bias=False) if head == "module" else None
        if self.head is not None:
            self.head.weight = self.emb.weight
        self.layers = layers

    def forward(self, ids: torch.Tensor, image: bool, depth: int, audio: bool) -> torch.Tensor:
        x = self.emb(ids)
        if image:
            x = x + self.vision(torch.ones(len(ids), 8))
        for _ in range(depth):
            x = torch.tanh(self.block(x))
        if audio:
            x = x + self.audio(x)
        return F.linear(x, self.emb.weight) if self.head is None else self.head(x)


CALLS = {
    "an image on one rank": lambda rank: (rank == 0, 0, False),
    "an image on the other": lambda rank: (rank == 1, 0, False),
    "towers crossed": lambda rank: (rank == 0, 1, rank == 1),
    "a loop, and an image": lambda rank: (rank == 1, 3, False),
    "loops of other depths": lambda rank: (rank == 0, 2 + 2 * rank, rank == 1),
    "alike": lambda rank: (True, 2, True),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("head", ["functional", "module"])
@world(2, timeout=30)
def test_second_uses_and_branches_equal_one_process(head: str, call: str) -> None:
    """Three steps at stage 3 equal plain torch on both ranks' batches; the second and third with the paths of the ranks exchanged, too."""
    rank = dist.get_rank()
    net = Mixed(head)
    plain = copy.deepcopy(net)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    optimizer = ds_zero.shard(
        net, torch.optim.AdamW(net.parameters(), lr=0.01), stage=3, policy=SMALL, memory="private"
    )
    for step in range(3):
        ids = [torch.arange(4) + step + 3 * r for r in range(2)]
        path = [CALLS[call](r if step < 2 else 1 - r) for r in range(2)]
        loss = sum(plain(ids[r] % 10, *path[r]).square().mean() for r in range(2)) / 2
        loss.backward()
        reference.step()
        reference.zero_grad()
        net(ids[rank] % 10, *path[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with ds_zero.GatheredParameters(list(net.parameters())):
        for (name, a), b in zip(net.named_parameters(), plain.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-5), name
    optimizer.close()
