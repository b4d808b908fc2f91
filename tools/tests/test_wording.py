"""The words of the code: what stands in wording.json holds, the page "where is it" names what exists, renames.csv is true."""

from __future__ import annotations

import ast
import csv
import json
import re

import pytest

from repo import ROOT
from repo.imports import modules
from repo.projects import Project, load
from repo.ratchets import RATCHETS
from repo.wording import begins_with_verb, forbidden_names, stale_entries

PAGE = ROOT / "docs" / "developing" / "where-is-it.md"
RENAMES = ROOT / "tools" / "repo" / "renames.csv"


def test_a_docstring_begins_with_a_verb() -> None:
    assert begins_with_verb("Free all gathered units except persistent ones.")
    assert begins_with_verb("Returns the rank.")
    assert begins_with_verb("Whether the group has one rank.")
    assert not begins_with_verb("Nothing is in use but what is sticky.")
    assert not begins_with_verb("It is over.")


def test_long_lived_riddles_are_seen() -> None:
    long = "def f(told):\n    found = 1\n" + "    x = 0\n" * 12 + "    return found\n"
    (function,) = ast.parse(long).body
    assert isinstance(function, ast.FunctionDef)
    assert sorted(forbidden_names(function)) == ["found", "told"]
    (short,) = ast.parse("def f():\n    found = 1\n    return found\n").body
    assert isinstance(short, ast.FunctionDef)
    assert list(forbidden_names(short)) == []


def test_what_the_words_have_reached() -> None:
    numbers = json.loads(RATCHETS["wording"].file.read_text())  # what test_ratchets.py finds to be so
    assert numbers["class names of several classes"] <= 25
    assert numbers["module names of several modules"] <= 30
    assert numbers["docstrings without a verb, percent"] <= 20
    assert numbers["names in backticks that do not resolve"] == 0


def test_sections_of_docstrings_explain_what_is_there() -> None:
    text = '''def f(a, *rest, **options):
        """Do it.

        Args:
            a, rest: Numbers.
            options: More.
            gone: Was one.
        """'''
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    assert stale_entries(function) == ["gone"]
    stale = [
        f"{module.name}.{node.name}: {', '.join(names)}"
        for project in load().values()
        for module in modules(project)
        for node in module.nodes
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (names := stale_entries(node))
    ]
    assert stale == []


def _rows() -> list[tuple[str, str, str]]:
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE)
    return [(question.strip(), file, name) for question, file, name in rows]


def test_the_page_answers_twenty_questions() -> None:
    assert len(_rows()) >= 20


@pytest.mark.parametrize(("question", "file", "name"), _rows())
def test_the_page_names_what_exists(question: str, file: str, name: str) -> None:
    body: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    for part in name.split("."):
        (node,) = (node for node in body if part in _names(node))
        body = node.body if isinstance(node, ast.ClassDef) else []


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign | ast.Assign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {target.id for target in targets if isinstance(target, ast.Name)}
    return set()


def test_the_table_of_renames_leads_to_modules_that_exist() -> None:
    known = {module.name for project in load().values() for module in modules(project)}
    with RENAMES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 400
    assert {row["new"].split(":")[0] for row in rows} <= known
    assert all(row["old"] != row["new"] for row in rows)


_TABLE = re.compile(r"^\| module \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", re.MULTILINE)


def test_the_modules_that_a_readme_explains_exist(project: Project) -> None:
    text = (project.folder / "README.md").read_text()
    rows = [row for table in _TABLE.finditer(text) for row in table[1].splitlines()]
    named = [name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])]
    there = {module.name for module in modules(project)}
    # ds-zero's table names files, and has a test of its own
    assert [name for name in named if not name.endswith(".py") and f"{project.module}.{name}" not in there] == []
