"""Growth is agreed to, by updating a file in the same change."""

from __future__ import annotations

import json

import pytest

from repo.ratchets import RATCHETS, compare


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
