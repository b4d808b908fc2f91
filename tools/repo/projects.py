"""The packages of this repository, read from their pyproject.toml files.

Words: a *project* is one folder under packages/; *ours* are requirements whose name is one of these; *third party* are
all others.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from repo import ROOT

__all__ = [
    "UPLOAD_PREFIX",
    "Project",
    "closure",
    "dev_requirements",
    "group",
    "load",
    "read_project",
    "requirement_name",
    "third_party",
    "torch_bounds",
    "upload_name",
]

UPLOAD_PREFIX = "dsuite-"
"""What names of distributions begin with on the index; see `repo.staging`."""


@dataclass(frozen=True, slots=True)
class Project:
    """One pyproject.toml.

    Attributes:
        name: Distribution name, `ds-zero`.
        module: Import name, `ds_zero`.
        dependencies: Requirement strings.
        extras: Requirement strings by extra.
        build_requires: What its build backend needs.
        test_requires: Its `tests` dependency group: what only its tests import.
        native: Whether it is built from native/ as well.
        plugs_into: Distributions that call this one through the entry points it registers.
        opt_in: `tool.ds.opt-in`: not installed in the development environment, and never uploaded.
    """

    name: str
    folder: Path
    version: str
    dependencies: tuple[str, ...]
    extras: Mapping[str, tuple[str, ...]]
    build_requires: tuple[str, ...]
    test_requires: tuple[str, ...]
    native: bool
    plugs_into: tuple[str, ...] = ()
    opt_in: bool = False

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.module


def upload_name(name: str) -> str:
    """Return the name under which a distribution is uploaded: `ds-zero` -> `dsuite-zero`. Others keep theirs."""
    return UPLOAD_PREFIX + name.removeprefix("ds-") if name.startswith("ds-") else name


def requirement_name(requirement: str) -> str:
    """The normalised distribution name of a requirement string: `Foo_bar[x]>=1` -> `foo-bar`."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~;\[@(]", requirement.strip(), maxsplit=1)[0]).lower()


# Commands belong to the launcher; other groups are named after their owner (`ds_monitor.sinks`).
_GROUP_OWNERS = {"ds.commands": "ds-launcher"}


def _plugs_into(groups: Iterable[str]) -> tuple[str, ...]:
    return tuple(_GROUP_OWNERS.get(group, requirement_name(group.split(".")[0])) for group in groups)


def read_project(folder: Path) -> Project:
    """Read one package's pyproject.toml."""
    data = tomllib.loads((folder / "pyproject.toml").read_text())
    project, build = data["project"], data["build-system"]
    return Project(
        name=requirement_name(project["name"]),
        folder=folder,
        version=project["version"],
        dependencies=tuple(project.get("dependencies", ())),
        extras={extra: tuple(reqs) for extra, reqs in project.get("optional-dependencies", {}).items()},
        build_requires=tuple(build["requires"]),
        test_requires=tuple(data.get("dependency-groups", {}).get("tests", ())),
        native="scikit" in build["build-backend"],
        plugs_into=_plugs_into(project.get("entry-points", {})),
        opt_in=data.get("tool", {}).get("ds", {}).get("opt-in", False),
    )


def load(root: Path = ROOT) -> dict[str, Project]:
    """Every package, by distribution name, in alphabetical order."""
    found = (read_project(file.parent) for file in sorted((root / "packages").glob("*/pyproject.toml")))
    return {project.name: project for project in found}


def closure(names: Iterable[str], projects: Mapping[str, Project]) -> list[str]:
    """`names` and what they need inside the repository, dependencies first.

    Raises:
        ValueError: packages need each other in a circle.
    """
    order: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ValueError(f"packages need each other in a circle: {' -> '.join((*path, name))}")
        if name in order:
            return
        for requirement in projects[name].dependencies:
            if (needed := requirement_name(requirement)) in projects:
                visit(needed, (*path, name))
        order.append(name)

    for name in names:
        visit(name, ())
    return order


def third_party(names: Iterable[str], projects: Mapping[str, Project]) -> list[str]:
    """The requirements of `names` that are not ours."""
    found = {requirement for name in names for requirement in projects[name].dependencies}
    return sorted(requirement for requirement in found if requirement_name(requirement) not in projects)


def torch_bounds(projects: Mapping[str, Project], constraints: str) -> tuple[str, str]:
    """The oldest torch that a package allows, and the one that the development environment pins, the newest that is tested."""
    named = [text for text in third_party(projects, projects) if requirement_name(text) == "torch"]
    lowest = max(
        tuple(int(part) for part in found.split(".")) for text in named for found in re.findall(r">=([\d.]+)", text)
    )
    (pinned,) = re.findall(r"^torch==(\S+)$", constraints, re.MULTILINE)
    return ".".join(map(str, (*lowest, 0, 0)[:3])), pinned


def group(name: str, root: Path = ROOT) -> list[str]:
    """One dependency group of the root pyproject.toml."""
    groups = tomllib.loads((root / "pyproject.toml").read_text())["dependency-groups"]
    return list(groups[name])


def dev_requirements(groups: Iterable[str], root: Path = ROOT) -> list[str]:
    """All third-party requirements of the development environment: every package with its extras, and `groups`.

    Extras that are only clients of a network service are left out (`tool.ds.service-extras`): no test can reach one.
    """
    projects = load(root)
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["ds"]
    left_out = set(settings["service-extras"])
    found = set(third_party(projects, projects))
    for project in projects.values():
        found |= {req for extra, reqs in project.extras.items() if extra not in left_out for req in reqs}
        found |= {*project.build_requires, *project.test_requires}
    for name in groups:
        found |= set(group(name, root))
    return sorted(requirement for requirement in found if requirement_name(requirement) not in projects)
