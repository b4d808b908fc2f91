"""The README's snippet runs; it compares itself with transformers."""

import re
from pathlib import Path

import pytest


def test_readme_snippet_runs() -> None:
    pytest.importorskip("transformers")
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {})
