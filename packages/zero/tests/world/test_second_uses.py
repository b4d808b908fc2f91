"""Units that are needed twice in a phase, and branches that only some ranks take, both at once: over gloo, where each gather waits for all."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ds_comm
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


class Looped(nn.Module):
    """Blocks that ranks run one after the other, each as often as they like; some of them frozen, or recomputed in backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.blocks[1].requires_grad_(kind != "frozen")
        self.kind = kind

    def forward(self, x: torch.Tensor, path: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        for number in path:
            block = self.blocks[number]
            x = torch.tanh(checkpoint(block, x, use_reentrant=False) if self.kind == "recomputed" else block(x))
        return self.last(x)


PATHS: dict[str, list[list[tuple[int, ...]]]] = {  # of each step the paths of the ranks
    "once and twice": [[(0, 1), (0, 1, 0)]] * 3,
    "once and twice in a row": [[(1,), (1, 1)]] * 3,
    "not at all and three times": [[(0, 2), (0, 1, 1, 2, 1)]] * 3,
    "the other rank, in a later step": [[(0, 1), (0, 1)], [(0, 1, 0), (0, 1)], [(0, 1), (1, 0, 1)]],
    "other units twice": [[(0, 1, 2, 0), (0, 1, 2, 1)]] * 2 + [[(0, 1), (0, 2, 0, 2)]],
    "other orders": [[(0, 1, 2), (2, 1, 0)], [(2, 0, 2), (1, 1, 0)], [(0,), (2, 1, 2, 1)]],
    "deeper in each step": [[(0, 1), (0, 1)], [(0, 1, 0, 1), (0, 1, 0, 1)], [(0, 1) * 3, (0, 1) * 4]],
}
LOOPS = [
    (kind, paths, memory)
    for kind in ("trained", "frozen", "recomputed")
    for paths in PATHS
    for memory in ("gloo", "shm", "shared")
]
LOOP_SAMPLE = [
    ("trained", "once and twice", "gloo"), ("frozen", "other units twice", "gloo"), ("recomputed", "other orders", "gloo"),
    ("frozen", "the other rank, in a later step", "gloo"), ("trained", "not at all and three times", "shm"), ("trained", "once and twice", "shared"),
]  # fmt: skip
LOOPS_MARKED = [
    *LOOP_SAMPLE,
    *(pytest.param(*one, marks=pytest.mark.slow) for one in LOOPS if one not in LOOP_SAMPLE),
]


@pytest.mark.parametrize(("kind", "paths", "memory"), LOOPS_MARKED)
@world(2, backend=None)
def test_units_used_once_on_one_rank_and_more_often_on_the_other(kind: str, paths: str, memory: str) -> None:
    """Steps at stage 3 equal plain torch on both ranks' batches, evaluations between them included."""
    ds_comm.init_distributed("gloo" if memory == "gloo" else "cpu:shm", deadline_s=20)
    rank = dist.get_rank()
    net = Looped(kind)
    plain = copy.deepcopy(net)
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    trained = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    optimizer = ds_zero.shard(net, trained, stage=3, policy=SMALL, memory="auto" if memory == "shared" else "private")
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) for number in range(2)]
    for number, ways in enumerate(PATHS[paths]):
        with torch.no_grad():
            other = ways[1 - rank]
            torch.testing.assert_close(net(batches[rank], other), plain(batches[rank], other))
        losses = [plain(batches[r] + number, ways[r]).square().mean() for r in range(2)]
        (sum(losses) / 2).backward()
        reference.step()
        reference.zero_grad()
        loss = net(batches[rank] + number, ways[rank]).square().mean()
        assert loss.item() == pytest.approx(losses[rank].item(), rel=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with ds_zero.GatheredParameters(list(net.parameters())):
        for (name, a), b in zip(net.named_parameters(), plain.named_parameters(), strict=True):
            assert torch.allclose(a, b[1], atol=1e-5), name
    optimizer.close()


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
@world(2)
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
