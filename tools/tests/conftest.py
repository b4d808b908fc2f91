"""Fixtures over the repository itself."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from repo.projects import Project, load

PROJECTS: Mapping[str, Project] = load()


@pytest.fixture(scope="session")
def projects() -> Mapping[str, Project]:
    return PROJECTS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `project` runs once for each package."""
    if "project" in metafunc.fixturenames:
        metafunc.parametrize("project", PROJECTS.values(), ids=list(PROJECTS))
