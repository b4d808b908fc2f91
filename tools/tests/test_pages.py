"""Pages that are made from data say what the data says now."""

from __future__ import annotations

import fnmatch
import json
import sys
import tomllib

import pytest

from repo import keys
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
    assert '| <span id="train_batch_size"></span>`train_batch_size`<br>' in text
    assert "*Not built*" in text


def test_every_key_has_a_meaning_and_an_anchor():
    found = list(keys.rows())
    assert [row.path for row in found if not row.meaning] == []
    text = keys.page()
    assert [row.path for row in found if text.count(f'<span id="{row.path}"></span>') != 1] == []


def test_notes_name_keys_that_exist():
    notes, paths = tomllib.loads(keys.NOTES.read_text()), {row.path for row in keys.rows()}
    named = [*notes["own"], *notes["since"], *notes["meaning"]]
    assert [name for name in named if not fnmatch.filter(paths, name)] == []


def test_examples_are_accepted_by_the_models():
    """Those that need no other key: the rest may be refused for its sake, never for their own value's type."""
    from ds_engine import load_config

    tried = 0
    for row in keys.rows():
        if row.example and row.path.count(".") == 0:
            load_config({"train_batch_size": 4, **json.loads("{" + row.example + "}")})
            tried += 1
    assert tried > 10


def test_the_table_of_names_leaves_the_facade_as_it_was(monkeypatch):
    for name in [name for name in sys.modules if name == "deepspeed" or name.startswith("deepspeed.")]:
        monkeypatch.delitem(sys.modules, name)
    assert "DeepSpeedEngine" in PAGES["surface"].text()
    assert not any(name.partition(".")[0] == "deepspeed" for name in sys.modules)
