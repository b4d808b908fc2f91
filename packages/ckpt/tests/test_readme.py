"""The README's snippets run, one after the other as they stand, with this package alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_testing import run_snippets


def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_snippets(Path(__file__).parents[1] / "README.md")
