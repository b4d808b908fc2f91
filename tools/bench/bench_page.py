"""How pages show records: tables in Markdown, put between marks of a page whose own text is left alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def record_of(name: str) -> dict[str, Any]:
    """Return what a benchmark wrote last; empty where it was never run."""
    path = PAGES / "data" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Return rows of texts below their heads; all columns but the first stand to the right if they are `numbers`."""
    rule = ["---", *["---:" if numbers else "---"] * (len(head) - 1)]
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]]) + "\n"


def fenced(begin: str, end: str) -> re.Pattern[str]:
    """Match what stands between two comments; the first and the last group are the comments with their lines."""
    return re.compile(rf"(<!-- {begin} -->\n).*?(<!-- {end} -->)", re.DOTALL)


def filled(page: str, begin: str, end: str, text: str) -> str:
    """Return a page with `text` between its two comments."""
    return fenced(re.escape(begin), re.escape(end)).sub(lambda match: match[1] + text + match[2], page)
