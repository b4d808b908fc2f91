"""The table of faults names tests that exist, and gives a reason where it names none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/developing/faults.md"


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if not line.startswith("| fault |")]


def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_it_names_exists() -> None:
    named = re.findall(r"`([^`\s]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 50
    lost = [
        f"{file}::{name}" for file, name in named if not (ROOT / file).is_file() or name not in names_in(ROOT / file)
    ]
    assert lost == []


def test_a_row_has_a_test_or_says_why_not() -> None:
    assert len(rows()) > 40
    assert [
        row for row in rows() if len(row) != 3 or ("::" not in row[1] and not re.search(r"open: \w+ \w+", row[2]))
    ] == []
