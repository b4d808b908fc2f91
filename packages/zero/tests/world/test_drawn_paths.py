"""Drawn: ranks take different paths through blocks that are tied, repeated and recomputed; the numbers are one process's, and nobody waits."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_comm
import ds_ops.optim
import ds_zero
from ds_testing import world
from ds_zero import OffloadPolicy

ROWS, STEPS = 4, 4


class Paths(nn.Module):
    """Calls blocks as its caller says; a parameter of its own is used or not."""

    def __init__(self, width, blocks, *, tied, embeds, recompute):
        super().__init__()
        self.embedding = nn.Embedding(16, width) if embeds else None
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(blocks))
        if tied and blocks > 2:
            self.blocks[2][0].weight = self.blocks[0][0].weight
        self.gain, self.last, self.recompute = nn.Parameter(torch.ones(width)), nn.Linear(width, 1), recompute

    def forward(self, x, route, ids):
        x = self.first(x)
        if self.embedding is not None and ids is not None:
            x = x + self.embedding(ids)
        for number, times in route:
            for _ in range(times):
                block = self.blocks[number]
                if self.recompute is None:
                    x = x + block(x).tanh()
                else:
                    x = x + checkpoint(block, x, use_reentrant=self.recompute == "nested").tanh()
        return self.last(x * self.gain if len(route) % 2 else x)


def draw(chance, seed):
    """(model, twin, options of `shard`, whether gradients are shown, kind of optimizer, clip, format), the same on every rank."""
    width, blocks, kind = chance.choice([8, 16, 24]), chance.randint(1, 4), chance.choice(["sgd", "momentum", "adamw"])
    kinds = {
        "tied": chance.random() < 0.4,
        "embeds": chance.random() < 0.5,
        "recompute": chance.choice([None, "nested", "saved hooks"]),
    }
    form = chance.choice(["fp32", "fp64", "bf16"])
    dtype = torch.float64 if form == "fp64" else torch.float32
    torch.manual_seed(seed)
    net, twin = Paths(width, blocks, **kinds).to(dtype), Paths(width, blocks, **kinds).to(dtype)
    with torch.no_grad():
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            a.copy_(b.copy_(a.bfloat16() if form == "bf16" else a))
    if chance.random() < 0.3:
        net.blocks[0][0].bias.requires_grad_(False)
        twin.blocks[0][0].bias.requires_grad_(False)
    options = {
        "stage": chance.choice([0, 1, 2, 3, 3]),
        "memory": chance.choice(["private", "shared"]),
        "overlap": chance.random() < 0.7,
        "policy": ds_zero.UnitSizePolicy(
            max_numel=chance.choice([None, 1, 300]), persist_numel=chance.choice([0, 0, 40])
        ),
        "precision": "bf16" if form == "bf16" else None,
        "clip": chance.choice([None, None, 0.5]),
        "offload_optimizer": chance.choice(["device", OffloadPolicy("host"), OffloadPolicy("host", overlap_ratio=1.0)])
        if kind == "adamw"
        else "device",
    }
    return net, twin, options, kind, dtype


def optimizer_of(kind, net, *, native=False):
    params = [param for param in net.parameters() if param.requires_grad]
    if kind == "adamw":
        return (ds_ops.optim.AdamW if native else torch.optim.AdamW)(params, lr=1e-2)
    return torch.optim.SGD(params, lr=0.05, momentum=0.9 if kind == "momentum" else 0.0)


def check(seed):
    chance = random.Random(seed)
    net, twin, options, kind, dtype = draw(chance, seed)
    ranks, narrow = dist.get_world_size(), options["precision"] == "bf16"
    native = options["offload_optimizer"] != "device"
    optimizer, plain = ds_zero.shard(net, optimizer_of(kind, net, native=native), **options), optimizer_of(kind, twin)
    if (shows := chance.choice([None, False, True])) is not None:
        optimizer.show_gradients(sharded=shows)
    moved = dict.fromkeys(dict(twin.named_parameters()), 0.0)
    for step in range(STEPS):
        before = {name: param.detach().clone() for name, param in twin.named_parameters()}
        micros = chance.randint(1, 3)
        for micro in range(micros):
            made, alike = torch.Generator().manual_seed(1000 * seed + 10 * step + micro), chance.random() < 0.3
            batches = []
            for _ in range(ranks):
                blocks = len(net.blocks)
                route = [(chance.randrange(blocks), chance.choice([1, 1, 2])) for _ in range(chance.randint(0, 3))]
                ids = torch.randint(0, 16, (ROWS,), generator=made) if chance.random() < 0.7 else None
                x = torch.randn(ROWS, 8, generator=made, dtype=torch.float64).to(dtype)
                batches.append((x, batches[0][1] if alike and batches else route, ids))
            x, route, ids = batches[dist.get_rank()]
            with optimizer.reduction(chance.choice([True, micro == micros - 1])):
                out = net(x.bfloat16() if narrow else x, route, ids).to(dtype)
                optimizer.scale(out.square().mean()).backward()
            for one in batches:
                (twin(*one).square().mean() / ranks).backward()
        if options["clip"] is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), options["clip"])
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
        if max(float(param.abs().max()) for param in twin.parameters()) > 5:
            break  # it diverges: what is compared next is rounding
        for name, param in twin.named_parameters():
            full = ds_zero.safe_get_full_fp32_param(net.get_parameter(name)) if param.requires_grad else param
            moved[name] += float((param - before[name]).norm())
            error, size = float((full.to(dtype) - param).norm()), float(param.norm())
            if narrow:
                bound = (1.2 if kind == "adamw" else 0.35) * moved[name] + 2e-3 * (step + 1) * size + 1e-6
            else:
                bound = (10 if kind == "adamw" else 1) * (2e-4 if dtype == torch.float32 else 1e-8) * (1 + size)
            assert error <= bound, (seed, step, name, error, bound, options)
    optimizer.close()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@world(2, backend=None)
def test_drawn_paths(backend):
    ds_comm.init_distributed(backend)
    for seed in (8, 11, 30, 42, 53, 59):  # each waited for ever, or failed, in its own way
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@world(3, backend=None, timeout=900)
def test_many_drawn_paths_on_three_ranks(backend):
    ds_comm.init_distributed(backend)
    for seed in range(1000, 1300):
        check(seed)
