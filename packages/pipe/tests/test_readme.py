"""The README's snippets run, and say what they claim."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds_testing import run_snippets

README = Path(__file__).parents[1] / "README.md"


def test_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = run_snippets(README)
    printed = capsys.readouterr().out
    claims = re.findall(r"#\s+(0F0.*)$", "\n".join(blocks), re.MULTILINE)
    assert claims
    assert all(claim in printed for claim in claims)
