"""The noxfile offers what it should, and each session says what it is for."""

from __future__ import annotations

import re
import subprocess
import sys

from repo import ROOT

SESSIONS = {
    "quickstart",
    "tests",
    "grid",
    "clients",
    "conformance",
    "sinks",
    "mutants",
    "isolated",
    "integration",
    "native",
    "lint",
    "docs",
    "bench",
    "wheels",
    "torches",
    "oldest",
    "clusters",
    "release",
    "fuzz",
    "gpu",
}


def test_sessions_and_descriptions(projects):
    command = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^[*-] (\w+)(?:\(([\w-]+)\))?(?: -> (.+))?$", listed, re.MULTILINE)
    assert {name for name, _, _ in rows} == SESSIONS
    assert [name for name, _, description in rows if not description] == []
    assert {package for name, package, _ in rows if name == "isolated"} == set(projects)
