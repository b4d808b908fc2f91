"""Runs a pytest of its own over a written file, because the plugin under test serves the pytest we are in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

CONFTEST = """
import pytest


class Kept:
    name = "kept"


@pytest.fixture
def from_conftest():
    return Kept()
"""

# The timeout is pytest-timeout's: it must not end worlds, which have deadlines of their own.
SETTINGS = "[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider\ntimeout = 1\n"


class Outcomes(dict[str, tuple[str, str]]):
    """By the name of a test: its outcome, and the text of its failure."""

    printed = ""


@pytest.fixture(scope="session")
def run_pytest() -> Callable[..., Outcomes]:
    """`run_pytest(folder, text, *words)`: the outcome and the failure text of each test of a file with that text."""

    def run(folder: Path, text: str, *words: str, settings: str = "") -> Outcomes:
        (folder / "test_written.py").write_text(text)
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "pytest.ini").write_text(SETTINGS + settings)
        command = [sys.executable, "-m", "pytest", "-q", "--junitxml=report.xml", *words, "test_written.py"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        if not (folder / "report.xml").is_file():
            raise RuntimeError(done.stdout + done.stderr)
        outcomes = Outcomes(map(_outcome, ElementTree.parse(folder / "report.xml").iter("testcase")))
        outcomes.printed = done.stdout
        return outcomes

    return run


def _outcome(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            return case.attrib["name"], (child.tag, f"{child.get('message')}\n{child.text}")
    return case.attrib["name"], ("passed", "")
