"""TensorBoard event files, written with the `tensorboard` package alone: no torch, no TensorFlow."""

from __future__ import annotations

import json
from pathlib import Path

from ds_monitor.record import Measurement, RecordKind
from ds_monitor.sinks.sink import Axis, ScalarSink, folder_of_rank, position, require

__all__ = ["TensorBoardSink"]


class TensorBoardSink(ScalarSink):
    """Scalars for gauges and counters, texts for events (the resolved configuration, for one).

    Args:
        directory: the run's log directory.
        axis: the horizontal axis.
        rank: of this process where each rank has a sink: its files are in `<directory>/rank<rank>`.
        flush_s: longest time that a written value stays invisible to a TensorBoard that is watching.
    Raises:
        UnsupportedError: tensorboard is not installed ("monitor-extra").
    """

    def __init__(
        self, directory: str | Path, *, axis: Axis = "step", flush_s: float = 5.0, rank: int | None = None
    ) -> None:
        super().__init__(axis)
        self._proto = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = require("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._tensor = require("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        self._types = require("tensorboard.compat.proto.types_pb2", "tensorboard")
        writer = require("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writer = writer.EventFileWriter(str(folder_of_rank(directory, rank)), flush_secs=flush_s)

    def write(self, record: Measurement) -> None:
        """Collect a scalar; write an event at once, as text."""
        if record.kind is not RecordKind.EVENT:
            super().write(record)
            return
        text = json.dumps(dict(record.attrs), default=str, indent=1)
        tensor = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[f"```\n{text}\n```".encode()])
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text")
        )
        value = self._summary.Summary.Value(tag=record.name, metadata=metadata, tensor=tensor)
        self._add(value, position(record, self.axis), record.time_s)

    def put(self, name: str, value: float, x: int, time_s: float) -> None:
        """Write one scalar."""
        self._add(self._summary.Summary.Value(tag=name, simple_value=value), x, time_s)

    def close(self) -> None:
        """Write everything out and end the writer's thread."""
        self._writer.close()

    def _add(self, value: object, x: int, time_s: float) -> None:
        summary = self._summary.Summary(value=[value])
        self._writer.add_event(self._proto.Event(wall_time=time_s, step=x, summary=summary))
