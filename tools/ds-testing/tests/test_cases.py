"""Of a function with many cases a drawn sample runs where one was asked for, and all of them otherwise."""

from __future__ import annotations

import pytest

BODY = """
import pytest

@pytest.mark.parametrize("case", range(30))
def test_many(case):
    pass

@pytest.mark.parametrize("case", range(4))
def test_few(case):
    pass
"""


@pytest.fixture
def passed(run_pytest, tmp_path):
    def run(*words: str) -> set[str]:
        return {name for name, (kind, _) in run_pytest(tmp_path, BODY, *words).items() if kind == "passed"}

    return run


def test_all_cases_run_unless_a_sample_was_asked_for(passed):
    assert len(passed()) == 34


def test_a_sample_has_some_of_many_and_all_of_few(passed, monkeypatch):
    first = passed("--cases=sample")
    assert len([name for name in first if name.startswith("test_many")]) == 4
    assert len([name for name in first if name.startswith("test_few")]) == 4
    assert passed("--cases=sample") == first
    monkeypatch.setenv("DS_CASES_SEED", "1")
    assert passed("--cases=sample") != first


def test_a_sample_has_less_of_long_files(run_pytest, tmp_path):
    (tmp_path / "few.txt").write_text("# long\n1 test_written.py\n")
    outcomes = run_pytest(tmp_path, BODY, "--cases=sample", settings="\nfew_cases = few.txt\n")
    assert sorted(name.partition("[")[0] for name in outcomes) == ["test_few", "test_many"]


def test_a_function_of_the_list_has_a_number_of_its_own(run_pytest, tmp_path):
    (tmp_path / "few.txt").write_text("1 test_written.py\n3 test_written.py::test_many\n")
    outcomes = run_pytest(tmp_path, BODY, "--cases=sample", settings="\nfew_cases = few.txt\n")
    names = [name.partition("[")[0] for name in outcomes]
    assert (names.count("test_many"), names.count("test_few")) == (3, 1)


def test_a_number_below_one_is_the_chance_that_a_function_runs(run_pytest, tmp_path, monkeypatch):
    body = "\n".join(f"def test_{number}():\n    pass\n" for number in range(40))
    (tmp_path / "few.txt").write_text("0.25 test_written.py\n1 test_written.py::test_0\n")
    draws = []
    for seed in ("0", "1"):
        monkeypatch.setenv("DS_CASES_SEED", seed)
        draws.append({*run_pytest(tmp_path, body, "--cases=sample", settings="\nfew_cases = few.txt\n")})
    assert all("test_0" in draw and 3 <= len(draw) <= 20 for draw in draws)
    assert draws[0] != draws[1]


def test_a_long_file_begins_first_where_files_run_side_by_side(run_pytest, tmp_path):
    pytest.importorskip("xdist")
    (tmp_path / "test_a.py").write_text("def test_a():\n    pass\n")
    (tmp_path / "long.txt").write_text("9 test_written.py\n")
    words = ("-n", "1", "--dist", "loadfile", "--no-loadscope-reorder", "test_a.py")
    outcomes = run_pytest(tmp_path, BODY, *words, settings="\nlong_files = long.txt\n")
    assert next(iter(outcomes)).startswith("test_many")
    assert list(outcomes)[-1] == "test_a"


def test_a_sample_draws_fewer_examples(run_pytest, tmp_path):
    body = """
from hypothesis import given, settings, strategies as st

count = []

@settings(max_examples=80)
@given(st.integers())
def test_drawn(number):
    count.append(number)

def test_how_many():
    assert len(count) == {expected}
"""
    for words, expected in (((), 80), (("--cases=sample",), 20)):
        outcomes = run_pytest(tmp_path, body.replace("{expected}", str(expected)), *words)
        assert outcomes["test_how_many"] == ("passed", "")


def test_a_sample_is_of_the_cases_that_were_selected(run_pytest, tmp_path):
    """It was drawn of all of them: of 5 cases by default and 195 in the nightly run the default run had none."""
    body = """
import pytest

@pytest.mark.parametrize("order", [*range(5), *(pytest.param(n, marks=pytest.mark.slow) for n in range(5, 200))])
def test_orders(order):
    pass
"""
    outcomes = run_pytest(tmp_path, body, "--cases=sample", "-m", "not slow", "-W", "ignore")
    assert sum(kind == "passed" for kind, _ in outcomes.values()) == 4
