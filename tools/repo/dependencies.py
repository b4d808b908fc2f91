"""Declared dependencies against imports, both ways, and sibling ranges against the versions in the tree."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from repo.imports import Import, imports, modules, test_modules
from repo.projects import Project, closure, group, requirement_name, third_party

__all__ = ["Usage", "changelog_version", "problems", "range_problems", "test_problems", "torch_at_load", "usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a package's source needs.

    Attributes:
        imported: Distribution name -> one import statement that needs it.
        named: String constants of the source and of its tables (JSON), as distribution names: a program that is run, or a module that is
            imported by its name, is named by one, a module's parents too.
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
        strings = [n.value for n in module.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        named |= _modules_in(strings)
    for table in project.source.rglob("*.json"):
        named |= _modules_in(re.findall(r'"([^"]*)"', table.read_text(encoding="utf-8")))
    return Usage(imported, frozenset(named))


def _modules_in(strings: Iterable[str]) -> set[str]:
    """Return what strings may name, as distribution names: a module's parents, too."""
    parts = [text.split(".") for text in strings if re.fullmatch(r"[\w.-]+", text)]
    return {requirement_name(".".join(some[: i + 1])) for some in parts for i in range(len(some))}


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
    for name in sorted(required - needed.imported.keys() - needed.named - set(project.plugs_into)):
        found.append(f"pyproject.toml declares {name}, which no file imports")
    for name in sorted(
        optional - needed.imported.keys() - needed.named - projects.keys()
    ):  # an extra may bundle siblings
        found.append(f"an extra declares {name}, which no file imports or runs")
    return found


def test_problems(project: Project, projects: Mapping[str, Project]) -> list[str]:
    """One line for each import of a package's tests that its isolated environment would not have.

    That environment holds the package, what it needs, the root's group `isolated`, and the package's group `tests`.
    Extras count as there: a test of one must skip without it, which only running it can show. So do the programs in tools/, which
    pytest finds wherever it runs in this repository.
    """
    needed = closure([project.name], projects)
    there = {requirement_name(text) for text in third_party(needed, projects)} | {"ds-testing", *needed}
    there |= {requirement_name(text) for extra in project.extras.values() for text in extra}
    there |= {requirement_name(text) for text in (*group("isolated"), *project.test_requires)}
    there |= {requirement_name(path.stem) for path in Path(__file__).parents[1].glob("*.py")}
    ours = {other.module: other.name for other in projects.values()} | {"ds_testing": "ds-testing"}
    files = test_modules(project)
    local = {module.path.stem for module in files} | {module.path.parent.name for module in files}
    return sorted(
        {
            f"{found.path.name}:{found.line} imports {found.top}: declare it in pyproject.toml, [dependency-groups] tests"
            for module in files
            for found in imports(module)
            if found.top and found.top not in sys.stdlib_module_names and found.top not in local
            if _distribution(found.top, ours) not in there
        }
    )


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
    return requirement_name(_installed().get(top, [top])[0])


@functools.cache
def _installed() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()
