"""What travels in which message: every element of a shard once, at one place."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_zero.layout.elements import plan_layout
from ds_zero.runtime.exchange import pack

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
        messages = parcel.cut(torch.arange(layout.shard_numel))
        assert (
            torch.equal(torch.cat(messages), torch.arange(layout.shard_numel)) if messages else not layout.shard_numel
        )
        assert len(messages) == len(parcel.large) + bool(parcel.small)
