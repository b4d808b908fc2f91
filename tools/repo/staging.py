"""The names under which packages are uploaded, and a copy of a package that has them.

In the tree distributions are called `ds-zero`, imports `ds_zero`. The index refuses four of these names as too similar to others (`dsconfig`,
`dsdata`, `dsmonitor`, `dspipe`), so uploads have the prefix that `repo.projects.UPLOAD_PREFIX` says; imports and commands stay.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from repo import ROOT
from repo.projects import Project, upload_name

__all__ = ["CLASSIFIERS", "similar_names", "stage", "staged_pyproject", "with_metadata"]

CLASSIFIERS = (
    "Development Status :: 4 - Beta",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: MacOS",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Programming Language :: Python :: 3.14",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
)


def similar_names(names: Iterable[str], existing: Iterable[str]) -> list[str]:
    """Return the names that the index would refuse beside `existing`: equal without `-_.`, with o as 0 and l, i as 1."""
    there = {_folded(name) for name in existing}
    return [name for name in names if _folded(name) in there]


def _folded(name: str) -> str:
    return re.sub(r"[-_.]", "", name.lower()).replace("o", "0").replace("l", "1").replace("i", "1")


def staged_pyproject(text: str, projects: Mapping[str, Project]) -> str:
    """Return a pyproject.toml in which every distribution of ours has its upload name, in `name` and in requirements."""
    ours = "|".join(map(re.escape, sorted(projects, key=len, reverse=True)))
    text = re.sub(rf'^(name = ")({ours})"', lambda m: f'{m[1]}{upload_name(m[2])}"', text, count=1, flags=re.MULTILINE)
    return re.sub(rf'(?<=")({ours})(?=[\[<>=~!;, ])', lambda m: upload_name(m[1]), text)


def with_metadata(text: str, package: str, repository: str) -> str:
    """Add to a pyproject.toml what is equal in all distributions: the licence file, classifiers, and addresses.

    Args:
        package: Folder of the package, `packages/zero`.
        repository: Address of the repository; empty: no addresses.
    """
    lines = ['license-files = ["LICENSE"]']
    if "classifiers = " not in text:
        lines.append(f"classifiers = {json.dumps(CLASSIFIERS, indent=4)}")
    text = text.replace('license = "Apache-2.0"\n', 'license = "Apache-2.0"\n' + "\n".join(lines) + "\n", 1)
    if not repository:
        return text
    address = repository.rstrip("/")
    pages = {
        "Repository": f"{address}/tree/main/{package}",
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/main/{package}/CHANGELOG.md",
    }
    return text + "\n[project.urls]\n" + "".join(f"{name} = {json.dumps(url)}\n" for name, url in pages.items())


def stage(project: Project, projects: Mapping[str, Project], folder: Path) -> Path:
    """Copy what git has of a package to `folder`/packages/NAME with its upload name and the licence, beside a link to native/.

    Addresses are those of the repository that `DOCS_REPOSITORY` names, as on the site; a fork has its own.

    Returns:
        The copy, to be built as the package itself would be.
    """
    source = project.folder.relative_to(ROOT)
    listed = subprocess.run(
        ["git", "ls-files", "-z", str(source)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    if not (folder / "native").exists():
        (folder / "native").symlink_to(ROOT / "native")
    shutil.copy2(ROOT / "LICENSE", folder / source / "LICENSE")  # the backends put it into sdist and wheel
    copy = folder / source / "pyproject.toml"
    text = staged_pyproject(copy.read_text(), projects)
    copy.write_text(with_metadata(text, str(source), os.environ.get("DOCS_REPOSITORY", "")))
    return folder / source
