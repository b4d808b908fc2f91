"""The workflows call only sessions that exist, and test every Python that the packages claim."""

from __future__ import annotations

import re

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
    found = re.findall(r'"(3\.\d+)"', (FOLDER / "tests.yml").read_text())
    assert found == ["3.11", "3.12", "3.13", "3.14"]
