"""Each seat has a guide, and a toy that is added in a test of under 60 lines."""

from __future__ import annotations

import re

import pytest

from repo import ROOT

SEATS = ("storage", "reduction", "tier", "policy", "transform", "family-of-models", "sink", "launcher-backend")
MOST_LINES = 60


@pytest.mark.parametrize("seat", SEATS)
def test_the_guide_names_its_toy_which_is_short(seat):
    guide = (ROOT / "docs" / "developing" / "extension-points" / f"{seat}.md").read_text()
    toy = f"tests-integration/extension_points/test_{seat.replace('-', '_')}.py"
    assert f"`{toy}`" in guide
    lines = [line for line in (ROOT / toy).read_text().splitlines() if line.strip()]
    assert len(lines) < MOST_LINES


@pytest.mark.parametrize("seat", SEATS)
def test_files_that_a_guide_names_are_there(seat):
    guide = (ROOT / "docs" / "developing" / "extension-points" / f"{seat}.md").read_text()
    named = re.findall(r"`((?:packages|tests-integration|ds_\w+)/[\w/.-]+\.py)`", guide)
    for name in named:
        package = name.split("/")[0].removeprefix("ds_")
        assert (ROOT / name).is_file() or (ROOT / "packages" / package / "src" / name).is_file(), name
