"""Every test starts and ends with an empty sink list at step 0."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ds_monitor


@pytest.fixture(autouse=True)
def _quiet_monitor() -> Iterator[None]:
    ds_monitor.shutdown()
    ds_monitor.set_step(0)
    yield
    ds_monitor.shutdown()
    ds_monitor.set_step(0)


@pytest.fixture
def memory() -> ds_monitor.MemorySink:
    sink = ds_monitor.MemorySink()
    ds_monitor.configure([sink])
    return sink
