"""The README's snippet runs, and says what it claims."""

import re
from pathlib import Path

import pytest


def test_readme_snippet_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "README.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "README.md", "exec"), {})
    assert "Linear(in_features=64, out_features=64, bias=True)" in capsys.readouterr().out
