"""Prometheus: the latest numbers, at an endpoint that a server scrapes or in a file that its node exporter reads."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_config.errors import ConfigError
from ds_monitor.record import Measurement, RecordKind
from ds_monitor.sinks.sink import file_of_rank, require

__all__ = ["PrometheusSink", "metric_name"]

_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_]+")


class PrometheusSink:
    """Every gauge and counter as a metric of its name, every span as seconds and count by name, and `ds_step`, `ds_samples`.

    `Train/Samples/lr` becomes `ds_train_samples_lr`, a counter ends in `_total`, spans are `ds_span_seconds{span="..."}`. Two names
    that become the same are one metric, with the later value. All carry the label `rank`.

    Args:
        port: serve `/metrics` here, plus the rank where each rank has a sink; 0 takes a free one (`port` says which).
        address: the interface; by default the machine itself only.
        path: write this file, for the node exporter's textfile collector; replaced whole, so a reader never sees half of it.
        every_s: least time between two writes of the file; the last state is written at the end.
        rank: of this process where each rank has a sink; also put before the ending of `path`.
    Raises:
        UnsupportedError: prometheus_client is not installed ("monitor-extra").
        ConfigError: neither port nor path ("monitor-sink-options").
    """

    outlives_process = True

    def __init__(
        self,
        *,
        port: int | None = None,
        address: str = "127.0.0.1",
        path: str | Path | None = None,
        every_s: float = 5.0,
        rank: int | None = None,
    ) -> None:
        if port is None and path is None:
            raise ConfigError(
                "the sink `prometheus` has neither a port nor a path",
                code="monitor-sink-options",
                fix='Give options {"port": 9400} for an endpoint, or {"path": "ds.prom"} for a text file.',
            )
        self._client: Any = require("prometheus_client", "prometheus")
        self._core: Any = require("prometheus_client.core", "prometheus")
        self._rank = str(rank or 0)
        self._lock = threading.Lock()
        self._gauges: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._spans: dict[str, tuple[int, float]] = {}
        self._registry = self._client.CollectorRegistry()
        self._registry.register(self)
        self._path = None if path is None else file_of_rank(path, rank)
        self._every_s, self._written_s = every_s, float("-inf")
        self.port: int | None = None
        self._server: Any = None
        if port is not None:
            wanted = port + (rank or 0) if port else 0
            self._server, _ = self._client.start_http_server(wanted, address, registry=self._registry)
            self.port = self._server.server_port

    def write(self, record: Measurement) -> None:
        """Note the value."""
        with self._lock:
            if record.kind is RecordKind.GAUGE:
                self._gauges[record.name] = record.value
            elif record.kind is RecordKind.COUNTER:
                self._totals[record.name] = self._totals.get(record.name, 0.0) + record.value
            elif record.kind is RecordKind.SPAN:
                count, seconds = self._spans.get(record.name, (0, 0.0))
                self._spans[record.name] = (count + 1, seconds + record.value)
            self._gauges["step"] = record.step
            if record.samples is not None:
                self._gauges["samples"] = record.samples

    def end_step(self, step: int) -> None:
        """Write the file, unless it was written a moment ago."""
        if self._path is not None and time.monotonic() - self._written_s >= self._every_s:
            self._write_file(self._path)

    def close(self) -> None:
        """Write the last state and stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._path is not None:
            self._write_file(self._path)

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of a scrape, on the thread of prometheus_client."""
        with self._lock:
            gauges, totals, spans = dict(self._gauges), dict(self._totals), dict(self._spans)
        for kind, values in ((self._core.GaugeMetricFamily, gauges), (self._core.CounterMetricFamily, totals)):
            for name, (label, value) in {metric_name(label): (label, value) for label, value in values.items()}.items():
                family = kind(name, label, labels=["rank"])
                family.add_metric([self._rank], value)
                yield family
        if spans:
            family = self._core.SummaryMetricFamily("ds_span_seconds", "wall-clock time", labels=["span", "rank"])
            for name, (count, seconds) in spans.items():
                family.add_metric([name, self._rank], count, seconds)
            yield family

    def _write_file(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._client.write_to_textfile(str(path), self._registry)
        self._written_s = time.monotonic()


def metric_name(name: str) -> str:
    """Convert a metric name to the form that Prometheus allows: `Train/Samples/lr` -> `ds_train_samples_lr`."""
    return "ds_" + _FORBIDDEN.sub("_", name).strip("_").lower()
