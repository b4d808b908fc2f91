"""Gathers by way of nodes: the same numbers as flat ones, and fewer bytes between nodes. Two nodes of two ranks are forced."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_comm.groups
import ds_monitor
import ds_zero
from ds_config.errors import PlanError
from ds_monitor.sinks import MemorySink
from ds_testing import world

SMALL = ds_zero.UnitSizePolicy(max_numel=600, persist_numel=40)
EVEN = ds_zero.UnitSizePolicy(max_numel=32 * 32, persist_numel=0)
WAYS = {
    "secondary": ds_zero.NodeTopology(2, secondary_partition=True),
    "two_steps": ds_zero.NodeTopology(2, hierarchical=True),
    "both": ds_zero.NodeTopology(2, hierarchical=True, secondary_partition=True),
}
BY_WAY = pytest.mark.parametrize("way", WAYS)


def trained(bench, kind, nodes, **options):
    """Parameters after three steps of two microbatches, and how many process groups were left."""
    net = bench.model(kind, torch.float64)
    optimizer = ds_zero.shard(net, bench.adamw(net), stage=3, clip=1.0, policy=SMALL, nodes=nodes, **options)
    for step in range(3):
        for micro in range(2):
            (bench.loss(net, bench.batch(step, micro, dist.get_rank())) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # sees the update, and leaves copies that the next step may use
            bench.loss(net, bench.batch(step, 9, dist.get_rank()))
    optimizer.close()
    return [p.detach().clone() for p in net.parameters()]


@BY_WAY
@pytest.mark.parametrize("kind", ["external", "tied", "reentrant_reused", "mixed", "unused"])
@world(4)
def test_equals_the_flat_gather(bench, kind, way):
    groups = len(dist.distributed_c10d._world.pg_map)
    for a, b in zip(trained(bench, kind, WAYS[way]), trained(bench, kind, None), strict=True):
        assert torch.equal(a, b)
    assert len(dist.distributed_c10d._world.pg_map) == groups


@pytest.mark.parametrize("options", [{"overlap": False}, {"layout": "dim0"}, {"precision": "bf16"}], ids=str)
@world(4)
def test_equals_it_without_overlap_by_rows_and_in_other_formats(bench, options):
    for a, b in zip(
        trained(bench, "plain", WAYS["both"], **options), trained(bench, "plain", None, **options), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("nodes", "urgent"), [(None, {"gather"}), (WAYS["two_steps"], {"gather", "node", "across"})], ids=["flat", "nodes"]
)
@world(4)
def test_gathers_have_groups_of_high_priority(bench, nodes, urgent, monkeypatch):
    """A layer waits for a gather; a sum may be late."""
    asked = {}

    def recorded(ranks, name, purpose, *args, urgent=False, **options):
        asked[purpose] = urgent
        return plain(ranks, name, purpose, *args, **options)

    plain = ds_comm.groups.named_group
    monkeypatch.setattr(ds_comm.groups, "named_group", recorded)
    trained(bench, "plain", nodes)
    assert {name for name, first in asked.items() if first} == urgent


def even():
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(32, 32, bias=False), nn.GELU())))


def sent(run):
    """Bytes a rank gets by gathers, by what the group shares."""
    sink, found = MemorySink(), {}
    ds_monitor.configure([sink])
    try:
        run()
    finally:
        ds_monitor.configure([])
    for record in sink.records:
        if record.name.startswith("comm/all_gather_") and record.attrs.get("unit") not in (
            "step",
            "settle",
            "gradients",
            "order of gathers",
        ):
            link = record.attrs["group"]
            found[link] = found.get(link, 0) + record.attrs["nbytes"] * (record.attrs["ranks"] - 1)
    return found


@pytest.mark.parametrize(
    ("way", "node", "across", "flat"),
    # Psi bytes: of a flat gather a rank gets 3/4; inside a node of two 1/2; across two nodes 1/4 of them, and then 1/2 inside
    [
        ("flat", 0, 0, 2 * 0.75),
        ("secondary", 0.5, 0, 0.75),
        ("two_steps", 2 * 0.5, 2 * 0.25, 0),
        ("both", 1.0, 0.25, 0),
    ],
)
@world(4)
def test_what_goes_over_which_link(way, node, across, flat):
    """Flat, a node's two ranks fetch the other node's half each: Psi of bytes between nodes; in two steps half of that."""
    net = even()
    psi = sum(p.nbytes for p in net.parameters())
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, policy=EVEN, nodes=WAYS.get(way))

    def step(micros=1):
        for _ in range(micros):
            net(torch.randn(2, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(), step()
    name = optimizer.sharding.units[0].groups.gather_group.name
    assert sent(step) == {k: v * psi for k, v in {"node": node, "across": across, name: flat}.items() if v}
    if way == "secondary":  # of four gathers only the first leaves the node
        assert sent(lambda: step(2)) == {"node": 3 * 0.5 * psi, name: 0.75 * psi}
    planned = ds_zero.plan(even(), 4, optimizer.sharding.options, state_tensors=0)
    assert planned.persistent_bytes["full"] == (psi // 2 if way in ("secondary", "both") else 0)
    assert sum(unit.bytes["full"] for unit in optimizer.sharding.units) == planned.persistent_bytes["full"]
    fresh = optimizer.sharding.pool.fresh
    step(), step()
    assert optimizer.sharding.pool.fresh == fresh
    optimizer.close()


@BY_WAY
@world(4)
def test_what_is_written_between_steps_is_seen(way):
    net = even()
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.0), stage=3, policy=EVEN, nodes=WAYS[way])
    x = torch.ones(2, 32)
    net(x).sum().backward()  # copies are there, and stay: no update follows
    with ds_zero.GatheredParameters(net[0].weight, modifier_rank=0):
        if dist.get_rank() == 0:
            net[0].weight.data.zero_()
    assert net(x).abs().max() == 0
    ds_zero.safe_set_full_fp32_param(net[0].weight, torch.ones(32, 32))
    assert net(x).abs().max() > 0
    with ds_zero.GatheredParameters(net[0].weight, write=True):
        nn.init.zeros_(net[0].weight)
    assert net(x).abs().max() == 0
    optimizer.suspend()
    optimizer.resume()
    assert net(x).abs().max() == 0
    optimizer.close()


class Skipping(nn.Module):
    """Every rank skips another layer in every step, in forward and so in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = even()

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for number in range(0, len(self.layers), 2):
            if (number // 2 + step) % 4 != dist.get_rank():
                x = self.layers[number + 1](self.layers[number](x))
        return x


@BY_WAY
@world(4)
def test_ranks_that_take_other_paths_meet(way):
    found = []
    for nodes in (WAYS[way], None):
        net = Skipping()
        optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, policy=EVEN, nodes=nodes)
        for step in range(6):
            net(torch.ones(2, 32), step).sum().backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.close()
        found.append([p.detach().clone() for p in net.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@world(4)
def test_nodes_that_do_not_fit_are_refused_and_whole_ones_need_nothing(bench):
    for stage, nodes in (
        (3, ds_zero.NodeTopology(3, secondary_partition=True)),
        (2, ds_zero.NodeTopology(2, hierarchical=True)),
    ):
        net = bench.model("plain")
        with pytest.raises(PlanError, match=f"nodes of {nodes.size}") as error:
            ds_zero.shard(net, bench.adamw(net), stage=stage, nodes=nodes)
        assert error.value.code == "zero-nodes"
    for size in (1, 4, 8):
        net = bench.model("plain")
        optimizer = ds_zero.shard(
            net, bench.adamw(net), stage=3, nodes=ds_zero.NodeTopology(size, secondary_partition=True)
        )
        assert optimizer.sharding.units[0].groups.route is None
        optimizer.close()
