"""The README's snippet runs."""

import re
from pathlib import Path

import pytest


def test_readme_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "32 = 16 per rank x 2 microbatches x 1 data-parallel ranks" in printed
    assert "step 9: loss" in printed
