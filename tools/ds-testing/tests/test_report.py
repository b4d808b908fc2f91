"""The text of a failure, and the one outcome of several ranks, without any process."""

from __future__ import annotations

import pytest

from ds_testing import World, world
from ds_testing.protocol import Outcome, Report
from ds_testing.report import RankResult, render, verdict
from ds_testing.spec import ATTRIBUTE


def _passed() -> RankResult:
    return RankResult(Report(Outcome.PASSED, "", 1.0))


def _failed(text: str, when: float) -> RankResult:
    return RankResult(Report(Outcome.FAILED, text, when))


def test_failures_are_ordered_by_time_and_deaths_come_first():
    results = {0: _failed("late", 9.0), 1: _failed("early", 2.0), 2: RankResult(died="killed by SIGSEGV"), 3: _passed()}
    text = render(results, deadline_s=None)
    assert text.startswith("3 of 4 ranks failed, rank 2 first")
    assert text.index("SIGSEGV") < text.index("early") < text.index("late")
    assert "rank 3/4" not in text


def test_output_is_shown_for_every_rank_that_wrote():
    results = {0: _failed("boom", 1.0), 1: RankResult(Report(Outcome.PASSED, "", 0.0), output="hello\n")}
    assert "rank 1/2: captured output" in render(results, deadline_s=None)
    assert "rank 0/2: captured output" not in render(results, deadline_s=None)


def test_deadline_names_who_did_not_finish():
    results = {0: _passed(), 1: RankResult(stacks="File x"), 2: RankResult(stacks="File y")}
    text = render(results, deadline_s=5)
    assert text.startswith("the deadline of 5 s passed: ranks 1, 2 did not finish")
    assert "File x" in text


@pytest.mark.parametrize(
    ("results", "outcome", "reason"),
    [
        ([_passed(), _passed()], Outcome.PASSED, ""),
        ([RankResult(Report(Outcome.SKIPPED, "why", 0.0))] * 2, Outcome.SKIPPED, "why"),
        ([RankResult(Report(Outcome.SKIPPED, "why", 0.0)), _passed()], Outcome.FAILED, ""),
        ([RankResult(Report(Outcome.PASSED, "", 0.0), leaks=("a thread",)), _passed()], Outcome.FAILED, ""),
        ([RankResult(), _passed()], Outcome.FAILED, ""),
    ],
)
def test_verdict(results, outcome, reason):
    assert verdict(dict(enumerate(results))) == (outcome, reason)


def test_world_marks_the_function_and_returns_it():
    def body():
        pass

    assert world(3, timeout=5)(body) is body
    assert getattr(body, ATTRIBUTE) == World(3, "gloo", 5)


@pytest.mark.parametrize("size", [0, 5, True, "2"])
def test_a_wrong_size_is_refused(size):
    with pytest.raises(ValueError, match="1 to 4 ranks"):
        world(size)


def test_a_wrong_timeout_is_refused():
    with pytest.raises(ValueError, match="positive timeout"):
        world(2, timeout=0)
