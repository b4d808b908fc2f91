"""A pytest plugin: runs the ids of CONFORMANCE_IDS only, and adds how each ended to CONFORMANCE_OUT."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def _write(name: str, outcome: str, reason: str) -> None:
    with open(os.environ["CONFORMANCE_OUT"], "a") as file:
        file.write(json.dumps({"id": name, "outcome": outcome, "why": reason[-300:]}) + "\n")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave the others out."""
    wanted = set(Path(os.environ["CONFORMANCE_IDS"]).read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]


def pytest_runtest_logreport(report: Any) -> None:
    """The call, or the setup that did not come to it."""
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        _write(report.nodeid, report.outcome, "" if report.outcome == "passed" else str(report.longrepr))


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported."""
    if report.failed:
        _write(report.nodeid, "failed", str(report.longrepr))
