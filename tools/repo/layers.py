"""layers.toml, as contracts for import-linter, and as an order derived from the imports of a package."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from repo import ROOT
from repo.imports import imports, modules
from repo.projects import Project

__all__ = ["Layers", "contracts", "listed_files", "read", "suggest"]

Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Layers:
    """The two tables of layers.toml; rows are lowest first."""

    packages: Rows
    without_torch: tuple[str, ...]
    files: Mapping[str, Rows]


def read(path: Path = ROOT / "tools" / "layers.toml") -> Layers:
    data = tomllib.loads(path.read_text())
    return Layers(
        packages=_rows(data["packages"]["order"]),
        without_torch=tuple(data["packages"]["without_torch"]),
        files={name: _rows(rows) for name, rows in data["files"].items()},
    )


def _rows(rows: Iterable[Iterable[str]]) -> Rows:
    return tuple(tuple(row) for row in rows)


def listed_files(project: Project) -> list[str]:
    """The names a package's table must list: its modules and folders, without __init__ and the command line."""
    names = {path.stem if path.is_file() else path.name for path in project.source.iterdir()}
    python = {path.relative_to(project.source).parts[0].removesuffix(".py") for path in project.source.rglob("*.py")}
    return sorted(
        name for name in names & python if name not in ("__init__", "__main__") and not name.startswith("cli")
    )


def contracts(layers: Layers, projects: Mapping[str, Project]) -> str:
    """The configuration of import-linter: one contract between packages, one inside each."""
    modules_of = {project.folder.name: project.module for project in projects.values()}
    between = [[modules_of[name] for name in row if name in modules_of] for row in layers.packages]
    parts = [
        "[importlinter]",
        "root_packages =",
        *(f"    {name}" for name in sorted(modules_of.values())),
        "exclude_type_checking_imports = False",
        *_contract("packages", "Packages import only lower packages", [row for row in between if row]),
    ]
    for name, rows in layers.files.items():
        if module := modules_of.get(name):
            parts += _contract(name, f"Files inside {module}", [[f"{module}.{file}" for file in row] for row in rows])
    return "\n".join(parts) + "\n"


def _contract(identity: str, title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    head = ["", f"[importlinter:contract:{identity}]", f"name = {title}", "type = layers", "layers ="]
    return head + [f"    {' | '.join(row)}" for row in reversed(rows)]


def suggest(project: Project) -> list[list[str]]:
    """An order of a package's files that fits their imports: each file as low as it can stand.

    Raises:
        ValueError: the files import each other in a circle, so there is no order.
    """
    names = listed_files(project)
    needs: dict[str, set[str]] = {name: set() for name in names}
    for module in modules(project):
        own = module.name.split(".")[1:2]
        for found in imports(module):
            target = found.target.split(".")
            if own and own[0] in needs and target[0] == project.module and len(target) > 1 and target[1] in needs:
                needs[own[0]].add(target[1])
    rows: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(names):
        row = [name for name in names if name not in placed and needs[name] - {name} <= placed]
        if not row:
            stuck = sorted(set(names) - placed)
            raise ValueError(f"{project.name}: these files import each other in a circle: {', '.join(stuck)}")
        rows.append(row)
        placed |= set(row)
    return rows
