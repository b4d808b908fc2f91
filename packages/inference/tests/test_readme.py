"""The README's snippet runs; it compares itself with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_testing import run_snippets

README = Path(__file__).parents[1] / "README.md"


def test_snippets_run() -> None:
    pytest.importorskip("transformers")
    run_snippets(README)
