"""TensorBoard event files, written with the `tensorboard` package alone: no torch, no TensorFlow."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ds_monitor.record import Measurement, RecordKind
from ds_monitor.sinks.sink import Axis, ScalarSink, folder_of_rank, position, require

__all__ = ["TensorBoardSink"]


class TensorBoardSink(ScalarSink):
    """Scalars for gauges and counters, histograms, texts, also for events (the resolved configuration, for one).

    TensorBoard forgets what an earlier job wrote for the steps that this one repeats: when the directory has event files already, from
    the first scalar on; `purge_step` names the step, as of torch's SummaryWriter.

    Args:
        directory: the run's log directory.
        axis: the horizontal axis.
        rank: of this process where each rank has a sink: its files are in `<directory>/rank<rank>`.
        purge_step: values of earlier files from this place of the axis on are no longer shown. By default that of the first scalar; -1 for none.
        flush_s: longest time that a written value stays invisible to a TensorBoard that is watching.
    Raises:
        UnsupportedError: tensorboard is not installed ("monitor-extra").
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        axis: Axis = "step",
        flush_s: float = 5.0,
        rank: int | None = None,
        purge_step: int | None = None,
    ) -> None:
        super().__init__(axis)
        self._proto = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = require("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._tensor = require("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        self._types = require("tensorboard.compat.proto.types_pb2", "tensorboard")
        writer = require("tensorboard.summary.writer.event_file_writer", "tensorboard")
        folder = folder_of_rank(directory, rank)
        self._continues = purge_step is None and folder.is_dir() and any(folder.glob("events.out.tfevents.*"))
        self._histogram = require("tensorboard.compat.proto.summary_pb2", "tensorboard").HistogramProto
        self._writer = writer.EventFileWriter(str(folder), flush_secs=flush_s)
        if purge_step is not None and purge_step >= 0:
            self._purge(purge_step)

    def write(self, record: Measurement) -> None:
        """Collect a scalar; write an event at once, as text, and a text or a histogram."""
        if record.kind is RecordKind.EVENT:
            listing = json.dumps(dict(record.attrs), default=str, indent=1)
            self._put_text(record, f"```\n{listing}\n```")
        elif record.kind is RecordKind.TEXT:
            self._put_text(record, record.attrs["text"])
        elif record.kind is RecordKind.HISTOGRAM:
            self._put_histogram(record)
        else:
            super().write(record)

    def _put_histogram(self, record: Measurement) -> None:
        a = record.attrs
        # A bucket has what is below its limit: the first, of nothing, says where the lowest begins.
        limits, counts = list(a["edges"]), [0, *a["counts"]]
        histogram = self._histogram(
            min=a["min"],
            max=a["max"],
            num=record.value,
            sum=a["sum"],
            sum_squares=a["sum_squares"],
            bucket_limit=limits,
            bucket=counts,
        )
        self._add(
            self._summary.Summary.Value(tag=record.name, histo=histogram), position(record, self.axis), record.time_s
        )

    def _put_text(self, record: Measurement, content: str) -> None:
        tensor = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[content.encode()])
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text")
        )
        value = self._summary.Summary.Value(tag=record.name, metadata=metadata, tensor=tensor)
        self._add(value, position(record, self.axis), record.time_s)

    def put(self, name: str, value: float, x: int, time_s: float) -> None:
        """Write one scalar."""
        if self._continues:
            self._continues = False
            self._purge(x)
        self._add(self._summary.Summary.Value(tag=name, simple_value=value), x, time_s)

    def close(self) -> None:
        """Write everything out and end the writer's thread."""
        self._writer.close()

    def _purge(self, step: int) -> None:
        """Tell readers that a job starts at `step`: what earlier files have from there on was repeated."""
        version = self._proto.Event(wall_time=time.time(), step=step, file_version="brain.Event:2")
        started = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._writer.add_event(version)
        self._writer.add_event(self._proto.Event(wall_time=time.time(), step=step, session_log=started))

    def _add(self, value: object, x: int, time_s: float) -> None:
        summary = self._summary.Summary(value=[value])
        self._writer.add_event(self._proto.Event(wall_time=time_s, step=x, summary=summary))
