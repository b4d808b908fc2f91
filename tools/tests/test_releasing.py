"""A release is decided as edits that can be shown, made in a clone of this repository, and accepted by what the tag starts."""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repo import ROOT
from repo.projects import load
from repo.releasing import ReleaseError, apply, oldest, plan, shown

DAY = datetime.date(2026, 11, 24)


@pytest.fixture
def clone(tmp_path):
    """The files that a release reads and writes, as a repository of their own."""
    for project in load().values():
        folder = tmp_path / project.folder.relative_to(ROOT)
        folder.mkdir(parents=True)
        for name in ("pyproject.toml", "CHANGELOG.md"):
            shutil.copy(project.folder / name, folder / name)
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__", "bench", "tests"))
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    for command in (
        ["init", "-q", "-b", "main"],
        ["config", "user.name", "nobody"],
        ["config", "user.email", "nobody@example.org"],
        ["add", "-A"],
        ["commit", "-q", "-m", "begin"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def git(where: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=where, check=True, capture_output=True, text=True).stdout


def test_what_is_decided_is_done_and_the_tag_is_accepted(clone):
    before = git(clone, "status", "--porcelain") + git(clone, "rev-parse", "HEAD")
    release = plan("zero", "0.3.0", clone, DAY)
    text = shown(release, clone)
    assert '+ version = "0.3.0"' in text
    assert "+ ## 0.3.0 (2026-11-24)" in text
    assert 'packages/engine/pyproject.toml\n    - "ds-zero>=0.1,<0.2"\n    + "ds-zero>=0.1,<0.4"' in text
    assert git(clone, "status", "--porcelain") + git(clone, "rev-parse", "HEAD") == before  # so far nothing is done
    apply(release, clone)
    assert git(clone, "tag", "--list").split() == ["ds-zero-v0.3.0"]
    assert git(clone, "log", "-1", "--format=%s").strip() == "release: ds-zero 0.3.0"
    assert load(clone)["ds-zero"].version == "0.3.0"
    checked = subprocess.run(
        [sys.executable, "tools/release.py", "ds-zero-v0.3.0"], cwd=clone, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout) == (0, "folder=packages/zero\n"), checked.stderr
    with pytest.raises(ReleaseError, match="only goes up"):
        plan("zero", "0.3.0", clone, DAY)


def test_the_first_release_keeps_its_version_and_ranges(clone):
    release = plan("ds-config", load(clone)["ds-config"].version, clone, DAY)
    assert [edit.path.name for edit in release.edits] == ["CHANGELOG.md"]


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("nothing", "0.3.0", "no such package"),
        ("zero", "0.0.1", "only goes up"),
        ("zero", "0.3", "MAJOR.MINOR.PATCH"),
        ("zero", "next", "MAJOR.MINOR.PATCH"),
    ],
)
def test_what_cannot_be_released_says_why(clone, name, version, said):
    with pytest.raises(ReleaseError, match=re.escape(said)):
        plan(name, version, clone, DAY)


def test_a_changed_tree_and_a_changelog_without_news_are_refused(clone):
    release = plan("zero", "0.3.0", clone, DAY)
    (clone / "new.txt").write_text("x")
    with pytest.raises(ReleaseError, match="not committed"):
        apply(release, clone)
    (clone / "packages/zero/CHANGELOG.md").write_text("# Changelog\n\n## 0.3.0 (unreleased)\n\n## 0.2.0\n- old\n")
    with pytest.raises(ReleaseError, match="says nothing"):
        plan("zero", "0.3.0", clone, DAY)


def test_the_oldest_allowed_siblings_are_versions_of_this_tree_or_tags():
    projects = load()
    tags = set(git(ROOT, "tag", "--list").split())
    for name in projects:
        for sibling, version in oldest(name, projects).items():
            assert version == projects[sibling].version or f"{sibling}-v{version}" in tags, (
                f"{name} allows {sibling} {version}"
            )
