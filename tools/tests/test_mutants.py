"""Mutants are drawn alike, change what a module does, and are met by its tests."""

from __future__ import annotations

import mutants
import pytest

pytest.importorskip("cosmic_ray", reason="nox -s mutants installs it")


def test_every_module_and_its_tests_are_there() -> None:
    assert [name for name in mutants.MODULES if not mutants.path_of(name).is_file()] == []
    tests = [mutants.ROOT / "packages" / test for names in mutants.MODULES.values() for test in names.split()]
    assert [test for test in tests if not test.is_file()] == []


def test_mutants_are_drawn_alike_and_differ_in_what_they_do() -> None:
    found = mutants.drawn("ds_config.did_you_mean", 6, seed=3)
    assert found == mutants.drawn("ds_config.did_you_mean", 6, seed=3)
    assert found != mutants.drawn("ds_config.did_you_mean", 6, seed=4)
    text = mutants.path_of("ds_config.did_you_mean").read_text()
    assert len({mutant.source for mutant in found}) == len(found) == 6
    assert all(mutants._meaning(mutant.source) != mutants._meaning(text) for mutant in found)
    assert all(mutant.source.splitlines() != text.splitlines() and mutant.diff for mutant in found)


def test_annotations_and_docstrings_are_no_meaning() -> None:
    one = 'def f(x: int | None) -> "A":\n    "Says."\n    y: int = x\n    return y\n'
    other = 'def f(x: int + None) -> "B":\n    "Tells."\n    y: str = x\n    return y\n'
    assert mutants._meaning(one) == mutants._meaning(other) != mutants._meaning(one.replace("= x", "= -x"))


def test_a_fault_is_seen_and_the_module_as_it_is_passes() -> None:
    text = mutants.path_of("ds_config.sizes").read_text()
    assert mutants.tested("ds_config.sizes", text) == 0
    assert mutants.tested("ds_config.sizes", text.replace("return", "return None and")) != 0
