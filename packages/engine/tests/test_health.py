"""What a run does when its numbers go wrong: the pure part."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ds_engine
from ds_config.errors import TrainingError
from ds_engine.health import LONGEST_RUN, LossTrend, Seen, finding_text, skips_after


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=90))
def test_the_trend_is_mean_and_variance_until_its_window_is_full(losses: list[float]) -> None:
    trend = LossTrend()
    for loss in losses:
        trend = trend.after(loss)
    mean = sum(losses) / len(losses)
    assert trend.mean == pytest.approx(mean, abs=1e-6)
    assert trend.variance == pytest.approx(sum((x - mean) ** 2 for x in losses) / len(losses), rel=1e-6, abs=1e-6)


def test_a_loss_that_is_not_finite_leaves_the_trend() -> None:
    trend = LossTrend(mean=1.0, variance=0.04, steps=50)
    assert trend.after(math.nan) == trend.after(math.inf) == trend
    assert trend.deviations(3.0) == pytest.approx(10.0)
    assert trend.deviations(math.nan) == 0.0
    assert LossTrend(mean=1.0, variance=0.04, steps=19).deviations(3.0) == 0.0


def test_a_run_of_skipped_steps_ends() -> None:
    skips = 0
    for _ in range(LONGEST_RUN - 1):
        skips = skips_after(skips, True)
    assert skips_after(skips, False) == 0
    with pytest.raises(TrainingError, match=f"{LONGEST_RUN} steps in a row") as error:
        skips_after(skips, True)
    assert error.value.code == "training-skips"


def test_a_finding_names_all_that_is_known() -> None:
    seen = [Seen(0), Seen(3, (1,), (7, 90), "blocks.2: output in forward")]
    text = finding_text(12, "blocks.0.weight", seen, "skip")
    for word in (
        "step 12",
        "left out",
        "rank 3",
        "microbatch 1",
        "samples 7, 90",
        "blocks.2: output",
        "blocks.0.weight",
    ):
        assert word in text
    assert "rank 0" not in text


def test_a_finding_without_a_bad_loss_says_so() -> None:
    assert "began in a backward" in finding_text(1, "a.weight", [Seen(0), Seen(1)], "stop")


def test_inputs_that_are_kept_keep_no_graph() -> None:
    """A critic is given what a generator made: its activations go with the loss, not with the next step."""
    maker, config = nn.Linear(4, 4), {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = ds_engine.initialize(model=nn.Linear(4, 4), config=config)
    made = maker(torch.ones(2, 4))
    gone = weakref.ref(made)
    engine(made).sum().backward()
    del made
    gc.collect()
    assert gone() is None
    engine.close()
