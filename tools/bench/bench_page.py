"""How pages show records: tables in Markdown, put between marks of a page whose own text is left alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

_RULES = {"l": "---", "r": "---:"}


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "") -> str:
    """Return rows of texts below their heads. `align`: l or r for each column, or one for all; else all but the first stand to the right."""
    columns = align * len(head) if len(align) == 1 else align or "l" + "r" * (len(head) - 1)
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(_RULES[column] for column in columns)}|", *lines[1:]]) + "\n"


def fenced(begin: str, end: str) -> re.Pattern[str]:
    """Match what stands between two comments; the first and the last group are the comments with their lines."""
    return re.compile(rf"(<!-- {begin} -->\n).*?(<!-- {end} -->)", re.DOTALL)


def filled(page: str, begin: str, end: str, text: str) -> str:
    """Return a page with `text` between its two comments."""
    return fenced(re.escape(begin), re.escape(end)).sub(lambda match: match[1] + text + match[2], page)
