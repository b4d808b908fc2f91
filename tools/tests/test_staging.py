"""Packages are built under the names that the index takes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from repo import ROOT
from repo.projects import load, requirement_name, upload_name
from repo.staging import similar_names, stage, staged_pyproject, with_metadata

EXISTING = ("dsconfig", "dsdata", "dsmonitor", "dspipe", "deepspeed")


def test_names_that_the_index_takes_for_others_are_found() -> None:
    assert similar_names(["ds-config", "ds-zero", "d.s_p1pe"], EXISTING) == ["ds-config", "d.s_p1pe"]


def test_no_upload_name_is_too_similar() -> None:
    names = [upload_name(name) for name, project in load().items() if not project.opt_in]
    assert similar_names(names, EXISTING) == []
    assert similar_names(names, names[1:]) == names[1:]
    assert len(set(names)) == len(names)


def test_requirements_of_siblings_are_renamed_and_others_are_not() -> None:
    projects = load()
    text = 'name = "ds-zero"\ndependencies = [\n "ds-comm>=0.1,<0.2",\n "torch>=2.11",\n "ds-ops[gpu]>=0.1",\n]\n[tool.ds]\n'
    expected = text.replace("ds-", "dsuite-").replace("tool.dsuite-", "tool.ds")
    assert staged_pyproject(text, projects) == expected


def test_a_staged_package_needs_staged_packages(tmp_path) -> None:
    projects = load()
    for project in projects.values():
        copy = stage(project, projects, tmp_path)
        data = tomllib.loads((copy / "pyproject.toml").read_text())["project"]
        assert data["name"] == upload_name(project.name)
        needed = [requirement_name(text) for text in data.get("dependencies", ())]
        assert not set(needed) & set(projects)
        assert len(needed) == len(project.dependencies)
        assert (copy / "src").is_dir()
        assert (copy / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (tmp_path / "native" / "CMakeLists.txt").is_file()


def test_what_is_uploaded_says_where_it_comes_from() -> None:
    text = 'name = "dsuite-zero"\nlicense = "Apache-2.0"\nrequires-python = ">=3.11"\n'
    data = tomllib.loads(with_metadata("[project]\n" + text, "packages/zero", "https://example.org/me/ds/"))["project"]
    assert data["license-files"] == ["LICENSE"]
    assert "Programming Language :: Python :: 3.14" in data["classifiers"]
    assert data["urls"]["Changelog"] == "https://example.org/me/ds/blob/main/packages/zero/CHANGELOG.md"
    without = tomllib.loads(with_metadata("[project]\n" + text + "classifiers = []\n", "packages/zero", ""))["project"]
    assert "urls" not in without
    assert without["classifiers"] == []


def test_the_workflows_get_the_copy_of_a_package(tmp_path) -> None:
    command = [sys.executable, "tools/release.py", "--stage"]
    done = subprocess.run([*command, "packages/config"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (
        tomllib.loads((Path(done.stdout.strip()) / "pyproject.toml").read_text())["project"]["name"] == "dsuite-config"
    )
    refused = subprocess.run([*command, "packages/nothing"], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "packages/nothing is not a package" in refused.stderr


def test_every_package_bounds_torch_by_what_was_tested() -> None:
    texts = {
        text
        for project in load().values()
        for text in (*project.dependencies, *(r for extra in project.extras.values() for r in extra))
        if requirement_name(text) == "torch"
    }
    assert texts == {"torch>=2.11,<2.14"}
