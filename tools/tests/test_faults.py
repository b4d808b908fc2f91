"""The table of faults names tests that exist, and gives a reason where it names none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from repo import ROOT
from repo.imports import parse

PAGE = ROOT / "docs/developing/faults.md"


def rows() -> list[list[str]]:
    """Rows of faults and kinds. A table of what was read and found safe has no tests to name."""
    found, counts = list[list[str]](), False
    for line in PAGE.read_text().splitlines():
        if line.startswith(("| fault |", "| kind |", "| read |")):
            counts = not line.startswith("| read |")
        elif line.startswith("| ") and counts:
            found.append([cell.strip() for cell in line[1:-1].split("|")])
    return found


@cache
def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef)}


def test_every_test_it_names_exists() -> None:
    named = re.findall(r"`([^`\s]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 50
    lost = [
        f"{file}::{name}" for file, name in named if not (ROOT / file).is_file() or name not in names_in(ROOT / file)
    ]
    assert lost == []


def test_every_fault_of_the_trials_has_a_row() -> None:
    """Their numbers, as the reading has them: C10, C12, C13, D11 and D17 were never used."""
    numbers = [f"A{n}" for n in range(1, 8)] + [f"B{n}" for n in range(1, 11)]
    numbers += [f"C{n}" for n in (*range(1, 10), 11, 14)] + [f"D{n}" for n in range(1, 19) if n not in (11, 17)]
    numbers += [f"b{n:02}" for n in (1, 2, 4, *range(7, 16), 18, 19, 22, 23)]
    named = [cell.split(":")[0] for cell, *_ in rows()]
    assert [number for number in numbers if named.count(number) != 1] == []


def test_a_kind_says_where_it_was_looked_for() -> None:
    page = PAGE.read_text()
    kinds = page[page.index("## Kinds") :]
    found = [line for line in kinds.splitlines() if line.startswith("| ") and not line.startswith("| kind |")]
    assert len(found) >= 10
    assert [line for line in found if line.count(".py::") < 2] == []


def test_a_row_has_a_test_or_says_why_not() -> None:
    assert len(rows()) > 40
    assert [
        row for row in rows() if len(row) != 3 or ("::" not in row[1] and not re.search(r"open: \w+ \w+", row[2]))
    ] == []
