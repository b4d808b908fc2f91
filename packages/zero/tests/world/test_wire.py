"""Messages as codes: what is sent, what stays exact, and what is refused. Nodes of two ranks are forced."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_monitor
import ds_zero
from ds_config.errors import PlanError, UnsupportedError
from ds_ops.formats import INT8, QuantSpec
from ds_testing import world
from ds_zero.policies.quantized_comm import QGZ, QWZ, ErrorFeedbackOptions, QuantizedComm

FINE = QuantSpec(INT8, 16)  # so that three steps of a small model tell a mistake from a rounding
ANY = {"float32": {}, "bfloat16": {}, "float16": {}}
SMALL = ds_zero.UnitSizePolicy(max_numel=1, persist_numel=0)
WIRES = {
    "weights": QuantizedComm(weights=QWZ),
    "gradients": QuantizedComm(gradients=QGZ),
    "corrected": QuantizedComm(gradients=QGZ, correction=ErrorFeedbackOptions()),
    "levels": QuantizedComm(gradients=QGZ, correction=ErrorFeedbackOptions(), node=2),
    "all": QuantizedComm(QWZ, QWZ, QGZ, ErrorFeedbackOptions(), 2),
}


def net_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 48, bias=False), nn.GELU(), nn.Linear(48, 32)).to(
        dtype
    )


def batch(step, dtype=torch.float32):
    made = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 64, generator=made).to(dtype)


def uncertified():
    """What is tested here is not what is certified."""
    fine = QuantizedComm(FINE, FINE, FINE, ErrorFeedbackOptions()), QuantizedComm(gradients=FINE)
    every = {mode: ANY for wire in (*WIRES.values(), *fine) for mode in wire.modes}
    return mock.patch("ds_zero.policies.quantized_comm.certificates", return_value=every)


def trained(wire, steps=4, dtype=torch.float32, inspect=lambda optimizer, step: None, **options):
    """(parameters, losses) after some steps of two microbatches."""
    net = net_of(dtype)
    with uncertified():
        optimizer = ds_zero.shard(
            net, torch.optim.SGD(net.parameters(), lr=0.05), policy=SMALL, quantized_comm=wire, memory="private",
            **{"stage": 3, **options},
        )  # fmt: skip
    for step in range(steps):
        for micro in range(2):
            (net(batch(2 * step + micro, dtype)).float().square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        inspect(optimizer, step)
    optimizer.close()
    return [p.detach().clone().float() for p in net.parameters()]


def distance(one, other):
    return max(float((a - b).norm() / b.norm().clamp_min(1e-3)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "nodes", [None, ds_zero.NodeTopology(2, hierarchical=True, secondary_partition=True)], ids=["flat", "nodes"]
)
@pytest.mark.parametrize("node", [1, 2])
@world(4)
def test_fine_codes_train_as_exact_messages_do(node, nodes):
    """Over four ranks: a wrong divisor (the mean over nodes instead of ranks) or a wrong order would be off by factors."""
    exact = trained(QuantizedComm())
    assert distance(trained(QuantizedComm(FINE, FINE, FINE, None, node), nodes=nodes), exact) < 0.01
    assert (
        distance(trained(QuantizedComm(gradients=FINE, correction=ErrorFeedbackOptions(), node=node), stage=2), exact)
        < 0.01
    )
    assert distance(trained(QuantizedComm(gradients=FINE, node=node), stage=1, shard_size=2), exact) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WIRES)
@world(4)
def test_bytes_on_the_wire_are_those_of_the_formulas(way, dtype):
    """A message of n elements in groups of g with b bits: n b / 8, to a multiple of 4, and 4 for each group."""
    wire, sink, plans = WIRES[way], ds_monitor.MemorySink(), []

    def inspect(optimizer, step):
        plans.append(optimizer.sharding.plan)
        if step == 1:
            ds_monitor.attach([sink])
        if step == 2:
            ds_monitor.detach([sink])

    trained(wire, 3, dtype, inspect, overlap=False)
    for unit in plans[0].units:
        chunk, others = unit.layout.shard_numel, 3
        gathered = reduced = others * chunk * dtype.itemsize
        if wire.weights:
            gathered = others * (chunk + 4 * math.ceil(chunk / 256))
        if wire.gradients:
            reduced = others * (-(-chunk // 2) + 4 * math.ceil(chunk / 128))
        assert unit.sent == {"gather": gathered, "reduce": reduced}
        spans = [(r.name, r.attrs) for r in sink.records if r.attrs.get("unit") == unit.name]
        # Of two microbatches: a gather each for forward and backward, and a reduction.
        got = sum(s["nbytes"] * (s["ranks"] - 1) for name, s in spans if name.startswith("comm/all_gather"))
        assert got == 4 * gathered, (unit, spans)
        codes = [s for name, s in spans if name.startswith("comm/all_to_all_single")]
        assert sum(s["nbytes"] * (s["ranks"] - 1) // s["ranks"] for s in codes) == (
            2 * reduced if wire.gradients else 0
        )
        assert {s["ranks"] for s in codes} == (set() if not wire.gradients else {4} if wire.node == 1 else {2})


@world(2)
def test_masters_are_never_what_codes_said():
    """With a rate of nothing no bit of a master changes, whatever was gathered; and whole access sees the masters."""
    net = net_of()
    before = [p.detach().clone() for p in net.parameters()]
    with uncertified():
        optimizer = ds_zero.shard(
            net,
            torch.optim.SGD(net.parameters(), lr=0.0),
            stage=3,
            policy=SMALL,
            quantized_comm=WIRES["all"],
            memory="private",
        )
    seen = []
    net[0].register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    for step in range(3):
        net(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(seen[0], before[0])  # forward used codes ...
    assert float((seen[0] - before[0]).abs().max()) <= float(before[0].abs().max()) / 254 * 1.01
    out = net(batch(9))
    with ds_zero.GatheredParameters(
        list(net.parameters()), write=True
    ):  # ... and an edit inside a graph does not bring them back
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))
        with torch.no_grad():
            net[0].bias.add_(1.0)
    del out
    before[1] += 1.0
    assert all(
        torch.equal(ds_zero.safe_get_full_fp32_param(p), b) for p, b in zip(net.parameters(), before, strict=True)
    )
    optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("way", ["gradients", "levels"])
@world(4)
def test_gradients_that_are_not_finite_skip_the_step(way):
    net = net_of(torch.bfloat16)
    with uncertified():
        optimizer = ds_zero.shard(
            net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, precision="bf16", policy=SMALL, quantized_comm=WIRES[way],
            memory="private",
        )  # fmt: skip
    for bad in (False, True, False):
        loss = net(batch(0, torch.bfloat16)).float().square().mean()
        (loss * math.inf if bad and dist.get_rank() == 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last.skipped == bad
        if bad:  # what was lost then is nothing to send later
            assert all(u.gradients.way.error_bytes == 0 for u in optimizer.sharding.units)
    assert all(bool(p.isfinite().all()) for p in map(ds_zero.safe_get_full_fp32_param, net.parameters()))
    optimizer.close()


@world(2)
def test_errors_are_sent_later_and_counted():
    """A gradient that one int4 step rounds away arrives in the end, only with a correction."""

    def moved(wire):
        net = nn.Linear(128, 2, bias=False)
        nn.init.zeros_(net.weight)
        with uncertified():
            optimizer = ds_zero.shard(
                net, torch.optim.SGD(net.parameters(), lr=1.0), stage=2, quantized_comm=wire, memory="private"
            )
        x = torch.full((1, 128), 0.05)
        x[0, 0] = 1.0  # the step of a code is 1/7
        for _ in range(40):
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        unit = optimizer.sharding.units[0]
        held, planned = unit.bytes["grad_shard"], unit.plan.bytes.grads
        errors = held - unit.layout.shard_numel * 4
        optimizer.close()
        return float(-net.weight[0, 5]), errors, held <= planned

    assert moved(WIRES["gradients"]) == (0.0, 0, True)
    value, errors, fits = moved(WIRES["corrected"])
    assert 0.5 * 40 * 0.05 < value < 1.1 * 40 * 0.05
    assert (errors, fits) == (2 * 128 * 4, True)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"stage": 2, "quantized_comm": QuantizedComm(weights=QWZ)}, "zero-quantized-comm"),
        ({"stage": 0, "quantized_comm": QuantizedComm(gradients=QGZ)}, "zero-quantized-comm"),
        ({"stage": 3, "quantized_comm": QuantizedComm(correction=ErrorFeedbackOptions())}, "zero-quantized-comm"),
        ({"stage": 3, "quantized_comm": QuantizedComm(gradients=QuantSpec(INT8, 48))}, "zero-uncertified"),
        ({"stage": 3, "quantized_comm": QuantizedComm(weights=QWZ), "precision": ds_zero.Precision(param=torch.float64)}, "zero-uncertified"),
    ],
)  # fmt: skip
@world(2)
def test_what_cannot_be_is_refused(options, code):
    net = net_of()
    with pytest.raises((PlanError, UnsupportedError)) as found:
        ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), policy=SMALL, memory="private", **options)
    assert found.value.code == code


@world(2)
def test_memory_that_ranks_share_sends_nothing():
    net = net_of()
    optimizer = ds_zero.shard(
        net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, quantized_comm=WIRES["all"], memory="shared"
    )
    assert not any(u.plan.wire.codes_gathers or u.plan.wire.codes_sums for u in optimizer.sharding.units)
    optimizer.close()


@world(2)
def test_frozen_parameters_travel_as_codes_alone():
    net = net_of()
    net[2].requires_grad_(False)
    optimizer = ds_zero.shard(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        stage=3,
        quantized_comm=QuantizedComm(frozen=QWZ),
        policy=SMALL,
        memory="private",
    )
    assert {u.spec.trained: u.plan.wire.weights for u in optimizer.sharding.units} == {True: None, False: QWZ}
    before = ds_zero.safe_get_full_fp32_param(net[2].weight)
    net(batch(0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(ds_zero.safe_get_full_fp32_param(net[2].weight), before)
    optimizer.close()
