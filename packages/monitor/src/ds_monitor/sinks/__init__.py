"""Where records go."""

from __future__ import annotations

from ds_monitor.sinks.aside import BackgroundSink
from ds_monitor.sinks.csvfile import CsvSink
from ds_monitor.sinks.experiments import MlflowSink
from ds_monitor.sinks.in_memory import MemorySink
from ds_monitor.sinks.jsonl import JsonlSink
from ds_monitor.sinks.progress import ProgressSink
from ds_monitor.sinks.prometheus import PrometheusSink
from ds_monitor.sinks.services import CometSink, WandbSink
from ds_monitor.sinks.sink import ScalarSink
from ds_monitor.sinks.sink_registry import make_sink, sink_names
from ds_monitor.sinks.telemetry import OpenTelemetrySink
from ds_monitor.sinks.tensorboard import TensorBoardSink

__all__ = [
    "BackgroundSink",
    "CometSink",
    "CsvSink",
    "JsonlSink",
    "MemorySink",
    "MlflowSink",
    "OpenTelemetrySink",
    "ProgressSink",
    "PrometheusSink",
    "ScalarSink",
    "TensorBoardSink",
    "WandbSink",
    "make_sink",
    "sink_names",
]
