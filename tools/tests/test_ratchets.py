"""Growth is agreed to, by updating a file in the same change."""

from __future__ import annotations

import ast
import json

import pytest

from repo.imports import modules
from repo.ratchets import RATCHETS, code_lines, compare, longest, most_code_lines

COUNTED = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


@pytest.mark.parametrize("name", list(RATCHETS))
def test_agreed(name):
    found = compare(RATCHETS[name])
    assert found == [], f"say why in the commit, and run: python tools/ratchets/update.py {name}"


def test_sizes_may_shrink_but_not_grow():
    differences = RATCHETS["sizes"].differences
    agreed = {"modules": {"a": 100, "b": 50}}
    assert differences(agreed, {"modules": {"a": 90, "b": 50, "c": 50}}) == []
    assert differences(agreed, {"modules": {"a": 101, "b": 50}}) == ["modules: a has 101, agreed 100"]
    assert differences(agreed, {"modules": {"c": 51}}) == ["modules: c has 51, agreed 50"]


def test_names_must_be_equal():
    differences = RATCHETS["config_keys"].differences
    assert differences(["a", "b"], ["b", "c"]) == ["gone: a", "new: c"]


def test_files_are_stable():
    """Written in a fixed form, so that a diff shows only what changed."""
    for ratchet in RATCHETS.values():
        text = ratchet.file.read_text()
        assert text == json.dumps(json.loads(text), indent=1) + "\n"


def test_the_bound_of_code_lines_is_one(projects):
    """The ten longest are looked for among what the bound leaves."""
    nodes = [node for module in modules(projects["ds-config"]) for node in module.nodes if isinstance(node, COUNTED)]
    assert len(nodes) > 100
    assert [node for node in nodes if code_lines(node) > most_code_lines(node)] == []


def test_the_longest_are_the_same_as_without_the_bound():
    short, long = (ast.parse("def f(): ...\n" * count).body for count in (1, 30))
    nodes = {f"m{i}": ast.Module([*short, *long[:i]], []) for i in range(30)}
    assert longest(nodes) == {f"m{i}": code_lines(nodes[f"m{i}"]) for i in range(29, 19, -1)}
