"""Every way a world test can end, seen from outside: one pytest run over scenarios.py.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

PASS = [
    "test_sum",
    "test_one_runs_in_a_worker",
    "test_arguments[point0-a]",
    "test_arguments[point1-b]",
    "test_method",
    "test_seed_and_threads[0]",
    "test_seed_and_threads[1]",
    "test_own_group",
    "test_hidden_output",
    "test_monkeypatch[0]",
    "test_monkeypatch[1]",
    "test_after_settings",
    "test_after_everything",
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, run_pytest):
    return run_pytest(tmp_path_factory.mktemp("scenarios"), Path(__file__).with_name("scenarios.py.txt").read_text())


@pytest.mark.parametrize("name", PASS)
def test_passes(outcomes, name):
    assert outcomes[name] == ("passed", "")


def test_assertion_names_the_first_rank_and_its_values(outcomes):
    kind, text = outcomes["test_assertion"]
    assert kind == "failure"
    assert "rank 1 first" in text
    assert text.index("rank 1/2: failed") < text.index("rank 0/2: failed")
    assert "assert (1 + 1) == 3" in text
    assert "worker.py" not in text.split("rank 0/2")[0], "frames of the harness are not shown"
    assert "printed by 0" in text
    assert "printed by 1" in text


def test_skip_and_xfail(outcomes):
    assert outcomes["test_skip"][0] == "skipped"
    assert "not here" in outcomes["test_skip"][1]
    assert outcomes["test_xfail"][0] == "skipped"
    assert "known" in outcomes["test_xfail"][1]


def test_ranks_that_disagree_fail(outcomes):
    kind, text = outcomes["test_disagree"]
    assert kind == "failure"
    assert "rank 0 skipped; rank 1 passed" in text


def test_a_fixture_that_patches_another_process_is_refused(outcomes):
    kind, text = outcomes["test_patched_elsewhere"]
    assert kind == "failure"
    assert "patches pytest's own process" in text


def test_an_argument_that_does_not_pickle_is_named(outcomes):
    kind, text = outcomes["test_unpicklable"]
    assert kind == "failure"
    assert "'request' (TopRequest) cannot be sent" in text


def test_leaks_are_named(outcomes):
    text = outcomes["test_leaves_settings"][1]
    assert "LEFT_BEHIND was None, is '1'" in text
    assert "directory was" in text
    assert "dtype was torch.float32, is torch.float64" in text
    text = outcomes["test_leaves_group_thread_and_child"][1]
    assert "a process group outlives" in text
    assert "threads still run: left-thread" in text
    assert "child processes still run" in text


def test_a_killed_rank_is_reported_first(outcomes):
    kind, text = outcomes["test_killed"]
    assert kind == "failure"
    assert "rank 1/2: the process died (killed by SIGKILL)" in text
    assert text.index("rank 1/2") < text.index("rank 0/2")


def test_deadline_shows_where_the_rank_waits(outcomes):
    kind, text = outcomes["test_deadline"]
    assert kind == "failure"
    assert "the deadline of 2 s passed: rank 0 did not finish" in text
    assert "in waits_for_nobody" in text
    assert "watch_parent" not in text


def test_a_failure_does_not_wait_for_the_deadline(outcomes):
    kind, text = outcomes["test_one_fails_the_other_is_stuck"]
    assert kind == "failure"
    assert "ValueError: gave up" in text
    assert "rank 1/2: did not answer; its stacks" in text
    assert "deadline" not in text


SET_BY_A_FIXTURE = """
import os
import pytest
from ds_testing import world

@pytest.fixture(autouse=True)
def forced():
    os.environ["FORCED"] = "1"
    yield
    del os.environ["FORCED"]

@world(2)
def test_of_ranks():
    assert "FORCED" not in os.environ
"""


def test_ranks_have_the_environment_that_pytest_began_with(run_pytest, tmp_path):
    """They outlive the test that starts them: what it had set stayed with the tests after it."""
    assert run_pytest(tmp_path, SET_BY_A_FIXTURE)["test_of_ranks"][0] == "passed"
