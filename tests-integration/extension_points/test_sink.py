"""A sink: the last value of each metric in a dictionary. This file; found by its name where a package registers it."""

from __future__ import annotations

from unittest import mock

import ds_monitor
from ds_monitor import Measurement, RecordKind
from ds_monitor.sinks import sink_registry


class Latest:
    def __init__(self, prefix: str = "") -> None:
        self.prefix, self.values, self.closed = prefix, {}, False

    def write(self, record: Measurement) -> None:
        if record.kind is RecordKind.GAUGE and record.name.startswith(self.prefix):
            self.values[record.name] = record.value

    def end_step(self, step: int) -> None:
        self.values["step"] = step

    def close(self) -> None:
        self.closed = True


def test_it_hears_what_is_reported_and_is_closed():
    # As `[project.entry-points."ds_monitor.sinks"] latest = "my_package:Latest"` registers it.
    point = mock.Mock(load=lambda: Latest)
    with mock.patch.object(sink_registry, "_points", return_value={"latest": point}):
        sink = sink_registry.make_sink("latest", prefix="loss")
    ds_monitor.attach([sink])
    try:
        ds_monitor.set_step(3)
        ds_monitor.gauge("loss", 2.0)
        ds_monitor.gauge("speed", 9.0)
        ds_monitor.set_step(4)
    finally:
        ds_monitor.detach([sink])
    assert sink.values == {"loss": 2.0, "step": 3}
    assert sink.closed
