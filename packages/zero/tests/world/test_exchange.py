"""Reductions by messages: the definition, computed on each rank from what all ranks publish."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import ds_comm
import ds_zero
from ds_comm.buffer_pool import BufferPool
from ds_testing import world
from ds_zero.layout.elements import plan_layout
from ds_zero.layout.shard_options import PLAIN
from ds_zero.runtime.reduce_strategies import P2PReduceScatter
from ds_zero.runtime.unit_groups import sends_from_anywhere


def drawn(seed, rank, layout, kind):
    """Gradients of one rank: some absent, some transposed, some of another format."""
    luck, made = random.Random(f"{seed} {rank}"), torch.Generator().manual_seed(100 * seed + rank)
    grads = {}
    for i, slot in enumerate(layout.slots):
        grad = torch.randn(slot.shape, generator=made)
        if kind == "odd" and grad.dim() == 2 and luck.random() < 0.3:
            grad = grad.t().contiguous().t()
        if kind == "odd" and luck.random() < 0.2:
            grad = grad.double()
        if kind != "odd" or luck.random() < 0.8:
            grads[i] = grad
    return grads


def flat_of(layout, grads):
    flat = torch.zeros(layout.numel)
    for i, grad in grads.items():
        slot = layout.slots[i]
        flat[slot.offset : slot.offset + slot.numel] = grad.float().reshape(-1)
    return flat


def check_sums(layout_kind):
    group, size = ds_comm.as_group(None), dist.get_world_size()
    assert sends_from_anywhere(group, torch.device("cpu"))
    for seed in range(12):
        luck = random.Random(seed)
        shapes = {f"p{i}": tuple(luck.randint(0, 9) for _ in range(luck.randint(0, 3))) for i in range(5)}
        layout, pool = plan_layout(shapes, size, kind=layout_kind), BufferPool()
        plan = SimpleNamespace(name="unit", layout=layout, wire=PLAIN)
        alone = SimpleNamespace(size=1)
        exchange = P2PReduceScatter(
            plan, SimpleNamespace(shard_group=group, replicate_group=alone, pool=pool, levels=None)
        )
        for turn, kind in enumerate(("plain", "odd", "flat", "plain")):
            every = [drawn(10 * seed + turn, r, layout, kind) for r in range(size)]
            flats = [flat_of(layout, grads) for grads in every]
            mine = every[group.rank]
            if kind != "flat":
                exchange.take(mine, torch.float32, lambda: None)
            exchange.begin(flats[group.rank].clone() if kind == "flat" else None, lambda: None)
            own = exchange.in_place_sums()
            assert kind != "flat" or own == [None] * len(own)
            empty = [torch.empty(stop - start) for start, stop in exchange.ranges]
            outs = [new if old is None else old for old, new in zip(own, empty, strict=True)]
            norms = exchange.finish(outs)
            total = sum(flats[1:], flats[0].clone())
            want = torch.cat([total[s.start + group.rank * s.chunk :][: s.chunk] for s in layout.segments])
            torch.testing.assert_close(torch.cat(outs), want, rtol=1e-6, atol=1e-6)
            assert float(norms[:, 0].sum()) == pytest.approx(float(want.double().square().sum()), rel=1e-5)
            assert float(norms[:, 1].max()) == max(want.double().abs().tolist(), default=0.0)
            assert exchange.full_bytes == 0
        fresh = pool.fresh
        exchange.take(mine, torch.float32, lambda: None)
        exchange.begin(None, lambda: None)
        exchange.drop()  # messages that nobody pulls are waited for
        assert pool.fresh == fresh


@pytest.mark.parametrize("layout_kind", ["flat", "dim0", "whole"])
@world(2)
def test_shards_are_the_sums_whatever_is_absent_odd_or_flat(monkeypatch, layout_kind):
    monkeypatch.setattr("ds_zero.runtime.reduce_strategies.LEAST_SENT", 6)
    check_sums(layout_kind)


@world(3)
def test_three_ranks_sum_in_their_order(monkeypatch):
    monkeypatch.setattr("ds_zero.runtime.reduce_strategies.LEAST_SENT", 6)
    check_sums("flat")


class Writes(TorchDispatchMode):
    """Bytes that copies write, and that sums are given."""

    def __init__(self):
        super().__init__()
        self.copied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in ("copy_", "clone", "cat", "_foreach_copy_"):
            self.copied += sum(t.nbytes for t in args[0]) if isinstance(args[0], list) else args[0].nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [1, 2, 3])
@world(2)
def test_large_gradients_are_neither_copied_nor_summed_elsewhere(stage):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(2)))
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage, clip=1.0)
    psi = sum(p.numel() * 4 for p in net.parameters())
    for _ in range(2):
        net(torch.randn(2, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with Writes() as writes:
        net(torch.randn(2, 512)).square().mean().backward()
        optimizer.sharding.runtime.reducing.drain()
    gathered = psi if stage == 3 else 0  # a rank's own chunk, in forward and in backward
    assert gathered <= writes.copied < gathered + 1024  # the norms that the ranks measure
    assert [u.gradients.shard_bytes for u in optimizer.sharding.units] == [0] * len(optimizer.sharding.units)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
