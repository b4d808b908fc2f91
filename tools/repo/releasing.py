"""What the release of one package changes in the tree, and the steps that follow. `nox -s release -- zero 0.3.0`.

Decided first, as edits of files that can be shown; done only where that is asked for, and never pushed: the tag is what releases.
"""

from __future__ import annotations

import datetime
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from repo import ROOT
from repo.projects import Project, load, requirement_name

__all__ = ["Edit", "Release", "ReleaseError", "apply", "oldest", "plan", "shown"]


class ReleaseError(Exception):
    """A release that cannot be made: asked, found, do this."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One line of one file, before and after."""

    path: Path
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Release:
    """What is released, and what the tree has to say then."""

    name: str
    version: str
    edits: tuple[Edit, ...]

    @property
    def tag(self) -> str:
        """The tag whose push releases it."""
        return f"{self.name}-v{self.version}"


def plan(short: str, version: str, root: Path = ROOT, today: datetime.date | None = None) -> Release:
    """The edits: the version, the head of the changelog, and the ranges of packages that need this one and would not take it.

    Args:
        short: `zero` or `ds-zero`.
    Raises:
        ReleaseError: no such package, a version that is none or not above the last tagged one, or a changelog without entries.
    """
    projects = load(root)
    name = short if short in projects else f"ds-{short}"
    if name not in projects:
        raise ReleaseError(f"asked to release {short}; there is no such package. One of: {', '.join(projects)}")
    project = projects[name]
    if project.opt_in:
        raise ReleaseError(f"{name} is never uploaded (tool.ds.opt-in)")
    new = _version(version)
    if new < Version(project.version) or f"{name}-v{version}" in _tags(root):
        raise ReleaseError(f"asked for {name} {version}; the tree has {project.version}, and a release only goes up")
    pyproject = project.folder / "pyproject.toml"
    edits = (
        []
        if version == project.version
        else [Edit(pyproject, f'version = "{project.version}"', f'version = "{version}"')]
    )
    edits.append(_changelog(project, version, today or datetime.date.today()))
    edits += _ranges(project, new, projects)
    return Release(name, version, tuple(edits))


def _version(text: str) -> Version:
    try:
        found = Version(text)
    except InvalidVersion:
        found = Version("0")
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", text):
        raise ReleaseError(f"{text} is no version of the form MAJOR.MINOR.PATCH or MAJOR.MINOR.PATCHrcN")
    return found


def _tags(root: Path) -> set[str]:
    listed = subprocess.run(["git", "tag", "--list"], cwd=root, check=True, capture_output=True, text=True)
    return set(listed.stdout.split())


def _changelog(project: Project, version: str, today: datetime.date) -> Edit:
    path = project.folder / "CHANGELOG.md"
    head, body = re.search(r"^(## .*)\n((?:(?!## ).*\n)*)", path.read_text(), re.MULTILINE).groups()  # type: ignore[union-attr]
    if "unreleased" not in head:
        raise ReleaseError(
            f"{path} begins with `{head}`; begin it with `## {version} (unreleased)` and say what is new"
        )
    if "- " not in body:
        raise ReleaseError(f"{path} says nothing under `{head}`; say what is new")
    return Edit(path, head, f"## {version} ({today.isoformat()})")


def _ranges(project: Project, new: Version, projects: Mapping[str, Project]) -> list[Edit]:
    """Below 1.0 a minor version may break, so a range ends at the next one; from 1.0 on at the next major one."""
    top = f"{new.major}.{new.minor + 1}" if new.major == 0 else f"{new.major + 1}"
    edits = []
    for other in projects.values():
        for text in (*other.dependencies, *(r for extra in other.extras.values() for r in extra)):
            if requirement_name(text) != project.name or Requirement(text).specifier.contains(new, prereleases=True):
                continue
            lowest = next(s.version for s in Requirement(text).specifier if s.operator == ">=")
            extras = f"[{','.join(sorted(Requirement(text).extras))}]" if Requirement(text).extras else ""
            edits.append(
                Edit(other.folder / "pyproject.toml", f'"{text}"', f'"{project.name}{extras}>={lowest},<{top}"')
            )
    return edits


def shown(release: Release, root: Path = ROOT) -> str:
    """The steps, as a person reads them."""
    lines = [f"release {release.name} {release.version}"]
    for edit in release.edits:
        lines += [f"  {edit.path.relative_to(root)}", f"    - {edit.before}", f"    + {edit.after}"]
    lines += [f"  commit `release: {release.name} {release.version}`", f"  tag {release.tag}"]
    return "\n".join(lines)


def apply(release: Release, root: Path = ROOT) -> None:
    """Write the edits, commit and tag. Nothing is pushed.

    Raises:
        ReleaseError: the tree has changes of its own, or a line is not found exactly once.
    """
    if _git(root, "status", "--porcelain"):
        raise ReleaseError("the tree has changes that are not committed: commit or stash them")
    for edit in release.edits:
        text = edit.path.read_text()
        if text.count(edit.before) != 1:
            raise ReleaseError(f"{edit.path} has `{edit.before}` {text.count(edit.before)} times; it is wanted once")
        edit.path.write_text(text.replace(edit.before, edit.after))
    _git(root, "commit", "-q", "-a", "-m", f"release: {release.name} {release.version}")
    _git(root, "tag", "-a", release.tag, "-m", f"{release.name} {release.version}")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def oldest(name: str, projects: Mapping[str, Project]) -> dict[str, str]:
    """The lowest version of each package that `name` allows, in itself and in what it needs: the highest of the lower bounds."""
    found: dict[str, Version] = {}

    def visit(project: Project, path: Sequence[str]) -> None:
        for text in project.dependencies:
            needed = requirement_name(text)
            if needed in projects and needed not in path:
                lowest = max(Version(s.version) for s in Requirement(text).specifier if s.operator == ">=")
                whole = Version(f"{lowest}.0" if len(lowest.release) < 3 else str(lowest))
                found[needed] = max(found.get(needed, whole), whole)
                visit(projects[needed], (*path, needed))

    visit(projects[name], (name,))
    return {needed: str(version) for needed, version in sorted(found.items())}
