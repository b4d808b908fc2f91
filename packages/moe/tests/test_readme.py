"""The README's snippets run, and say what they claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_testing import run_snippets

README = Path(__file__).parents[1] / "README.md"


def test_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    run_snippets(README)
    assert "torch.Size([16, 2])" in capsys.readouterr().out
