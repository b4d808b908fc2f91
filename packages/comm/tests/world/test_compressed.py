"""Quantized collectives: sums of what was sent and not multiples of it, on any hierarchy; errors that feedback takes back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

import ds_comm
from ds_comm import ReduceOp
from ds_comm.codecs.compressed import ErrorFeedback, Quantized
from ds_comm.codecs.hierarchy import Hierarchy
from ds_comm.shm import shm_group
from ds_config.errors import CommError
from ds_ops.formats import FP8_E4M3, INT4, INT8, QuantSpec
from ds_testing import world

N = 1000  # of one rank's part: the last group is shorter
SPECS = [QuantSpec(INT8), QuantSpec(INT4, 64), QuantSpec(FP8_E4M3, 128), QuantSpec(INT8, 32, symmetric=False)]


def sent(rank: int, size: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(size * N, generator=torch.Generator().manual_seed(100 * salt + rank))


def exact_mean(rank: int, size: int, salts: Sequence[int] = (0,)) -> torch.Tensor:
    every = [sum(sent(r, size, salt).double() for salt in salts) for r in range(size)]
    return torch.stack(every).mean(0)[rank * N : (rank + 1) * N]  # type: ignore[arg-type]


def check_reductions(group: ds_comm.Group, hierarchy: Hierarchy | None) -> None:
    rank, size = group.rank, group.size
    expected = exact_mean(rank, size)
    for spec in SPECS:
        quantized = Quantized(spec, hierarchy)
        for asynchronous in (False, True):
            out = torch.empty(N)
            work = quantized.reduce_scatter_single(
                out, sent(rank, size), ReduceOp.AVG, None if hierarchy else group, asynchronous, unit="w"
            )
            assert work.wait()
            assert work.is_completed()
            step = 4 / (
                7 if spec.format is INT4 else 15
            )  # of codes at the largest values, twice the width of a rounding
            assert (out - expected).abs().max() < step
            slope = (out.double() @ expected) / (expected @ expected)
            assert abs(slope - 1) < 0.03, "the mean, not a multiple of it"
        total = torch.empty(N)
        quantized.reduce_scatter_single(total, sent(rank, size), unit="w")
        assert torch.allclose(total, out * size, rtol=1e-5, atol=1e-5)


def check_exact_values(group: ds_comm.Group, hierarchy: Hierarchy | None) -> None:
    """Constants survive quantization: the result is their sum to the last bit."""
    inp = torch.full((group.size * N,), 2.0**-group.rank)
    out = torch.empty(N, dtype=torch.float32)
    Quantized(QuantSpec(INT8), hierarchy).reduce_scatter_single(out, inp, group=group)
    expected = sum(2.0**-r for r in range(group.size))
    assert torch.allclose(out, torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("local", [0, 1, 2, 4])
@world(4)
def test_the_mean_of_what_is_summed_on_any_hierarchy(local: int) -> None:
    group = ds_comm.world_group()
    hierarchy = Hierarchy.split(group, local) if local else None
    if hierarchy is not None:
        assert (hierarchy.nodes, hierarchy.local) == (4 // local, local)
    check_reductions(group, hierarchy)
    check_exact_values(group, hierarchy)


@world(2)
def test_two_ranks_and_half_types() -> None:
    group = ds_comm.world_group()
    check_reductions(group, None)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.empty(N, dtype=dtype)
        Quantized().reduce_scatter_single(out, sent(group.rank, 2).to(dtype), ReduceOp.AVG)
        assert (out.double() - exact_mean(group.rank, 2)).abs().max() < 0.05


@world(3)
def test_a_gather_is_the_same_on_all_ranks_and_close() -> None:
    group = ds_comm.world_group()
    parts = [sent(r, 1) for r in range(3)]
    for spec in SPECS:
        for asynchronous in (False, True):
            out = torch.empty(3, N)
            Quantized(spec).all_gather_single(out, parts[group.rank], async_op=asynchronous, unit="w").wait()
            assert (out - torch.stack(parts)).abs().max() < 5 / (7 if spec.format is INT4 else 15) / 2
            every = torch.empty(3, 3 * N)
            ds_comm.all_gather_single(every, out)
            assert torch.equal(every[0], every[2])


@pytest.mark.parametrize("local", [0, 2])
@world(4)
def test_feedback_takes_the_error_back(local: int) -> None:
    group = ds_comm.world_group()
    hierarchy = Hierarchy.split(group, local) if local else None
    steps, found = range(30), {}
    for name, feedback in (("without", None), ("with", ErrorFeedback(decay=0.0))):
        quantized, total = Quantized(QuantSpec(INT4, 64), hierarchy, feedback), torch.zeros(N)
        for _ in steps:  # the same message: without feedback the same error every time
            out = torch.empty(N)
            quantized.reduce_scatter_single(out, sent(group.rank, 4), ReduceOp.AVG, group, unit="w")
            total += out
        exact = exact_mean(group.rank, 4)
        found[name] = (total / len(steps) - exact).abs().max().item()
        slope = (total.double() @ exact) / (exact @ exact) / len(steps)
        assert abs(slope - 1) < (0.002 if feedback else 0.03), "the mean, not a multiple of it"
    assert found["with"] < found["without"] / 5


@world(2)
def test_what_cannot_be_is_refused() -> None:
    group = ds_comm.world_group()
    x, out = torch.ones(8), torch.ones(4)
    for quantized, op, code in (
        (Quantized(), ReduceOp.MAX, "comm-quantized-op"),
        (Quantized(feedback=ErrorFeedback()), ReduceOp.SUM, "comm-feedback"),
    ):
        with pytest.raises(CommError) as caught:
            quantized.reduce_scatter_single(out, x, op)
        assert caught.value.code == code
    with pytest.raises(CommError) as caught:
        Hierarchy.split(group, 3)
    assert caught.value.code == "comm-hierarchy"
    with pytest.raises(CommError) as caught:
        Quantized(hierarchy=Hierarchy.split(group, 2)).reduce_scatter_single(x, x, group=ds_comm.self_group())
    assert caught.value.code == "comm-hierarchy"
    with pytest.raises(CommError, match="8 elements"):
        Quantized().reduce_scatter_single(x, x)


@pytest.mark.skipif(bool(shm_group.available()), reason=f"no shm: {shm_group.available()}")
@world(4)
def test_shared_memory_inside_nodes_and_gloo_across() -> None:
    group = ds_comm.world_group()
    hierarchy = Hierarchy.split(group, 2, inside_backend="shm")
    assert [dist.get_backend(level.pg) for level in (hierarchy.inside, hierarchy.across)] == ["shm", "gloo"]
    check_reductions(group, hierarchy)
    x = torch.arange(7.0) + group.rank
    hierarchy.all_reduce(x)
    assert torch.equal(x, 4 * torch.arange(7.0) + 6)


@world(4)
def test_exact_sums_over_a_hierarchy() -> None:
    group = ds_comm.world_group()
    hierarchy = Hierarchy.split(group, 2)
    for n in (1, 8, 7):
        x = torch.arange(float(n)) + group.rank
        hierarchy.all_reduce(x)
        assert torch.equal(x, 4 * torch.arange(float(n)) + 6)
        hierarchy.all_reduce(x, ReduceOp.AVG)
        assert torch.equal(x, 4 * torch.arange(float(n)) + 6)
        hierarchy.all_reduce(x.add_(group.rank), ReduceOp.MAX)
        assert torch.equal(x, 4 * torch.arange(float(n)) + 9)
    assert hierarchy.inside.ranks == ((0, 1) if group.rank < 2 else (2, 3))
    assert hierarchy.across.ranks == ((0, 2) if group.rank % 2 == 0 else (1, 3))


@world(4)
def test_hierarchies_of_groups_that_are_not_the_world() -> None:
    mine = [0, 2] if ds_comm.world_group().rank % 2 == 0 else [1, 3]
    group = next(g for g in [ds_comm.new_group([0, 2], "a"), ds_comm.new_group([1, 3], "b")] if g is not None)
    hierarchy = Hierarchy.split(group, 2)
    assert (hierarchy.nodes, hierarchy.local, hierarchy.inside.ranks) == (1, 2, tuple(mine))


def test_one_rank_loses_nothing() -> None:
    group, x = ds_comm.self_group(), torch.randn(10)
    out = torch.empty(10)
    Quantized(QuantSpec(INT4, 2)).reduce_scatter_single(out, x, group=group)
    assert torch.equal(out, x)
    out.zero_()
    Quantized().all_gather_single(out, x, group, async_op=True).wait()
    assert torch.equal(out, x)


def test_feedback_by_unit() -> None:
    feedback = ErrorFeedback(decay=0.5, reset_after=2)
    x = torch.ones(4)
    feedback.error("a", 0, x).fill_(1.0)
    assert feedback.error("b", 0, x).sum() == feedback.error("a", 1, x).sum() == 0
    feedback.rescale(0.5)
    assert feedback.error("a", 0, x).sum() == 2
    assert feedback.error("a", 0, x).sum() == 0, "forgotten after two uses"
    assert feedback.nbytes == 48
    feedback.clear()
    assert feedback.nbytes == 0
    with pytest.raises(CommError):
        ErrorFeedback(decay=1.0)
