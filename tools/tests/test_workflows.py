"""The workflows call only sessions that exist, and test every Python that the packages claim."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from repo import ROOT

FOLDER = ROOT / ".github" / "workflows"


def test_sessions_exist():
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    for file in FOLDER.glob("*.yml"):
        called = re.findall(r"nox -s (\w+)|bootstrap\.py (\w+)", file.read_text())
        unknown = {name for pair in called for name in pair if name} - sessions
        assert not unknown, f"{file.name} calls sessions that do not exist"


def test_what_must_be_there_is_there():
    assert {file.stem for file in FOLDER.glob("*.yml")} >= {"check", "tests", "wheels", "docs", "release"}


def test_every_supported_python_is_tested():
    (matrix,) = re.findall(r"python: \[(.*)\]", (FOLDER / "tests.yml").read_text())
    assert re.findall(r"3\.\d+", matrix) == ["3.11", "3.12", "3.13", "3.14"]


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
