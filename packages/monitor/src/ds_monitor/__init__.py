"""Spans, counters, gauges and events that cost nothing until a sink is configured; CSV, TensorBoard, JSONL and progress sinks.

Importing this reads no configuration library and no torch. The models of the configuration sections are in
`ds_monitor.config`, the loss curve in `ds_monitor.plot`; both are imported by whoever needs them.
"""

from __future__ import annotations

from ds_monitor.logs import configure_logging, log_requested
from ds_monitor.record import Measurement, RecordKind
from ds_monitor.recording import (
    Run,
    Sink,
    active,
    active_sinks,
    attach,
    configure,
    counter,
    current_step,
    detach,
    event,
    gauge,
    histogram,
    set_step,
    shutdown,
    span,
    span_seconds,
    text,
)
from ds_monitor.sinks import (
    BackgroundSink,
    CometSink,
    CsvSink,
    JsonlSink,
    MemorySink,
    MlflowSink,
    OpenTelemetrySink,
    ProgressSink,
    PrometheusSink,
    ScalarSink,
    TensorBoardSink,
    WandbSink,
    make_sink,
    sink_names,
)

__all__ = [
    "BackgroundSink",
    "CometSink",
    "CsvSink",
    "JsonlSink",
    "Measurement",
    "MemorySink",
    "MlflowSink",
    "OpenTelemetrySink",
    "ProgressSink",
    "PrometheusSink",
    "RecordKind",
    "Run",
    "ScalarSink",
    "Sink",
    "TensorBoardSink",
    "WandbSink",
    "active",
    "active_sinks",
    "attach",
    "configure",
    "configure_logging",
    "counter",
    "current_step",
    "detach",
    "event",
    "gauge",
    "histogram",
    "log_requested",
    "make_sink",
    "set_step",
    "shutdown",
    "sink_names",
    "span",
    "span_seconds",
    "text",
]
