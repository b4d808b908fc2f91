"""MLflow: a run of an experiment, one batch of metrics a step."""

from __future__ import annotations

from typing import Any

from ds_monitor.record import Measurement, RecordKind
from ds_monitor.sinks.sink import Axis, ScalarSink, position, require

__all__ = ["MlflowSink"]


class MlflowSink(ScalarSink):
    """Metrics by step; an event as an artifact `<name>.json` with its attributes.

    Args:
        tracking_uri: a server, or `sqlite:///runs.db`; by default what MLflow's variables say.
        experiment: made if there is none of that name.
        run_name: of the new run; MLflow invents one by default.
        axis: the horizontal axis.
        rank: of this process where each rank has a sink: a run each, with the tag `rank`.
    Raises:
        UnsupportedError: mlflow is not installed ("monitor-extra").
    """

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment: str = "ds",
        run_name: str | None = None,
        axis: Axis = "step",
        rank: int | None = None,
    ) -> None:
        super().__init__(axis)
        mlflow: Any = require("mlflow", "mlflow", "mlflow-skinny")
        self._metric = require("mlflow.entities", "mlflow").Metric
        self._client = mlflow.MlflowClient(tracking_uri)
        existing = self._client.get_experiment_by_name(experiment)
        where = self._client.create_experiment(experiment) if existing is None else existing.experiment_id
        tags = {} if rank is None else {"rank": str(rank)}
        named = run_name if run_name is None or rank is None else f"{run_name}-rank{rank}"
        self.run_id: str = self._client.create_run(where, tags=tags, run_name=named).info.run_id
        self._batch: list[Any] = []

    def write(self, record: Measurement) -> None:
        """Collect numbers; store events, histograms and texts as artifacts."""
        super().write(record)
        if record.kind is RecordKind.EVENT:
            attributes = {key: str(value) for key, value in record.attrs.items()}
            self._client.log_dict(self.run_id, attributes, f"{record.name}.json")
        elif record.kind is RecordKind.HISTOGRAM:
            x = position(record, self.axis)
            self._client.log_dict(self.run_id, dict(record.attrs), f"{record.name}.{x}.histogram.json")
        elif record.kind is RecordKind.TEXT:
            self._client.log_text(self.run_id, record.attrs["text"], f"{record.name}.{position(record, self.axis)}.txt")

    def end_step(self, step: int) -> None:
        """Send the step in one request."""
        super().end_step(step)
        batch, self._batch = self._batch, []
        if batch:
            self._client.log_batch(self.run_id, metrics=batch)

    def put(self, name: str, value: float, x: int, time_s: float) -> None:
        """Add one number to the batch."""
        self._batch.append(self._metric(name, value, int(time_s * 1e3), x))

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self.run_id)
