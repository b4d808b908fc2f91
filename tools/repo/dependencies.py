"""Declared dependencies against imports, both ways, and sibling ranges against the versions in the tree."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.requirements import Requirement

from repo.imports import Import, imports, modules
from repo.projects import Project, requirement_name

__all__ = ["Usage", "changelog_version", "problems", "range_problems", "torch_at_load", "usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a package's source needs.

    Attributes:
        imported: Distribution name -> one import statement that needs it.
        named: String constants of the source; a program that is run, not imported, is named by one.
    """

    imported: Mapping[str, Import]
    named: frozenset[str]


def usage(project: Project, projects: Mapping[str, Project]) -> Usage:
    """Read all of a package's source."""
    ours = {other.module: other.name for other in projects.values()}
    imported: dict[str, Import] = {}
    named: set[str] = set()
    for module in modules(project):
        for found in imports(module):
            if found.top != project.module and found.top not in sys.stdlib_module_names:
                imported.setdefault(_distribution(found.top, ours), found)
        named |= {n.value for n in ast.walk(module.tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return Usage(imported, frozenset(named))


def problems(project: Project, projects: Mapping[str, Project]) -> list[str]:
    """One line for each import that is not declared and each declaration that nothing needs."""
    needed = usage(project, projects)
    required = {requirement_name(requirement) for requirement in project.dependencies}
    optional = {requirement_name(requirement) for extra in project.extras.values() for requirement in extra}
    found = [
        f"{where.path.name}:{where.line} imports {name}, which pyproject.toml does not declare"
        for name, where in sorted(needed.imported.items())
        if name not in required | optional
    ]
    for name in sorted(required - needed.imported.keys()):
        found.append(f"pyproject.toml declares {name}, which no file imports")
    for name in sorted(optional - needed.imported.keys() - needed.named):
        found.append(f"an extra declares {name}, which no file imports or runs")
    return found


def range_problems(project: Project, projects: Mapping[str, Project]) -> list[str]:
    """One line for each sibling requirement that is not a range, or that the tree's own version does not satisfy."""
    found = []
    for text in (*project.dependencies, *(req for extra in project.extras.values() for req in extra)):
        requirement = Requirement(text)
        sibling = projects.get(requirement_name(text))
        if sibling is None:
            continue
        operators = {specifier.operator for specifier in requirement.specifier}
        if operators != {">=", "<"}:
            found.append(f"{text}: say which versions of {sibling.name} fit, as >=lowest,<first-that-does-not")
        if not requirement.specifier.contains(sibling.version, prereleases=True):
            found.append(f"{text}: the tree has {sibling.name} {sibling.version}")
    return found


def changelog_version(project: Project) -> str:
    """The version of the first section of CHANGELOG.md; empty when there is none."""
    match = re.search(r"^## (\S+)", (project.folder / "CHANGELOG.md").read_text(), re.MULTILINE)
    return match[1] if match else ""


def torch_at_load(project: Project) -> list[str]:
    """One line for each statement that imports torch when its module is imported."""
    return [
        f"{found.path.name}:{found.line} imports {found.target}"
        for module in modules(project)
        for found in imports(module)
        if found.top == "torch" and not found.deferred and not found.typing_only
    ]


def _distribution(top: str, ours: Mapping[str, str]) -> str:
    if top in ours:
        return ours[top]
    known = importlib.metadata.packages_distributions().get(top, [top])
    return requirement_name(known[0])
