"""Any configuration ends in the numbers of one process, or in an error of ours on every rank. Drawn by Hypothesis.

All ranks draw the same examples (derandomized, no shrinking), and each example ends with all of them telling how it went.
"""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import ds_zero
from ds_config.errors import DsError
from ds_testing import world

KINDS = ["plain", "tied", "reused", "unused", "frozen", "checkpointed", "selective", "reentrant", "reentrant_reused",
         "reentrant_frozen", "zero_size", "mixed", "external", "side_output"]  # fmt: skip
STEPS = 2

policies = st.builds(
    ds_zero.UnitSizePolicy,
    max_numel=st.sampled_from([None, 1, 40, 600, 5000, 1 << 30]),
    persist_numel=st.sampled_from([0, 8, 40, 100_000]),
    persist_total=st.sampled_from([None, 100]),
    leaves=st.sampled_from([frozenset(), frozenset({"blocks.0"}), frozenset({"head", "blocks.1.up"})]),
)
options = st.fixed_dictionaries(
    {
        "stage": st.sampled_from([0, 1, 1, 2, 2, 3, 3, 3, 7, ds_zero.ShardingStrategy(True, True, True)]),
        "policy": policies,
        "overlap": st.booleans(),
        "clip": st.sampled_from([None, 1.0, 0.05, math.inf]),
        "layout": st.sampled_from([None, None, "flat", "dim0", "whole"]),
        "memory": st.sampled_from(["auto", "private", "shared"]),
        "shard_size": st.sampled_from([None, None, None, 1, 2, 3]),
        "precision": st.sampled_from([None, None, None, "bf16", "fp16", "int3"]),
        "strict": st.sampled_from([False, False, True]),
    }
)
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[::2], "lr": 1e-2}, {"params": p[1::2], "lr": 1e-3, "weight_decay": 0.3}], foreach=False
    ),
}
examples = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "optimizer": st.sampled_from(["adamw", "adamw", "sgd", "adagrad", "groups", "adafactor", "lbfgs"]),
        "micros": st.integers(1, 3),
        "sync": st.booleans(),
        "least": st.sampled_from([8, 8, 1 << 20]),  # elements from which gradients are kept, and sent, without a copy
        "options": options,
    }
)


def maker(name):
    return lambda net: OPTIMIZERS[name]([p for p in net.parameters() if p.requires_grad])


def train(bench, example, options):
    kind, micros = example["kind"], example["micros"]
    net = bench.model(kind, torch.float64 if options["precision"] is None else torch.float32)
    least = example["least"]
    with (
        mock.patch("ds_zero.runtime.reduce_strategies.LEAST_KEPT", least),
        mock.patch("ds_zero.runtime.reduce_strategies.LEAST_SENT", least),
    ):
        optimizer = ds_zero.shard(net, maker(example["optimizer"])(net), **options)
    try:
        for step in range(STEPS):
            for micro in range(micros):
                with optimizer.reduction(example["sync"] or micro + 1 == micros):
                    loss = bench.loss(net, bench.batch(step, micro, dist.get_rank())) / micros
                    optimizer.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        optimizer.close()
    return [p.detach() for p in net.parameters()]


def distance(found, expected):
    """Largest difference of a parameter over its largest element."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True) if a.numel()]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def check(bench, example):
    chosen, kind, size = example["options"], example["kind"], dist.get_world_size()
    found = train(bench, example, chosen)
    if chosen["precision"] is None:
        clip = None if chosen["clip"] == math.inf else chosen["clip"]
        make = maker(example["optimizer"])
        arguments = {"steps": STEPS, "micros": example["micros"], "clip": clip, "world": size, "make": make}
        error, bound = distance(found, bench.dense(kind, **arguments)), 1e-12 if kind != "mixed" else 1e-3
    else:  # the formats round, but the same way at every stage
        plain = {"stage": 0, "clip": chosen["clip"], "precision": chosen["precision"]}
        start = list(bench.model(kind).parameters())
        expected = train(bench, example, plain)
        moved = math.fsum(float((a - b.detach()).square().sum()) for a, b in zip(expected, start, strict=True))
        apart = math.fsum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
        error, bound = math.sqrt(apart), 0.1 * math.sqrt(moved)
    return "equal" if error <= bound else f"off by {error:.3g}, allowed {bound:.3g}"


def outcome(bench, example):
    try:
        return check(bench, example)
    except DsError as error:
        return f"refused: {error.code}"


def run(bench, count):
    seen = []

    @settings(max_examples=count, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(example=examples)
    def body(example):
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, (repr(example), outcome(bench, example)))
        assert len(set(told)) == 1, told
        assert told[0][1] == "equal" or told[0][1].startswith("refused: "), told[0]
        seen.append(told[0][1])

    body()
    assert len(seen) >= count
    assert seen.count("equal") >= count // 4
    assert len(set(seen)) > 2  # some were refused, for more than one reason


@world(2)
def test_a_sample_of_configurations(bench):
    run(bench, 20)


@pytest.mark.slow
@world(2, timeout=300)
def test_configurations_on_two_ranks(bench):
    run(bench, 400)


@pytest.mark.slow
@world(3, timeout=300)
def test_configurations_on_three_ranks(bench):
    run(bench, 100)
