"""Versions are found by import name, whatever the distribution is called."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from ds_config.installed import distributions_of, version_of


@pytest.fixture
def renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install, as far as metadata go, a distribution `other-thing` 7.1 that provides `ds_thing`."""
    (tmp_path / "ds_thing").mkdir()
    (tmp_path / "ds_thing" / "__init__.py").write_text("")
    info = tmp_path / "other_thing-7.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-thing\nVersion: 7.1\n")
    (info / "top_level.txt").write_text("ds_thing\n")
    (info / "RECORD").write_text("ds_thing/__init__.py,,\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def test_by_its_usual_name() -> None:
    assert version_of("ds_config") == distributions_of()["ds-config"]


@pytest.mark.usefixtures("renamed")
def test_under_another_name() -> None:
    assert version_of("ds_thing") == "7.1"
    assert distributions_of()["other-thing"] == "7.1"


def test_what_is_not_installed_is_said() -> None:
    with pytest.raises(PackageNotFoundError):
        version_of("ds_nothing_of_this_name")
