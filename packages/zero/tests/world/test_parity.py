"""The same numbers as DDP and as one process, at every stage and setting."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ds_zero
from ds_testing import world

KINDS = ["plain", "tied", "reused", "unused", "frozen", "checkpointed", "selective", "reentrant", "reentrant_reused",
         "reentrant_frozen", "zero_size", "mixed", "external", "side_output"]  # fmt: skip
BUCKETS = {"element": 1, "parameter": 600, "model": 1 << 30}
GRID = list(itertools.product((1, 4), BUCKETS, (True, False), (None, 1.0)))


def train(bench, kind, options, *, steps=5, micros=1, dtype=torch.float32):
    net = bench.model(kind, dtype)
    # These small gradients are to be kept, and sent, as large ones are.
    with (
        mock.patch("ds_zero.runtime.reduce_strategies.LEAST_KEPT", 8),
        mock.patch("ds_zero.runtime.reduce_strategies.LEAST_SENT", 8),
    ):
        optimizer = ds_zero.shard(net, bench.adamw(net), **options)
    for step in range(steps):
        for micro in range(micros):
            (bench.loss(net, bench.batch(step, micro, dist.get_rank())) / micros).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return list(net.parameters())


def options(stage, bucket, overlap, clip):
    policy = ds_zero.UnitSizePolicy(max_numel=BUCKETS[bucket], persist_numel=0 if bucket != "parameter" else 40)
    return {"stage": stage, "overlap": overlap, "clip": clip, "policy": policy}


def check_bits(bench, kind, stage, cells, memory="private"):
    expected = bench.ddp(kind)
    for bucket, overlap in cells:
        found = train(bench, kind, options(stage, bucket, overlap, None) | {"memory": memory})
        wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
        assert not wrong, f"{kind} stage {stage} bucket {bucket} overlap {overlap}: parameters {wrong} differ from DDP"


def check_close(bench, kind, stage, cells, memory="private"):
    size = dist.get_world_size()
    for micros, bucket, overlap, clip in cells:
        expected = bench.dense(kind, steps=3, micros=micros, clip=clip, world=size)
        chosen = options(stage, bucket, overlap, clip) | {"memory": memory}
        found = train(bench, kind, chosen, steps=3, micros=micros, dtype=torch.float64)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            bound = 1e-12 if kind != "mixed" else 1e-4  # in mixed, a part of the network computes in fp32
            error = float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if a.numel() else 0.0
            assert error <= bound, (
                f"{kind} stage {stage} {(micros, bucket, overlap, clip)}: parameter {i} off by {error}"
            )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@world(2)
def test_equals_ddp_to_the_bit(bench, kind, stage):
    # A different corner of bucket x overlap for every model and stage; the grid below has them all.
    corner = (KINDS.index(kind) + stage) % 3
    check_bits(bench, kind, stage, [(list(BUCKETS)[corner], bool(corner % 2))])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@world(2)
def test_equals_one_process(bench, kind, stage):
    check_close(bench, kind, stage, [GRID[(5 * KINDS.index(kind) + 7 * stage) % len(GRID)]])


@pytest.mark.parametrize("kind", KINDS)
@world(2)
def test_memory_shared_by_a_host_equals_ddp_to_the_bit(bench, kind):
    number = KINDS.index(kind)
    check_bits(bench, kind, 1 + number % 3, [(list(BUCKETS)[number % 3], bool(number % 2))], "shared")
    check_close(bench, kind, 1 + number % 3, [GRID[(5 * number + 3) % len(GRID)]], "shared")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@world(2, backend="shm")
def test_by_arena_equals_one_process(bench, kind, stage):
    """Private memory over shm has no way around the arena: what every rank with a device takes."""
    check_close(bench, kind, stage, [GRID[(5 * KINDS.index(kind) + 7 * stage + 3) % len(GRID)]])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_autocast_equals_ddp_to_the_bit(bench, stage):
    with torch.autocast("cpu", torch.bfloat16):
        expected = bench.ddp("tied", steps=2)
        found = train(bench, "tied", options(stage, "parameter", True, None), steps=2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Views(torch.nn.Module):
    """Gradients of viewed parameters lie in the memory of gradients that autograd goes on with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)
        self.row = torch.nn.Parameter(torch.randn(24))
        self.column = torch.nn.Parameter(torch.randn(24, 1))
        self.flat = torch.nn.Parameter(torch.randn(24))

    def forward(self, x):
        x = self.first(x) + self.row.unsqueeze(0)
        x = torch.tanh(x) + self.column.view(1, -1) + self.flat.reshape(1, 24)
        return self.last(x)


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("stage", [1, 3])
@world(2)
def test_gradients_that_share_memory_are_not_written(stage, memory):
    rank, nets = dist.get_rank(), [Views().double(), Views().double()]
    with (
        mock.patch("ds_zero.runtime.reduce_strategies.LEAST_KEPT", 8),
        mock.patch("ds_zero.runtime.reduce_strategies.LEAST_SENT", 8),
    ):
        policy = ds_zero.UnitSizePolicy(max_numel=1, persist_numel=0)
        optimizer = ds_zero.shard(
            nets[0], torch.optim.SGD(nets[0].parameters(), lr=0.1), stage=stage, memory=memory, policy=policy
        )
    params = list(nets[1].parameters())
    for step in range(3):
        made = [torch.Generator().manual_seed(10 * step + r) for r in range(2)]
        xs = [torch.randn(1, 24, generator=g, dtype=torch.float64) for g in made]
        nets[0](xs[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        # Not by backward: torch itself adds a second gradient to memory that two parameters share, for both of them.
        found = [torch.autograd.grad(nets[1](x).square().mean() / 2, params) for x in xs]
        with torch.no_grad():
            for param, *grads in zip(params, *found, strict=True):
                param -= 0.1 * sum(grads)
    optimizer.close()
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("stage", [1, 3])
@world(3)
def test_equals_one_process_on_three_ranks(bench, stage, memory):
    check_close(bench, "plain", stage, [(1, "parameter", True, 1.0)], memory)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "memory"), [*((s, "private") for s in range(4)), (1, "shared"), (3, "shared")])
@pytest.mark.parametrize("kind", KINDS)
@world(2, timeout=300)
def test_grid(bench, kind, stage, memory):
    check_bits(bench, kind, stage, itertools.product(BUCKETS, (True, False)), memory)
    check_close(bench, kind, stage, GRID, memory)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@world(2, backend="shm", timeout=300)
def test_grid_by_arena(bench, kind, stage):
    check_close(bench, kind, stage, GRID)
