"""The README's snippets run, one after the other as they stand, with this package alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec", dont_inherit=True), names)
