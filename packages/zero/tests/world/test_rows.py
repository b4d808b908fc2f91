"""Gradients of embeddings summed by rows: the same numbers as the dense sum, with fewer bytes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_monitor
import ds_zero
from ds_comm.sparse_rows import EmbeddingTable, by_rows
from ds_config.errors import PlanError
from ds_monitor.sinks import MemorySink
from ds_testing import world

ROWS, WIDTH = 200, 6


class Bag(nn.Module):
    """Two tables with sparse and dense gradients, a bag, and a head; `tied` gives the head one of the tables."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Embedding(ROWS, WIDTH, sparse=not tied)
        self.second = nn.Embedding(ROWS, WIDTH)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.head = nn.Linear(WIDTH, ROWS if tied else 3, bias=False)
        if tied:
            self.head.weight = self.first.weight

    def forward(self, ids):
        x = self.head(self.first(ids).tanh())
        return x.square().sum() / 50 + (self.second(ids) * self.bag(ids.view(-1, 1)).view(*ids.shape, WIDTH)).sum()


def ids_of(step, rank, ranks_with_rows):
    """Looked-up rows: another number on each rank, none on some."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, ROWS, (1, 4 + 3 * rank if rank in ranks_with_rows else 0), generator=generator)


def trained(net, sparse, ranks_with_rows, **options):
    """Parameters after four steps of two microbatches, the last within no_sync, and the bytes that travelled."""
    optimizer = ds_zero.shard(
        net, torch.optim.Adagrad(net.parameters(), lr=0.1), stage=0, clip=0.5, sparse=sparse, **options
    )
    sink = MemorySink()
    ds_monitor.configure([sink])
    try:
        for step in range(4):
            with optimizer.no_sync() if step == 3 else optimizer.reduction(True):
                for micro in range(2):
                    net(ids_of(2 * step + micro, dist.get_rank(), ranks_with_rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        ds_monitor.configure([])
    optimizer.close()
    found = [r for r in sink.records if r.name.startswith("comm/") and r.attrs.get("unit") not in ("step", "settle")]
    size = dist.get_world_size()
    weights = {"comm/all_reduce": 2 * (size - 1) / size}
    sent = sum(weights.get(r.name, size - 1) * r.attrs["nbytes"] for r in found)
    return [p.detach().clone() for p in net.parameters()], sent


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("everywhere", [True, False])
@world(2)
def test_equal_to_the_dense_sum_to_the_bit(precision, everywhere):
    net = Bag()
    twin, ranks = copy.deepcopy(net), {0, 1} if everywhere else {1}
    dense, dense_bytes = trained(net, False, ranks, precision=precision)
    sparse, sparse_bytes = trained(twin, True, ranks, precision=precision)
    assert all(torch.equal(a, b) for a, b in zip(dense, sparse, strict=True))
    assert sparse_bytes < dense_bytes / (4 if precision is None else 2)


@world(4)
def test_four_ranks_agree_and_add_in_their_order():
    net = Bag()
    twin = copy.deepcopy(net)
    dense, _ = trained(net, False, {1, 2, 3})
    sparse, _ = trained(twin, True, {1, 2, 3})
    for a, b in zip(dense, sparse, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        everyone = [torch.empty_like(b) for _ in range(4)]
        dist.all_gather(everyone, b)
        assert all(torch.equal(b, other) for other in everyone)


@world(2)
def test_a_table_whose_gradient_is_dense_is_summed_whole():
    net = Bag(tied=True)
    twin = copy.deepcopy(net)
    dense, _ = trained(net, False, {0, 1})
    sparse, _ = trained(twin, True, {0, 1})
    assert all(torch.equal(a, b) for a, b in zip(dense, sparse, strict=True))


@world(1)
def test_it_is_for_stage_0():
    for stage in (1, 2, 3):
        net = Bag()
        with pytest.raises(PlanError) as caught:
            ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage, sparse=True)
        assert caught.value.code == "zero-sparse"
        assert type(net.first.weight) is nn.Parameter


def test_rows_travel_where_they_are_fewer_bytes():
    table = EmbeddingTable(offset=0, rows=100, width=6)
    assert by_rows(table, most=0, world=2, itemsize=4)
    assert by_rows(table, most=74, world=2, itemsize=4)  # 2 * 74 * 32 < 2 * 100 * 24
    assert not by_rows(table, most=75, world=2, itemsize=4)
    assert not by_rows(table, most=38, world=4, itemsize=4)
