"""Who copies what and who sums what in shared memory: every element of every parameter, from exactly one place."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_comm.shm.shm_units import ReductionBuffers
from ds_zero.layout.elements import plan_layout, plan_sums
from ds_zero.layout.shard_options import PLAIN
from ds_zero.runtime.reduce_strategies import ShmReduceScatter

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)
KINDS = st.sampled_from(["flat", "dim0", "whole"])


class FakeHost:
    """Rows of all ranks in one process."""

    def __init__(self, rows, rank):
        self.rows, self.rank = rows, rank

    def open_slot(self, numel, dtype, finish):
        return ReductionBuffers(1, self.rows[self.rank], self.rows)

    def post(self, slot, what):
        pass

    def wait(self, slot, what):
        pass

    def pulled(self, slot):
        pass


def posting_of(layout, rows, rank):
    plan = SimpleNamespace(name="unit", layout=layout, wire=PLAIN)
    group_set = SimpleNamespace(
        shard_group=SimpleNamespace(rank=rank), replicate_group=SimpleNamespace(size=1), levels=None
    )
    return ShmReduceScatter(plan, group_set, FakeHost(rows, rank))


def named(shapes):
    return {f"p{i}": shape for i, shape in enumerate(shapes)}


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.integers(1, 4), KINDS, st.integers(1, 20))
def test_runs_cover_the_shard_and_what_is_kept_is_owned(shapes, world, kind, least):
    layout = plan_layout(named(shapes), world, kind=kind)
    for rank in range(world):
        plan = plan_sums(layout, rank, least)
        ends = [0, *(run.stop for run in plan.runs)]
        assert [run.start for run in plan.runs] == ends[:-1]
        assert ends[-1] == layout.shard_numel
        owned = {(p.start, p.name, p.interval.start, p.interval.numel) for p in layout.owned(rank)}
        for run in plan.runs:
            if run.member is not None:
                numel = run.stop - run.start
                assert numel >= least
                assert (run.start, layout.slots[run.member].name, run.first, numel) in owned


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 4), KINDS, st.data())
def test_shards_are_the_sums_whatever_is_kept_absent_or_odd(shapes, world, kind, data):
    """Ranks one after the other on rows they share; an absent gradient is zeros, a transposed one is copied."""
    layout = plan_layout(named(shapes), world, kind=kind)
    rows = tuple(torch.full((layout.numel,), float("nan")) for _ in range(world))
    least = data.draw(st.integers(1, 20))
    postings, expected = [], torch.zeros(layout.numel)
    for rank in range(world):
        with mock.patch("ds_zero.runtime.reduce_strategies.LEAST_KEPT", least):
            posting = posting_of(layout, rows, rank)
        grads = {}
        for i, slot in enumerate(layout.slots):
            if data.draw(st.booleans()):
                grad = torch.randn(slot.shape)
                if grad.dim() == 2 and data.draw(st.booleans()):
                    grad = grad.t().contiguous().t()
                grads[i] = grad
        assert posting.take(grads, torch.float32, lambda: None)
        assert posting.begin(None, lambda: None) == torch.float32
        postings.append(posting)
        for i, grad in grads.items():
            slot = layout.slots[i]
            expected[slot.offset : slot.offset + slot.numel] += grad.reshape(-1)
    for rank, posting in enumerate(postings):
        out, in_place = torch.empty(layout.shard_numel), data.draw(st.booleans())
        outs = [out[start:stop] for start, stop in posting.ranges]
        if in_place:
            outs = [o if own is None else own for own, o in zip(posting.in_place_sums(), outs, strict=True)]
        norms = posting.finish(outs)
        out = torch.cat(outs)
        want = torch.cat([expected[s.start + rank * s.chunk :][: s.chunk] for s in layout.segments])
        torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)
        assert float(norms[:, 0].sum()) == pytest.approx(float(want.double().square().sum()), rel=1e-5)
        assert float(norms[:, 1].max()) == max(want.double().abs().tolist(), default=0.0)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 4), KINDS)
def test_a_flat_buffer_is_shown_but_for_what_this_rank_owns(shapes, world, kind):
    layout = plan_layout(named(shapes), world, kind=kind)
    flats = [torch.randn(layout.numel) for _ in range(world)]
    rows = tuple(torch.full((layout.numel,), float("nan")) for _ in range(world))
    postings = [posting_of(layout, rows, rank) for rank in range(world)]
    for rank, posting in enumerate(postings):
        posting.begin(flats[rank], lambda: None)
        assert int(rows[rank].isnan().sum()) == layout.shard_numel
    total = sum(flats[1:], flats[0].clone())
    for rank, posting in enumerate(postings):
        out = torch.empty(layout.shard_numel)
        posting.finish([out[start:stop] for start, stop in posting.ranges])
        assert torch.equal(out, torch.cat([total[s.start + rank * s.chunk :][: s.chunk] for s in layout.segments]))


def test_half_of_a_matrix_is_copied_on_two_ranks():
    layout = plan_layout({"w": (512, 256), "b": (256,)}, 2)
    for rank in range(2):
        plan = plan_sums(layout, rank, 16384)
        assert plan.members == {0}
        published = sum(part.stop - part.start for part in plan.published)
        assert published == prod((512, 256)) - max(r.stop - r.start for r in plan.runs)
        assert abs(published - prod((512, 256)) // 2) <= 256
