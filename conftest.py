"""The order of files when several run at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every process of xdist collects everything and must come to the same order; one process alone keeps pytest's."""
    if not hasattr(config, "workerinput"):
        return
    from repo.suite import dealt

    files = {item: item.path.relative_to(config.rootpath).as_posix() for item in items}
    place = {file: index for index, file in enumerate(dealt(list(dict.fromkeys(files.values()))))}
    items.sort(key=lambda item: place[files[item]])
