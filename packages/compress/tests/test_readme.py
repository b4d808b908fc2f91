"""The README's snippets run, and say what they claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_testing import run_snippets

README = Path(__file__).parents[1] / "README.md"


def test_snippets_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_snippets(README)
    assert "Linear(in_features=64, out_features=64, bias=True)" in capsys.readouterr().out
