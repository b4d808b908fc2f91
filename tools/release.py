"""Check that a tag releases what the tree says, and print the package's folder for the workflow.

usage: python tools/release.py ds-zero-v0.2.0
       python tools/release.py --stage packages/zero

The first prints `folder=packages/zero`, or says what does not agree and exits with 1. The second copies the package to build/staged
under the name that it is uploaded with, and prints the copy.
"""

from __future__ import annotations

import re
import sys

from repo import ROOT
from repo.projects import Project, load
from repo.staging import stage

_TAG = re.compile(r"(?P<name>ds-[a-z]+)-v(?P<version>\d+\.\d+\.\d+\S*)")


def disagreements(tag: str) -> tuple[Project | None, list[str]]:
    """The package a tag names, and one line for each thing that does not fit it."""
    match, projects = _TAG.fullmatch(tag), load()
    if match is None:
        return None, [f"{tag} is not of the form ds-NAME-vMAJOR.MINOR.PATCH"]
    if match["name"] not in projects:
        return None, [f"there is no package {match['name']}; there are {', '.join(projects)}"]
    project, version = projects[match["name"]], match["version"]
    found = []
    if project.version != version:
        found.append(f"pyproject.toml has version {project.version}, the tag {version}")
    changelog = (project.folder / "CHANGELOG.md").read_text()
    head = re.search(r"^## (.*)$", changelog, re.MULTILINE)
    if head is None or head[1].split()[0] != version:
        found.append(f"CHANGELOG.md does not begin with {version}")
    elif "unreleased" in head[1]:
        found.append(f"CHANGELOG.md still calls {version} unreleased")
    return project, found


def main(tag: str) -> int:
    project, found = disagreements(tag)
    if found or project is None:
        sys.stderr.write("".join(f"{tag}: {line}\n" for line in found))
        return 1
    sys.stdout.write(f"folder={project.folder.relative_to(ROOT)}\n")
    return 0


def staged(folder: str) -> int:
    """Print the copy of a package that is built for the index."""
    projects = load()
    project = next((p for p in projects.values() if p.folder.relative_to(ROOT).as_posix() == folder.rstrip("/")), None)
    if project is None:
        sys.stderr.write(f"{folder} is not a package; there are {', '.join(projects)}\n")
        return 1
    sys.stdout.write(f"{stage(project, projects, ROOT / 'build' / 'staged')}\n")
    return 0


if __name__ == "__main__":
    sys.exit(staged(sys.argv[2]) if sys.argv[1] == "--stage" else main(sys.argv[1]))
