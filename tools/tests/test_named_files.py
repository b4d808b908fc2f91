"""Docstrings and pages send readers to files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`((?:[\w.-]+/)*\w+\.py)`")
PAGES = ("docs/concepts", "docs/developing", "docs/decisions")
UPSTREAMS = {"ds_to_universal.py", "zero_to_fp32.py", "zero_to_torch.py"}  # files of DeepSpeed's
PATTERNS = {"NAME.py"}


def _known() -> dict[str, set[str]]:
    """Paths of this repository's Python files by their names."""
    known: dict[str, set[str]] = {}
    for folder in ("packages", "tools", "native", "tests-integration"):
        for path in (ROOT / folder).rglob("*.py"):
            known.setdefault(path.name, set()).add(f"/{path.relative_to(ROOT)}")
    return known | {"noxfile.py": {"/noxfile.py"}}


@pytest.mark.parametrize("folder", [*PAGES, *(f"packages/{p.name}/src" for p in sorted((ROOT / "packages").iterdir()))])
def test_files_that_are_named_exist(folder):
    known, missing = _known(), []
    package = f"/{'/'.join(folder.split('/')[:2])}/"
    for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for named in NAMED.findall(line):
                name = named.rpartition("/")[2]
                places = known.get(name, set())
                if path.suffix == ".py" and named == name:  # without a folder: a file of the same package
                    places = {place for place in places if place.startswith(package)}
                if name not in UPSTREAMS | PATTERNS and not any(place.endswith(f"/{named}") for place in places):
                    missing.append(f"{path.relative_to(ROOT)}:{number}: {named}")
    assert not missing
