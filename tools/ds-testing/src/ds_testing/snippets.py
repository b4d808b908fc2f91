"""The Python blocks of a README, run as a reader would: one after the other, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["run_snippets"]


def run_snippets(page: Path) -> list[str]:
    """Run the blocks ```` ```python ```` of `page` in this process, and return them. What one defines the later ones see.

    Raises:
        ValueError: the page has none.
    """
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    if not blocks:
        raise ValueError(f"{page} has no block of Python")
    names: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, page.name, "exec", dont_inherit=True), names)
    return blocks
