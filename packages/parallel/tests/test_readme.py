"""The README's snippets run, and say what they claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_testing import run_snippets

README = Path(__file__).parents[1] / "README.md"


def test_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    run_snippets(README)
    lines = capsys.readouterr().out.split("\n")
    assert lines[0].startswith("tensor parallel over 4: rank 0 holds ")
    assert lines[1].split()[:4] == ["*.up", "(x3)", "column", "256"]
    assert lines[3:5] == ["('0', '1', '2', '3')", "True"]
