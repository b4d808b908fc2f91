"""Pages that are made from data say what the data says now."""

from __future__ import annotations

import pytest

from repo.pages import PAGES


@pytest.mark.parametrize("name", list(PAGES))
def test_up_to_date(name):
    page = PAGES[name]
    found = page.file.read_text() if page.file.is_file() else ""
    assert found == page.text(), f"run: python tools/pages.py {name}"


def test_packages_page_lists_each_once(projects):
    text = PAGES["packages"].text()
    assert all(text.count(f"| `{project.name}` {project.version} |") == 1 for project in projects.values())


def test_configuration_page_shows_limits_and_history():
    text = PAGES["configuration"].text()
    assert "| `train_batch_size` |" in text
    assert "*Not built*" in text
