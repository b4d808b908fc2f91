"""Weights & Biases and Comet: the step's numbers in one call, on an axis of their own.

Both services refuse or misplace a value whose step is not above the last one, and users log to the same run too. So the
position is sent as data (a metric that the service draws against), not as the service's own step.
"""

from __future__ import annotations

import html
from typing import Any

from ds_monitor.record import Measurement, RecordKind
from ds_monitor.sinks.sink import Axis, ScalarSink, position, require

__all__ = ["CometSink", "WandbSink"]


class WandbSink(ScalarSink):
    """One `run.log` per step, every metric drawn against `Train/step` (or `Train/samples`); events go to the run's config.

    Args:
        axis: the horizontal axis.
        rank: of this process where each rank has a sink: a run each, named by it.
        options: keyword arguments of `wandb.init` (project, entity, group, name, mode, ...).
    Raises:
        UnsupportedError: wandb is not installed ("monitor-extra").
    """

    def __init__(self, *, axis: Axis = "step", rank: int | None = None, **options: Any) -> None:
        super().__init__(axis)
        if rank is not None:
            options["name"] = _named(options.get("name"), rank)
        self._wandb = require("wandb", "wandb")
        self._run = self._wandb.init(**options)
        self._axis_name = f"Train/{axis}"
        self._row: dict[str, Any] = {}
        self._run.define_metric(self._axis_name)
        self._run.define_metric("*", step_metric=self._axis_name)

    def write(self, record: Measurement) -> None:
        """Collect numbers, histograms and texts; add an event's attributes to the run's configuration."""
        super().write(record)
        if record.kind is RecordKind.HISTOGRAM:
            pair = (record.attrs["counts"], record.attrs["edges"])
            self._row[record.name] = self._wandb.Histogram(np_histogram=pair)
        elif record.kind is RecordKind.TEXT:
            self._row[record.name] = self._wandb.Html(f"<pre>{html.escape(record.attrs['text'])}</pre>")
        if record.kind in (RecordKind.HISTOGRAM, RecordKind.TEXT):
            self._row[self._axis_name] = position(record, self.axis)
        if record.kind is RecordKind.EVENT:
            self._run.config.update({record.name: {k: str(v) for k, v in record.attrs.items()}}, allow_val_change=True)

    def end_step(self, step: int) -> None:
        """Send the step as one row."""
        super().end_step(step)
        if self._row:
            row, self._row = self._row, {}
            self._run.log(row)

    def put(self, name: str, value: float, x: int, time_s: float) -> None:
        """Add one number to the row."""
        self._row[name] = value
        self._row[self._axis_name] = x

    def close(self) -> None:
        """Finish the run; waits for the upload."""
        self._run.finish()


class CometSink(ScalarSink):
    """One `log_metrics` per step, thinned by samples.

    Args:
        axis: the horizontal axis.
        samples_log_interval: least number of samples between two rows that are sent; 0 sends all.
        rank: of this process where each rank has a sink: an experiment each, named by it.
        options: keyword arguments of `comet_ml.start` (project, workspace, api_key, experiment_key, online, mode).
            `experiment_name` is set on the experiment.
    Raises:
        UnsupportedError: comet_ml is not installed ("monitor-extra").
    """

    def __init__(
        self, *, axis: Axis = "step", samples_log_interval: int = 0, rank: int | None = None, **options: Any
    ) -> None:
        super().__init__(axis)
        name = options.pop("experiment_name", None)
        if rank is not None:
            name = _named(name, rank)
        known = {key: value for key, value in options.items() if value is not None}
        self._experiment = require("comet_ml", "comet").start(**known)
        if name is not None:
            self._experiment.set_name(name)
        self._interval = samples_log_interval
        self._samples: int | None = None
        self._sent: int | None = None
        self._row: dict[str, float] = {}
        self._x = 0

    def write(self, record: Measurement) -> None:
        """Collect numbers; send texts and histograms; add an event's attributes to the experiment's parameters."""
        super().write(record)
        x = position(record, self.axis)
        if record.kind is RecordKind.TEXT:
            self._experiment.log_text(record.attrs["text"], step=x, metadata={"name": record.name})
        elif record.kind is RecordKind.HISTOGRAM:
            # Its own histograms are made from values; the counted bins are an asset of the experiment.
            self._experiment.log_asset_data(dict(record.attrs), name=f"{record.name}.{x}.histogram.json", step=x)
        self._samples = record.samples
        if record.kind is RecordKind.EVENT:
            self._experiment.log_parameters({k: str(v) for k, v in record.attrs.items()}, prefix=record.name)

    def end_step(self, step: int) -> None:
        """Send the step as one row, unless the last one is too near."""
        super().end_step(step)
        row, self._row = self._row, {}
        near = self._samples is not None and self._sent is not None and self._samples - self._sent < self._interval
        if row and not near:
            self._sent = self._samples
            self._experiment.log_metrics(row, step=self._x)

    def put(self, name: str, value: float, x: int, time_s: float) -> None:
        """Add one number to the row."""
        self._row[name] = value
        self._x = x

    def close(self) -> None:
        """End the experiment; waits for the upload."""
        self._experiment.end()


def _named(name: object, rank: int) -> str:
    return f"rank{rank}" if name is None else f"{name}-rank{rank}"
