"""Packages are built under the names that the index takes."""

from __future__ import annotations

import tomllib

from repo import ROOT
from repo.projects import load, requirement_name, upload_name
from repo.staging import similar_names, stage, staged_pyproject

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
