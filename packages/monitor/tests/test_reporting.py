"""The sinks as `ds report` shows them."""

from __future__ import annotations

import pytest

from ds_config.report_tables import ReportLevel
from ds_monitor import monitor_report
from ds_monitor.sinks import sink_names


def test_every_sink_is_told_and_what_one_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_report, "find_spec", lambda name: None if name == "wandb" else object())
    found = {check.name: check for check in monitor_report.report().checks}
    assert sorted(found) == sink_names()
    assert (found["csv"].verdict, found["csv"].result) == (ReportLevel.FINE, "of ds-monitor")
    assert (found["wandb"].verdict, found["wandb"].fix) == (ReportLevel.INFO, "pip install 'ds-monitor[wandb]'")


def test_every_extra_that_is_a_sink_has_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_report, "find_spec", lambda name: None)
    lacking = {check.name for check in monitor_report.report().checks if check.verdict is ReportLevel.INFO}
    assert lacking == {"comet", "mlflow", "opentelemetry", "prometheus", "tensorboard", "wandb"}
