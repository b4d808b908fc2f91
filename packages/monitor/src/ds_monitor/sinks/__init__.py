"""Where records go."""

from __future__ import annotations

from ds_monitor.sinks.base import ScalarSink
from ds_monitor.sinks.csvfile import CsvSink
from ds_monitor.sinks.jsonl import JsonlSink
from ds_monitor.sinks.memory import MemorySink
from ds_monitor.sinks.progress import ProgressSink
from ds_monitor.sinks.registry import make_sink, sink_names
from ds_monitor.sinks.services import CometSink, WandbSink
from ds_monitor.sinks.tensorboard import TensorBoardSink

__all__ = [
    "CometSink",
    "CsvSink",
    "JsonlSink",
    "MemorySink",
    "ProgressSink",
    "ScalarSink",
    "TensorBoardSink",
    "WandbSink",
    "make_sink",
    "sink_names",
]
