"""The README's snippet runs, and says what it claims."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_readme_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {})
    assert capsys.readouterr().out.split("\n")[:2] == ["('0', '1', '2', '3')", "True"]
