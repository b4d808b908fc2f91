"""The commands of `ds`: entry points of the group `ds.commands`, found and described without importing any of them.

An entry point's value is a module with `HELP` (a string literal), `register(parser)` and `main(args) -> int`. Importing it may
cost seconds (torch), and a broken package must not break `ds --help`; so the one line of help is read out of the module's
source: the literal that is assigned to HELP at the top level. A module whose source cannot be found is listed without help.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

__all__ = ["GROUP", "commands", "help_line", "source_file"]

GROUP = "ds.commands"
_ASSIGNED = re.compile(r"^HELP\s*(?::\s*[^=\n]+)?=\s*", re.MULTILINE)


def commands() -> dict[str, EntryPoint]:
    """Installed commands by name, sorted. Reads metadata only."""
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)}


def source_file(module: str) -> Path | None:
    """The file a module's source is in, found without importing its packages."""
    path: Sequence[str] | None = None
    for name in (parts := module.split("."))[:-1]:
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.submodule_search_locations is None:
            return None
        path = list(spec.submodule_search_locations)
    # Asked by the last part only: with a path given, that is what the finder looks for.
    spec = PathFinder.find_spec(parts[-1], path)
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None


def help_line(module: str) -> str:
    """The literal assigned to HELP in the module's source; empty when there is none."""
    file = source_file(module)
    if file is None:
        return ""
    text = file.read_text(encoding="utf-8")
    match = _ASSIGNED.search(text)
    if match is None:
        return ""
    literal = _first_expression(text[match.end() :])
    return literal if isinstance(literal, str) else ""


def _first_expression(text: str) -> object:
    """Value of the literal that `text` begins with; None when it begins with none. Parses no more lines than it has."""
    lines = text.splitlines()
    for count in range(1, min(len(lines), 12) + 1):
        try:
            return ast.literal_eval("\n".join(lines[:count]))
        except (SyntaxError, ValueError):
            continue
    return None
