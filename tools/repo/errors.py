"""docs/reference/errors.md: made of one file a package, and equal to the codes that the packages raise."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from repo import ROOT
from repo.imports import modules
from repo.projects import Project

__all__ = ["PAGE", "Codes", "codes", "page", "parts", "sections"]

PAGE = ROOT / "docs" / "reference" / "errors.md"
PARTS = ROOT / "docs" / "reference" / "errors.d"

_HEAD = """# Errors

<!-- Made by `python tools/pages.py errors` from docs/reference/errors.d/. Edit the files there. -->

Every error of a ds package says what was asked, what was found, what to do, and names a section of this page.
The class tells who must act:

| class | who must act |
|---|---|
| `ConfigError` | who wrote the configuration, or a file it names |
| `PlanError` | who chose model, configuration and world size together |
| `LaunchError` | who starts the processes |
| `CommError` | who runs the ranks: they disagree, or one did not come |
| `ShardedAccessError` | who wrote the model code that reads a parameter |
| `KernelError` | who called a native operation |
| `CheckpointError` | who keeps the checkpoint files |
| `UnsupportedError` | nobody: it does not exist here; the message says what to use |
"""


def sections(text: str) -> dict[str, str]:
    """Code -> text of its section, from a page with one `## code` heading each."""
    parts = re.split(r"^## +(\S+) *$", text, flags=re.MULTILINE)
    return {code: body.strip() for code, body in zip(parts[1::2], parts[2::2], strict=True)}


def parts(folder: Path = PARTS) -> list[Path]:
    """The files that the page is made of, by name."""
    return sorted(folder.glob("*.md"))


def page(folder: Path = PARTS) -> str:
    """The whole page: packages in alphabetical order, codes as their file orders them.

    Raises:
        ValueError: two files explain the same code.
    """
    text, seen = _HEAD, dict[str, str]()
    for file in parts(folder):
        found = sections(file.read_text())
        for code, body in found.items():
            if code in seen:
                raise ValueError(f"{file.name} and {seen[code]} both explain {code}")
            seen[code] = file.name
            text += f"\n## {code}\n\n{body}\n"
    return text


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes in the source: `raised` by a `code="..."` argument (with a place), and every string there is."""

    raised: Mapping[str, str]
    strings: frozenset[str]


def codes(projects: Iterable[Project]) -> Codes:
    """Read the codes of all packages. A code counts as raised where it is the keyword `code` of any call."""
    raised: dict[str, str] = {}
    strings: set[str] = set()
    for project in projects:
        for module in modules(project):
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    strings.add(node.value)
                if not isinstance(node, ast.Call):
                    continue
                for keyword in node.keywords:
                    if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                        raised.setdefault(str(keyword.value.value), f"{module.path.name}:{node.lineno}")
    return Codes(raised, frozenset(strings))
