"""layers.toml, as contracts for import-linter; and circles of imports inside a package."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from repo import ROOT
from repo.imports import imports, modules
from repo.projects import Project

__all__ = ["Layers", "circle", "contracts", "folder_circles", "named_upward", "read"]

Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Layers:
    """The table of layers.toml; rows are lowest first."""

    packages: Rows
    without_torch: tuple[str, ...]


def read(path: Path = ROOT / "tools" / "layers.toml") -> Layers:
    data = tomllib.loads(path.read_text())
    return Layers(
        packages=_rows(data["packages"]["order"]),
        without_torch=tuple(data["packages"]["without_torch"]),
    )


def _rows(rows: Iterable[Iterable[str]]) -> Rows:
    return tuple(tuple(row) for row in rows)


def contracts(layers: Layers, projects: Mapping[str, Project]) -> str:
    """The configuration of import-linter: one contract between packages."""
    modules_of = {project.folder.name: project.module for project in projects.values()}
    between = [[modules_of[name] for name in row if name in modules_of] for row in layers.packages]
    lines = [
        "[importlinter]",
        "root_packages =",
        *(f"    {name}" for name in sorted(modules_of.values())),
        "exclude_type_checking_imports = False",
        "",
        "[importlinter:contract:packages]",
        "name = Packages import only lower packages",
        "type = layers",
        "layers =",
        *(f"    {' | '.join(row)}" for row in reversed([row for row in between if row])),
    ]
    return "\n".join(lines) + "\n"


def circle(project: Project) -> list[str]:
    """Modules of a package that import each other in a circle, in its order; empty when there is none.

    A package's own `__init__` does not count: it gathers names and imports all others. Imports for annotations alone do.
    """
    found = {module.name: module for module in modules(project)}
    needs: dict[str, set[str]] = {}
    for name, module in found.items():
        direct = {found_import.target for found_import in imports(module)}
        needs[name] = {target for target in direct if target in found and target not in (name, project.module)}
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for target in sorted(needs[name]):
            if around := walk(target, [*path, name]):
                return around
        done.add(name)
        return []

    for name in sorted(needs):
        if name != project.module and (around := walk(name, [])):
            return around
    return []


def folder_circles(project: Project) -> list[str]:
    """Folders of a package (and the modules beside them) that import each other in a circle: "a <-> b", one line a pair."""
    found = {module.name: module for module in modules(project)}

    def folder(name: str) -> str:
        return name.removeprefix(f"{project.module}.").partition(".")[0]

    needs: dict[str, set[str]] = {}
    for name, module in found.items():
        targets = {one.target for one in imports(module)} & found.keys() - {project.module}
        needs.setdefault(folder(name), set()).update(folder(target) for target in targets)
    return sorted(f"{a} <-> {b}" for a in needs for b in needs[a] if a < b and a in needs.get(b, ()))


_MODULE_NAME = re.compile(r"ds_\w+(\.\w+)+")


def named_upward(layers: Layers, projects: Mapping[str, Project]) -> list[str]:
    """Strings that name a module of a package that the file may not import: circles that `import_module` would hide."""
    level = {name: number for number, row in enumerate(layers.packages) for name in row}
    owner = {module.name: p for p in projects.values() for module in modules(p)}
    found = []
    for project in projects.values():
        for module in modules(project):
            for node in module.nodes:
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
                target = owner.get(text) if _MODULE_NAME.fullmatch(text) else None
                if target is None or target is project or not isinstance(node, ast.Constant):
                    continue
                if level[target.folder.name] >= level[project.folder.name]:
                    found.append(f"{module.name}:{node.lineno} names {text}")
    return found
