"""Placement arithmetic against enumeration of the elements themselves."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from ds_comm.placement import Box, Interval, LocalShard, Partial, Replicate, Shard, TensorShard, local_box

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)))


@st.composite
def shard_of(draw: st.DrawFn, shape: tuple[int, ...]) -> TensorShard:
    box = draw(boxes(shape))
    start = draw(st.integers(0, box.numel))
    return TensorShard("w", shape, "int64", box, Interval(start, draw(st.integers(start, box.numel))))


pairs = shapes.flatmap(lambda shape: st.tuples(shard_of(shape), shard_of(shape)))


def elements(shard: TensorShard) -> list[int]:
    """Global positions of the shard's elements, by slicing a tensor of positions."""
    positions = torch.arange(math.prod(shard.shape)).view(shard.shape)
    slices = tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))
    return positions[slices].reshape(-1)[shard.interval.start : shard.interval.stop].tolist()


@given(pairs)
def test_overlap_is_the_common_elements_each_once(pair: tuple[TensorShard, TensorShard]) -> None:
    a, b = pair
    in_a, in_b = elements(a), elements(b)
    met = []
    for mine, theirs in a.overlap(b):
        assert mine.numel == theirs.numel > 0
        assert in_a[mine.start : mine.stop] == in_b[theirs.start : theirs.stop]
        met += in_a[mine.start : mine.stop]
    assert sorted(met) == sorted(set(in_a) & set(in_b))


@given(pairs)
def test_overlap_is_symmetric_and_rises(pair: tuple[TensorShard, TensorShard]) -> None:
    a, b = pair
    runs = list(a.overlap(b))
    assert sorted((theirs, mine) for mine, theirs in runs) == sorted(b.overlap(a))
    assert runs == sorted(runs)


@given(pairs)
def test_copying_along_the_overlap_moves_a_tensor(pair: tuple[TensorShard, TensorShard]) -> None:
    source, target = pair
    data, out = torch.tensor(elements(source)), torch.full((target.numel,), -1)
    for theirs, mine in source.overlap(target):
        out[mine.start : mine.stop] = data[theirs.start : theirs.stop]
    assert out.tolist() == [e if e in set(elements(source)) else -1 for e in elements(target)]


def test_equal_boxes_meet_in_one_run() -> None:
    a = TensorShard.flat("w", (100, 100), "float32", Interval(0, 6000))
    b = TensorShard.flat("w", (100, 100), "float32", Interval(5000, 10000))
    assert list(a.overlap(b)) == [(Interval(5000, 6000), Interval(0, 1000))]


def test_row_sharded_boxes_meet_in_one_run_and_column_sharded_ones_in_rows() -> None:
    whole = TensorShard.whole("w", (4, 6), "float32")
    rows = TensorShard("w", (4, 6), "float32", Box((2, 0), (2, 6)), Interval(0, 12))
    columns = TensorShard("w", (4, 6), "float32", Box((0, 2), (4, 3)), Interval(0, 12))
    assert list(whole.overlap(rows)) == [(Interval(12, 24), Interval(0, 12))]
    assert [mine.start for mine, _ in whole.overlap(columns)] == [2, 8, 14, 20]


def test_scalars_and_empty_tensors() -> None:
    scalar = TensorShard.whole("s", (), "float32")
    assert scalar.numel == 1
    assert list(scalar.overlap(scalar)) == [(Interval(0, 1), Interval(0, 1))]
    nothing = TensorShard.flat("s", (), "float32", Interval(1, 1))
    assert list(scalar.overlap(nothing)) == []
    empty = TensorShard.whole("e", (0, 4), "float32")
    assert empty.numel == 0
    assert list(empty.overlap(empty)) == []


def test_distant_rows_are_not_walked() -> None:
    rows = 1 << 40
    columns = TensorShard("w", (rows, 4), "float32", Box((0, 0), (rows, 2)), Interval(2 * rows - 4, 2 * rows))
    whole = TensorShard.whole("w", (rows, 4), "float32")
    assert len(list(columns.overlap(whole))) == 2


def test_shards_of_different_tensors_do_not_overlap() -> None:
    with pytest.raises(ValueError, match="different tensors"):
        list(TensorShard.whole("a", (2,), "float32").overlap(TensorShard.whole("b", (2,), "float32")))


@pytest.mark.parametrize(
    ("box", "interval"),
    [
        (Box((1, 0), (2, 3)), Interval(0, 6)),
        (Box((0,), (2,)), Interval(0, 2)),
        (Box((0, 0), (2, 3)), Interval(0, 7)),
    ],
)
def test_a_shard_that_does_not_fit_is_refused(box: Box, interval: Interval) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        TensorShard("w", (2, 3), "float32", box, interval)


def test_impossible_intervals_and_boxes_are_refused() -> None:
    with pytest.raises(ValueError, match="interval"):
        Interval(2, 1)
    with pytest.raises(ValueError, match="box"):
        Box((0, 0), (1,))
    with pytest.raises(ValueError, match="box"):
        Box((-1,), (1,))


@given(st.lists(st.integers(0, 7), min_size=1, max_size=2).map(tuple), st.integers(1, 3), st.integers(1, 3), st.data())
def test_local_box_agrees_with_dtensor(shape: tuple[int, ...], outer: int, inner: int, data: st.DataObject) -> None:
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    chosen = (data.draw(dims), data.draw(dims))
    placements = [Replicate() if dim is None else Shard(dim) for dim in chosen]
    taken = 0
    for coordinate in itertools.product(range(outer), range(inner)):
        box = local_box(shape, placements, (outer, inner), coordinate)
        size, offset = _dtensor_box(shape, chosen, (outer, inner), coordinate)
        assert box.shape == size
        assert box.numel == 0 or box.offset == offset
        taken += box.numel
    copies = math.prod(n for dim, n in zip(chosen, (outer, inner), strict=True) if dim is None)
    assert taken == copies * math.prod(shape)


def _dtensor_box(
    shape: tuple[int, ...], dims: tuple[int | None, ...], sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    size, offset = list(shape), [0] * len(shape)
    for dim, count, index in zip(dims, sizes, coordinate, strict=True):
        placement = TorchReplicate() if dim is None else TorchShard(dim)
        if isinstance(placement, TorchShard):
            length, start = TorchShard.local_shard_size_and_offset(size[placement.dim], count, index)
            size[placement.dim], offset[placement.dim] = length, offset[placement.dim] + (start or 0)
    return tuple(size), tuple(offset)


def test_a_partial_axis_leaves_the_whole_box() -> None:
    assert local_box((4, 4), [Partial(), Shard(-1)], (2, 2), (1, 1)) == Box((0, 2), (4, 2))
    with pytest.raises(ValueError, match="Shard"):
        local_box((4,), [Shard(1)], (2,), (0,))


def test_a_local_shard_holds_the_owners_memory() -> None:
    owner = torch.zeros(4)
    local = LocalShard(TensorShard.flat("w", (2, 3), "float32", Interval(1, 5)), owner)
    local.data.fill_(1)
    assert owner.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "data", [torch.zeros(5), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(8)[::2], torch.zeros(2, 2)]
)
def test_a_local_shard_with_other_data_is_refused(data: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="data must be contiguous"):
        LocalShard(TensorShard.flat("w", (2, 3), "float32", Interval(1, 5)), data)
