"""Which tests run, and how many files side by side. Decided from names of files, before pytest starts.

Words: a *touched* package has a changed file; *above* it are the packages that need it, directly or not.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from repo import ROOT
from repo.projects import Project, closure

__all__ = ["above", "changed_files", "folders_of", "side_by_side"]

_PROCESSES_A_CORE = 2  # most of a test's time is waiting: for ranks, for processes, for the disk
_MOST_PROCESSES = 8  # each holds torch, and up to four ranks
_OWN_CHOICE = re.compile(
    r"-n.*|--numprocesses.*|--dist.*|no:xdist|-pno:xdist|--pdb|--trace|-s|--capture=no|--co|--collect-only"
)
_EVERYTHING = ("pyproject.toml", "constraints.txt", "tools/ds-testing")


def side_by_side(arguments: Sequence[str], cores: int) -> list[str]:
    """What to add to pytest's arguments so that several files run at a time.

    Nothing where `arguments` choose themselves, or need one process (a debugger, output as it comes). Tests of one file stay in one
    process and in their order, so that fixtures of a module are made once. Files begin in the order of ds_testing's `long_files`,
    not by their number of tests.
    """
    if any(_OWN_CHOICE.fullmatch(argument) for argument in arguments):
        return []
    return ["-n", str(min(_PROCESSES_A_CORE * cores, _MOST_PROCESSES)), "--dist", "loadfile", "--no-loadscope-reorder"]


def above(touched: Collection[str], projects: Mapping[str, Project]) -> list[str]:
    """`touched` and every package that needs one of them, by name."""
    return sorted(name for name in projects if {*closure([name], projects)} & {*touched})


def folders_of(changed: Collection[str], projects: Mapping[str, Project], root: Path = ROOT) -> list[str]:
    """The folders whose tests a change can break.

    A package's own tests are no part of what is above it. Of tests-integration run the folders that changed or have a touched
    package's name; the rest is left to the whole suite.

    Args:
        changed: Paths relative to `root`, with slashes.
    Returns:
        For pytest; [] when nothing with a test changed, ["."] when what every test uses did.
    """
    if any(_inside(file, one) for file in changed for one in _EVERYTHING):
        return ["."]
    folders = {name: project.folder.relative_to(root).as_posix() for name, project in projects.items()}
    own = {name for name, folder in folders.items() if any(_inside(file, folder) for file in changed)}
    sources = {name for name in own if any(_inside(f, folders[name]) and not _is_test(f) for f in changed)}
    sources |= {
        name for name, project in projects.items() if project.native and any(_inside(f, "native") for f in changed)
    }
    found = [folders[name] for name in sorted({*own, *above(sources, projects)})]
    together = {f"tests-integration/{projects[name].folder.name}" for name in sources}
    together |= {"/".join(file.split("/")[:2]) for file in changed if _inside(file, "tests-integration")}
    return [*found, *sorted(f for f in together if (root / f).exists()), *(["tools/tests"] if changed else [])]


def _inside(file: str, folder: str) -> bool:
    return PurePosixPath(file).is_relative_to(folder)


def _is_test(file: str) -> bool:
    return "tests" in PurePosixPath(file).parts


def changed_files(base: str, root: Path = ROOT) -> list[str]:
    """Files that differ from where this branch left `base`, what is not committed included.

    Raises:
        ValueError: git knows no `base`, or there is no git.
    """
    fork = _git(root, "merge-base", base, "HEAD").strip()
    tracked = _git(root, "diff", "--name-only", fork)
    new = _git(root, "ls-files", "--others", "--exclude-standard")
    return sorted({*tracked.splitlines(), *new.splitlines()})


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise ValueError(f"git {' '.join(arguments)} failed: {said.strip()}") from error
    return done.stdout
