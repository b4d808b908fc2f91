"""Importing a package defines names and does nothing else."""

from __future__ import annotations

import importlib.metadata

import pytest

from ds_testing.effects import ImportEffects, import_effects, import_effects_each
from repo.layers import read
from repo.projects import Project, load

PACKAGES = [project for project in load().values() if not project.opt_in]
WITHOUT_TORCH = {f"ds-{name}" for name in read().without_torch}


@pytest.fixture(scope="module")
def found() -> dict[str, ImportEffects]:
    """By module."""
    without = [project.module for project in PACKAGES if project.name in WITHOUT_TORCH]
    others = [project.module for project in PACKAGES if project.name not in WITHOUT_TORCH]
    return import_effects_each(without) | import_effects_each(others, baseline=("torch",))


@pytest.mark.parametrize("project", PACKAGES, ids=[project.name for project in PACKAGES])
def test_import_does_nothing_else(project: Project, found: dict[str, ImportEffects]):
    assert found[project.module].effects == ()
    if project.name in WITHOUT_TORCH:
        assert "torch" not in found[project.module].modules


def test_commands_are_found_without_importing_anything_heavy():
    """`ds --help` lists commands from metadata; loading its own entry must not load torch either."""
    scripts = [e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "ds"]
    assert len(scripts) == 1
    found = import_effects(scripts[0].module)
    assert found.effects == ()
    assert "torch" not in found.modules
