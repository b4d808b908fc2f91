"""The README's snippet runs and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_readme_snippet_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {})
    assert "step 20/20" in capsys.readouterr().out
    assert (tmp_path / "logs/Train_Samples_train_loss.csv").read_text().startswith("step,train_loss\n1,")
