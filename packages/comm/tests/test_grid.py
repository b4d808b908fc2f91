"""Rank arithmetic of named axes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_comm.grid import RankGrid

NAMES = ("pipe", "data", "model", "expert")
grids = st.lists(st.integers(1, 4), max_size=4).map(lambda sizes: RankGrid(NAMES[: len(sizes)], tuple(sizes)))


@given(grids)
def test_rank_and_coordinate_invert_each_other_in_row_major_order(grid: RankGrid) -> None:
    points = list(itertools.product(*(range(size) for size in grid.sizes)))
    assert len(points) == grid.world_size
    for rank, point in enumerate(points):
        assert tuple(grid.coordinate(rank).values()) == point
        assert grid.rank(**dict(zip(grid.axes, point, strict=True))) == rank


@given(grids, st.data())
def test_groups_along_axes_are_all_ranks_each_once(grid: RankGrid, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(grid.axes), unique=True)) if grid.axes else []
    groups = grid.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
    assert groups == sorted(groups)
    for group in groups:
        assert list(group) == sorted(group)
        assert all(grid.group_of(rank, *axes) == group for rank in group)
        fixed = [{a: i for a, i in grid.coordinate(rank).items() if a not in axes} for rank in group]
        assert all(f == fixed[0] for f in fixed)


@given(grids, st.data())
def test_filter_match_is_the_ranks_with_these_indices(grid: RankGrid, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(grid.axes), unique=True)) if grid.axes else []
    wanted = {axis: data.draw(st.integers(0, 4)) for axis in axes}
    expected = [rank for rank in range(grid.world_size) if wanted.items() <= grid.coordinate(rank).items()]
    assert grid.filter_match(**wanted) == expected


def test_pipe_data_model() -> None:
    grid = RankGrid(("pipe", "data", "model"), (2, 2, 2))
    assert grid.groups("model") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert grid.groups("data") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups("pipe") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert grid.groups("pipe", "model") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert grid.filter_match(pipe=1, model=0) == [4, 6]


def test_describe() -> None:
    grid = RankGrid(("pipe", "data", "model"), (2, 1, 4))
    assert grid.describe(6) == "pipe=1 model=2"
    assert grid.describe(6, omit=["pipe"], inner="_", outer="-") == "model_2"


@pytest.mark.parametrize(("axes", "sizes"), [(("a", "a"), (1, 1)), (("a",), (1, 2)), (("a",), (0,))])
def test_impossible_grids_are_refused(axes: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="distinct axes"):
        RankGrid(axes, sizes)


def test_unknown_axes_and_ranks_outside_are_refused() -> None:
    grid = RankGrid(("data",), (2,))
    with pytest.raises(ValueError, match="no axis"):
        grid.size("pipe")
    with pytest.raises(ValueError, match="no axis"):
        grid.groups("pipe")
    with pytest.raises(ValueError, match="no axis"):
        grid.filter_match(pipe=0)
    with pytest.raises(ValueError, match="exactly the axes"):
        grid.rank()
    for data in (-1, 2):
        with pytest.raises(ValueError, match=rf"data={data} is outside 0\.\.1$"):
            grid.rank(data=data)
        with pytest.raises(ValueError, match=rf"rank {data} is outside 0\.\.1$"):
            grid.coordinate(data)
