"""What travels in which message: every element of a shard once, at one place."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ds_zero.layout.elements import pack, plan_copies, plan_layout

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)
KINDS = st.sampled_from(["flat", "dim0", "whole"])


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.integers(1, 4), KINDS, st.integers(1, 20))
def test_messages_cover_the_shard_large_runs_first(shapes, world, kind, least):
    layout = plan_layout({f"p{i}": shape for i, shape in enumerate(shapes)}, world, kind=kind)
    for rank in range(world):
        parcel = pack(layout, rank, least)
        runs = parcel.plan.runs
        assert sorted((*parcel.large, *parcel.small)) == list(range(len(runs)))
        assert all(runs[i].member is not None and runs[i].numel >= least for i in parcel.large)
        covered = sorted((parcel.places[i], parcel.places[i] + run.numel) for i, run in enumerate(runs))
        assert covered[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(covered))
        assert covered[-1][1] == layout.shard_numel
        assert all(parcel.places[i] >= parcel.packed for i in parcel.small)
        messages = parcel.messages
        edges = [0, *(stop for _, stop in messages)]
        assert [start for start, _ in messages] == edges[:-1]
        assert edges[-1] == layout.shard_numel
        assert len(messages) == len(parcel.large) + bool(parcel.small)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 4), KINDS, st.integers(1, 20))
def test_short_runs_are_copied_once_and_long_ones_never(shapes, world, kind, least):
    layout = plan_layout({f"p{i}": shape for i, shape in enumerate(shapes)}, world, kind=kind)
    parcels = [pack(layout, rank, least) for rank in range(world)]
    sent = {
        (run.member, run.first + i)
        for parcel in parcels
        for run in parcel.plan.runs
        if run.member is not None
        for i in range(run.numel)
    }
    copied = [
        (member, first + i)
        for member, first, numel, _ in plan_copies(layout, parcels, [0] * world)
        for i in range(numel)
    ]
    every = {(member, i) for member, slot in enumerate(layout.slots) for i in range(slot.numel)}
    assert len(copied) == len(set(copied))
    assert set(copied) == every - sent
