"""docs/reference/errors.md: made of the files of each package, and equal to the codes that the packages raise."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from repo import ROOT
from repo.imports import modules
from repo.projects import Project

__all__ = ["PAGE", "Codes", "codes", "page", "parts", "sections"]

PAGE = ROOT / "docs" / "reference" / "errors.md"
PARTS = ROOT / "docs" / "reference" / "errors.d"
# Packages in the order in which people meet their errors; a file `ops-io.md` belongs to `ops`.
_ORDER = ("config", "engine", "zero", "ckpt", "comm", "launcher", "data", "parallel", "pipe", "moe", "inference")

_HEAD = """# Errors

<!-- Made by `python tools/pages.py errors` from docs/reference/errors.d/. Edit the files there. -->

Every error of a ds package says what was asked, what was found and what to do, and ends with a code. Search this page for the code, or print its
section with `ds explain CODE`. Below, codes are in sections by package. The class tells who must act:

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
    """Code -> text of its section, from a file (headings `## code`) or the page (`### code` below `## Errors of ...`)."""
    parts = re.split(r"^#{2,3} +(\S+) *$", text, flags=re.MULTILINE)
    bodies = (re.split(r"^## ", body, flags=re.MULTILINE)[0] for body in parts[2::2])
    return {code: body.strip() for code, body in zip(parts[1::2], bodies, strict=True)}


def parts(folder: Path = PARTS) -> list[Path]:
    """The files that the page is made of, by name."""
    return sorted(folder.glob("*.md"))


def page(folder: Path = PARTS) -> str:
    """The whole page: packages in the order in which people meet them, codes as their file orders them.

    Raises:
        ValueError: two files explain the same code.
    """
    files = sorted(parts(folder), key=lambda file: (_rank(file), file.stem))
    names = list(dict.fromkeys(_package(file) for file in files))
    links = ", ".join(f"[{_title(name)}](#{_anchor(name)})" for name in names)
    text, seen, last = f"{_HEAD}\n{links}.\n", dict[str, str](), ""
    for file in files:
        if _package(file) != last:
            last = _package(file)
            text += f"\n## Errors of {_title(last)}\n"
        for code, body in sections(file.read_text()).items():
            if code in seen:
                raise ValueError(f"{file.name} and {seen[code]} both explain {code}")
            seen[code] = file.name
            text += f"\n### {code}\n\n{body}\n"
    return text


def _package(file: Path) -> str:
    return file.stem.split("-")[0]


def _rank(file: Path) -> tuple[int, str]:
    name = _package(file)
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def _title(name: str) -> str:
    return "deepspeed" if name == "compat" else f"ds-{name}"


def _anchor(name: str) -> str:
    return f"errors-of-{_title(name)}"


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes in the source: `raised` by a `code="..."` argument or a row of a `refusals.toml` (with a place), and every string there is."""

    raised: Mapping[str, str]
    strings: frozenset[str]


def codes(projects: Iterable[Project]) -> Codes:
    """Read the codes of all packages. A code counts as raised where it is the keyword `code` of any call, or in a table of refusals."""
    raised: dict[str, str] = {}
    strings: set[str] = set()
    for project in projects:
        for table in project.source.rglob("refusals.toml"):
            for name, row in tomllib.loads(table.read_text()).items():
                raised.setdefault(row["code"], f"{table.name}:{name}")
                strings.add(row["code"])
        for module in modules(project):
            for node in module.nodes:
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    strings.add(node.value)
                if not isinstance(node, ast.Call):
                    continue
                for keyword in node.keywords:
                    if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                        raised.setdefault(str(keyword.value.value), f"{module.path.name}:{node.lineno}")
    return Codes(raised, frozenset(strings))
