"""Wheels of our packages, built once per state of their sources and kept in .nox/wheelhouse."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from repo import ROOT
from repo.projects import Project, closure, load, read_project

__all__ = ["HOUSE", "ensure_wheels"]

HOUSE = ROOT / ".nox" / "wheelhouse"


def ensure_wheels(names: Iterable[str], python: str, extra_folders: Iterable[Path] = ()) -> list[Path]:
    """Wheels of `names`, of what they need inside the repository, and of the projects in `extra_folders`.

    Args:
        python: An interpreter whose environment holds the build backends; nothing is fetched while building.
    """
    projects = load()
    wanted = [projects[name] for name in closure(names, projects)] + [read_project(folder) for folder in extra_folders]
    return [_ensure(project, python) for project in wanted]


def _ensure(project: Project, python: str) -> Path:
    slot = HOUSE / f"{project.name}-{_digest(project)}"
    if not list(slot.glob("*.whl")):
        _build(project, python, slot)
    (wheel,) = slot.glob("*.whl")
    return wheel


def _build(project: Project, python: str, slot: Path) -> None:
    HOUSE.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=HOUSE))
    flags = ["-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "-w", str(temporary)]
    environ = {**os.environ, "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    subprocess.run([python, "-m", "pip", "wheel", *flags, str(project.folder)], check=True, env=environ)
    for old in HOUSE.glob(f"{project.name}-{'?' * 16}"):
        shutil.rmtree(old)
    temporary.rename(slot)


def _digest(project: Project) -> str:
    """Of everything that can end up in the wheel, and of the Python that builds it."""
    folders = [project.folder, *([ROOT / "native"] if project.native else [])]
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z", *map(str, folders)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    digest = hashlib.sha256(sys.version.encode())
    for name in sorted(filter(None, listed)):
        file = ROOT / name
        if file.is_file() and "tests" not in file.relative_to(ROOT).parts:
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
