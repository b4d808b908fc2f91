"""The table of refusals: every row is raised somewhere with as many values as its texts show, and every name has a row."""

from __future__ import annotations

import ast
import string
from pathlib import Path

import pytest
from deepspeed._ours.base import raising

SOURCES = Path(raising.__file__).parents[1]


def raised() -> dict[str, int]:
    """Return how many values each refusal of the source is given."""
    calls = (
        node
        for file in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "refused"
    )
    return {call.args[0].value: len(call.args) - 1 for call in calls if isinstance(call.args[0], ast.Constant)}


def test_every_row_is_raised_and_every_name_has_a_row():
    assert raised().keys() == raising._rows().keys()


@pytest.mark.parametrize("name", sorted(raising._rows()))
def test_texts_show_the_values_that_are_given(name):
    row = raising._rows()[name]
    fields = {
        int(field) for text in (row["what"], row["fix"]) for _, field, *_ in string.Formatter().parse(text) if field
    }
    assert fields == set(range(raised()[name]))


def test_an_error_is_what_upstream_raises_too():
    error = raising.refused("writer-rank", 3, 2)
    assert isinstance(error, ValueError)
    assert error.code == "compat-argument"
    assert error.message == "writer_rank 3 of 2 writers"
