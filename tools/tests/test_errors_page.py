"""Every code that is raised is explained, and every explained code is raised."""

from __future__ import annotations

import pytest

from repo.errors import codes, page, sections


def test_every_code_has_a_section(projects):
    explained = sections(page())
    missing = [f"{code} ({where})" for code, where in codes(projects.values()).raised.items() if code not in explained]
    assert missing == [], "add a `## code` section to docs/reference/errors.d/<package>.md"


def test_every_section_has_a_code(projects):
    unused = sorted(sections(page()).keys() - codes(projects.values()).strings)
    assert unused == [], "these sections explain a code that no package names"


def test_sections_say_something():
    thin = [code for code, body in sections(page()).items() if len(body.split()) < 8]
    assert thin == []


def test_the_same_code_twice_is_an_error(tmp_path):
    for name in ("a.md", "b.md"):
        (tmp_path / name).write_text("## same-code\n\nText.\n")
    with pytest.raises(ValueError, match=r"b\.md and a\.md both explain same-code"):
        page(tmp_path)
