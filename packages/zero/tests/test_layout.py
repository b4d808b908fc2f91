"""Layouts, drawn by the thousand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_zero.layout.elements import plan_layout

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=7).map(
    lambda found: {f"p{i}": shape for i, shape in enumerate(found)}
)
kinds = st.sampled_from(["flat", "dim0", "whole"])


@given(shapes, st.integers(1, 9), kinds, st.sampled_from([1, 2, 16]))
def test_every_element_has_one_owner(shapes, world, kind, align):
    layout = plan_layout(shapes, world, kind=kind, align=align)
    for name, shape in shapes.items():
        owned = sorted(
            (p.interval.start, p.interval.stop) for r in range(world) for p in layout.owned(r) if p.name == name
        )
        assert [start for start, _ in owned] == [0, *(stop for _, stop in owned)][: len(owned)]
        assert (owned[-1][1] if owned else 0) == math.prod(shape)


@given(shapes, st.integers(1, 9), kinds, st.sampled_from([1, 2, 16]))
def test_the_shard_is_the_ranks_chunk_of_the_full_buffer(shapes, world, kind, align):
    layout = plan_layout(shapes, world, kind=kind, align=align)
    slots = {s.name: s for s in layout.slots}
    full = list(range(layout.numel))
    for rank in range(world):
        shard = [x for s in layout.segments for x in full[s.start + rank * s.chunk :][: s.chunk]]
        assert len(shard) == layout.shard_numel
        for piece in layout.owned(rank):
            begin = slots[piece.name].offset + piece.interval.start
            assert shard[piece.start : piece.stop] == full[begin : begin + piece.interval.numel]


@given(shapes, st.integers(1, 9), kinds, st.sampled_from([1, 2, 16]))
def test_slots_and_chunks_are_aligned_and_gaps_are_the_rest(shapes, world, kind, align):
    layout = plan_layout(shapes, world, kind=kind, align=align)
    assert all(s.offset % align == 0 for s in layout.slots)
    assert all(s.chunk % align == 0 for s in layout.segments)
    assert sum(g.numel for g in layout.gaps) + sum(s.numel for s in layout.slots) == layout.numel


@given(shapes, st.integers(1, 9))
def test_flat_pads_less_than_a_line_a_parameter_and_a_line_a_rank(shapes, world):
    layout = plan_layout(shapes, world, kind="flat", align=16)
    assert layout.numel - sum(s.numel for s in layout.slots) <= 15 * len(shapes) + 16 * world


@given(shapes, st.integers(1, 9))
def test_whole_never_splits_a_parameter(shapes, world):
    layout = plan_layout(shapes, world, kind="whole")
    owned = [p for r in range(world) for p in layout.owned(r)]
    assert all(p.interval.numel == math.prod(p.shape) for p in owned)
    assert len(owned) == sum(math.prod(s) > 0 for s in shapes.values())


@given(shapes, st.integers(1, 9))
def test_dim0_splits_between_rows(shapes, world):
    for rank in range(world):
        for piece in plan_layout(shapes, world, kind="dim0").owned(rank):
            row = math.prod(piece.shape[1:])
            assert piece.interval.start % row == 0
            assert piece.interval.stop % row == 0


def test_whole_balances_the_ranks():
    layout = plan_layout({f"w{i}": (64, 64) for i in range(8)}, 4, kind="whole")
    assert layout.numel == sum(s.numel for s in layout.slots)


@pytest.mark.parametrize("arguments", [{"world": 0}, {"world": 1, "align": 0}, {"world": 1, "kind": "round"}])
def test_refuses_what_is_no_layout(arguments):
    with pytest.raises(ValueError, match="layout"):
        plan_layout({"p": (3,)}, **arguments)
