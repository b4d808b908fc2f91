"""The README's snippet runs, and says what it claims."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_readme_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    lines = capsys.readouterr().out.split("\n")
    assert lines[0].startswith("tensor parallel over 4: rank 0 holds ")
    assert lines[1].split()[:4] == ["*.up", "(x3)", "column", "256"]
    assert lines[3:5] == ["('0', '1', '2', '3')", "True"]
