"""The rules of updates that are split by importance."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_config.errors import PlanError
from ds_zero.config import ZenFlowConfig
from ds_zero.policies.zenflow import Calendar, Votes, ZenFlowOptions, columns_of, top_columns


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(1, 5), st.integers(0, 4))
def test_intervals_end_in_time_and_before_columns_change(warm_up: int, interval: int, more: int) -> None:
    every = interval + more
    calendar, since = Calendar(ZenFlowOptions(choose_every=every, interval=interval, warm_up=warm_up)), 0
    for step in range(40):
        turn = calendar.next()
        if step < warm_up:
            assert turn.whole
            continue
        since += 1
        assert turn.choose == ((step - warm_up) % every == 0)
        assert turn.end == (since == interval or (step + 1 - warm_up) % every == 0)
        assert calendar.since == since
        if turn.end:
            calendar.ended()
            since = 0


def test_an_interval_without_a_length_ends_by_votes() -> None:
    calendar = Calendar(ZenFlowOptions(interval=0))
    turns = [calendar.next(voted=voted) for voted in (False, False, True, False)]
    assert [(turn.choose, turn.end) for turn in turns] == [(True, False), (False, False), (False, True), (False, False)]
    votes = Votes()
    assert not votes.add(chosen=10.0, total=11.0, steps=1, ratio=0.1)  # mean 10, rest 1/9
    assert votes.add(chosen=0.0, total=100.0, steps=2, ratio=0.1)  # mean 5, rest 100/9
    assert (votes.mean, votes.others) == (5.0, pytest.approx(101 / 9))


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 7), st.data())
def test_column_sums_of_any_cut(rows: int, columns: int, data: st.DataObject) -> None:
    matrix = torch.randn(rows, columns, dtype=torch.float64)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows * columns), max_size=3)))
    edges = [0, *cuts, rows * columns]
    parts = [columns_of(matrix.view(-1)[a:b], a, columns) for a, b in pairwise(edges)]
    torch.testing.assert_close(torch.stack(parts).sum(0), matrix.abs().sum(0))


def test_the_largest_columns_and_at_least_one() -> None:
    assert top_columns(torch.tensor([3.0, 9.0, 1.0, 7.0]), 0.5).tolist() == [1, 3]
    assert top_columns(torch.tensor([3.0, 9.0, 1.0]), 0.1).tolist() == [1]


def test_the_section() -> None:
    auto = ZenFlowConfig(update_interval=4)
    assert auto.importance() == ZenFlowOptions(0.1, 0, 4)
    assert auto.importance(7) == ZenFlowOptions(0.1, 7, 4)
    assert auto.importance(3) == ZenFlowOptions(0.1, 4, 4)
    told = ZenFlowConfig(topk_ratio=0.2, select_strategy="epoch", select_interval=2, full_warm_up_rounds=3)
    assert told.importance(7) == ZenFlowOptions(0.2, 14, 0, warm_up=3)
    assert ZenFlowConfig(select_strategy="step", select_interval=8, update_interval=2).importance(7).choose_every == 8
    overlapping = ZenFlowConfig(overlap_step=True, update_interval=4), ZenFlowConfig(overlap_step=True), auto
    assert [section.overlaps for section in overlapping] == [True, False, False]
    for section, match in (
        ({"select_interval": 3}, "select_strategy 'auto' with select_interval 3"),
        ({"select_strategy": "step"}, "select_strategy 'step' with select_interval 'auto'"),
        ({"select_strategy": "epoch", "select_interval": 1}, "without training_data"),
        ({"select_strategy": "step", "select_interval": 2, "update_interval": 4}, "within intervals of 4"),
    ):
        with pytest.raises(PlanError, match=match):
            ZenFlowConfig(**section).importance()  # type: ignore[arg-type]
