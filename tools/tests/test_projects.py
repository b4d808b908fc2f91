"""Reading packages, their imports and their needs, on packages written for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from repo import dependencies, install, wheelhouse
from repo.imports import imports, modules
from repo.projects import closure, dev_requirements, group, load, read_project, requirement_name, third_party

PYPROJECT = """
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"
[project]
name = "ds-{name}"
version = "{version}"
dependencies = {needs}
[project.optional-dependencies]
more = {more}
"""


@pytest.fixture
def write(tmp_path):
    """`write("low", "import json")`: a package with one module; returns how the repository reads it."""

    def write(name, text="", needs=(), more=(), version="0.1.0"):
        folder = tmp_path / "packages" / name
        (folder / "src" / f"ds_{name}").mkdir(parents=True, exist_ok=True)
        (folder / "src" / f"ds_{name}" / "__init__.py").write_text(text)
        (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## {version} (unreleased)\n")
        filled = PYPROJECT.format(name=name, version=version, needs=list(needs), more=list(more))
        (folder / "pyproject.toml").write_text(filled.replace("'", '"'))
        return read_project(folder)

    return write


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("Foo_bar[x]>=1", "foo-bar"),
        ("torch==2.13.0", "torch"),
        ("a.b @ file:///c", "a-b"),
        ("ds-zero>=0.1,<0.2", "ds-zero"),
    ],
)
def test_requirement_name(requirement, name):
    assert requirement_name(requirement) == name


def test_closure_puts_needs_first_and_finds_circles(write):
    projects = {p.name: p for p in (write("a", needs=["ds-b>=0.1"]), write("b", needs=["ds-c", "x"]), write("c"))}
    assert closure(["ds-a"], projects) == ["ds-c", "ds-b", "ds-a"]
    assert third_party(["ds-a", "ds-b"], projects) == ["x"]
    projects["ds-c"] = write("c", needs=["ds-a"])
    with pytest.raises(ValueError, match="ds-a -> ds-b -> ds-c -> ds-a"):
        closure(["ds-a"], projects)


def test_imports_know_where_they_stand(write):
    text = """
import json
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import numpy
def f():
    from torch import nn
class C:
    import os.path
from . import sub
from .sub import name
"""
    project = write("a", text)
    found = {i.target: i for i in imports(modules(project)[0])}
    assert not found["json"].deferred
    assert found["torch.nn"].deferred
    assert found["numpy"].typing_only
    assert not found["os.path"].deferred
    assert {"ds_a.sub", "ds_a.sub.name"} <= set(found)
    assert found["torch.nn"].line == 7


def test_imports_and_declarations_are_compared_both_ways(write):
    low = write("low")
    high = write("high", "import ds_low, numpy\nimport json\n", needs=["ds-zero", "pydantic"], more=["ninja", "rich"])
    high.source.joinpath("build.py").write_text("def build():\n    import rich\n    return 'ninja'\n")
    assert dependencies.problems(high, {"ds-low": low, "ds-high": high}) == [
        "__init__.py:1 imports ds-low, which pyproject.toml does not declare",
        "__init__.py:1 imports numpy, which pyproject.toml does not declare",
        "pyproject.toml declares ds-zero, which no file imports",
        "pyproject.toml declares pydantic, which no file imports",
    ]


def test_an_unused_extra_is_found(write):
    project = write("a", more=["ninja"])
    assert dependencies.problems(project, {"ds-a": project}) == [
        "an extra declares ninja, which no file imports or runs"
    ]


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        ("ds-low>=0.1,<0.2", []),
        ("ds-low>=0.2,<0.3", ["the tree has ds-low 0.1.5"]),
        ("ds-low>=0.1", ["say which versions"]),
        ("ds-low", ["say which versions"]),
        ("ds-low==0.1.5", ["say which versions"]),
        ("torch", []),
    ],
)
def test_sibling_ranges(write, requirement, said):
    high, low = write("high", needs=[requirement]), write("low", version="0.1.5")
    found = dependencies.range_problems(high, {"ds-low": low, "ds-high": high})
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True))


def test_torch_at_load(write):
    project = write("a", "import torch.nn\ndef f():\n    import torch\n")
    assert dependencies.torch_at_load(project) == ["__init__.py:1 imports torch.nn"]


def test_changelog_version(write):
    assert dependencies.changelog_version(write("a", version="1.2.3")) == "1.2.3"


def test_imports_of_tests_are_declared(write):
    project = write("a")
    (project.folder / "tests").mkdir()
    (project.folder / "tests" / "test_a.py").write_text("import ds_a, pytest, json, helper, psutil\n")
    (project.folder / "tests" / "helper.py").write_text("")
    (line,) = dependencies.test_problems(project, {"ds-a": project})
    assert line.startswith("test_a.py:1 imports psutil: declare it")


def test_dev_requirements_hold_no_package_of_ours_and_no_client_of_a_service():
    names = {requirement_name(text) for text in dev_requirements(["tests", "lint"])}
    assert not names & set(load())
    assert not names & {"wandb", "comet-ml"}
    assert {"torch", "pytest", "ruff"} <= names
    assert "mkdocs" in {requirement_name(text) for text in group("docs")}


# ---- the stamp of the development environment ------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An environment whose installer only counts; `installed` is what it claims to hold."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    calls = []
    installed = ["a==1", "ds-zero==0.1.0"]
    monkeypatch.setattr(install, "_step", lambda label, *rest: calls.append(label))
    monkeypatch.setattr(install, "_installed", lambda python: installed)
    monkeypatch.setattr(install, "installer", lambda python: None)
    return str(python), calls, installed


def test_the_second_install_does_nothing(environment):
    python, calls, _ = environment
    install.dev_install(python)
    assert calls == ["third-party packages", "our packages"]
    install.dev_install(python)
    assert len(calls) == 2


def test_more_packages_than_the_stamp_says_are_fine_fewer_are_not(environment):
    python, calls, installed = environment
    install.dev_install(python)
    installed.append("extra==1")
    install.dev_install(python)
    assert len(calls) == 2
    installed.remove("a==1")
    install.dev_install(python)
    assert len(calls) == 4


def test_groups_have_marks_of_their_own(environment):
    python, calls, _ = environment
    install.dev_install(python)
    install.dev_install(python, ["docs"])
    assert len(calls) == 4
    install.dev_install(python)
    install.dev_install(python, ["docs"])
    assert len(calls) == 4


def test_a_damaged_stamp_only_costs_an_install(environment):
    python, calls, _ = environment
    install.dev_install(python)
    Path(python).parent.parent.joinpath("ds-dev-install.json").write_text("{")
    install.dev_install(python)
    assert len(calls) == 4


# ---- wheels ----------------------------------------------------------------------------------------------------------


def test_a_wheel_is_built_once_per_state_of_its_sources(tmp_path, monkeypatch, write):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(wheelhouse, "ROOT", tmp_path)
    monkeypatch.setattr(wheelhouse, "HOUSE", tmp_path / "house")
    project = write("a", "x = 1\n")
    first = wheelhouse._ensure(project, sys.executable)
    assert first.name.startswith("ds_a-0.1.0-")
    assert wheelhouse._ensure(project, sys.executable) == first
    (project.source / "__init__.py").write_text("x = 2\n")
    second = wheelhouse._ensure(project, sys.executable)
    assert second != first
    assert not first.exists(), "the wheel of the old state is gone"
    (project.folder / "tests").mkdir()
    (project.folder / "tests" / "test_a.py").write_text("")
    assert wheelhouse._ensure(project, sys.executable) == second, "tests are not in the wheel"
