"""Fixtures over the repository itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping

import pytest

from repo import imports
from repo.projects import Project, load

PROJECTS: Mapping[str, Project] = load()


@pytest.fixture(scope="session")
def projects() -> Mapping[str, Project]:
    return PROJECTS


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Leave the syntax trees that a file's tests read out of later collections of garbage: a million objects that stay for the next file."""
    before = imports.num_parsed()
    yield
    if imports.num_parsed() != before:
        gc.collect()
        gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `project` runs once for each package."""
    if "project" in metafunc.fixturenames:
        metafunc.parametrize("project", PROJECTS.values(), ids=list(PROJECTS))
