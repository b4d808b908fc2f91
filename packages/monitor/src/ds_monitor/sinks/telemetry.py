"""OpenTelemetry: metrics, and spans where they are asked for, sent by its SDK over OTLP/HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ds_monitor.record import Measurement, RecordKind
from ds_monitor.sinks.sink import ScalarSink, require

__all__ = ["OpenTelemetrySink"]

_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_.\-/]+")


class OpenTelemetrySink(ScalarSink):
    """Gauges as gauges, counters as counters; spans as spans, and events as spans of no length.

    Args:
        endpoint: base address of a collector (`http://host:4318`); by default what the variables of OpenTelemetry say.
        service: `service.name` of what is sent.
        headers: sent with every request.
        spans: whether spans and events are sent: one for every collective of every step, so by default not.
        every_s: time between two sendings of metrics.
        rank: of this process, as the attribute `rank`.
    Raises:
        UnsupportedError: the SDK or its OTLP exporter is not installed ("monitor-extra").
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        service: str = "ds",
        headers: Mapping[str, str] | None = None,
        spans: bool = False,
        every_s: float = 10.0,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        resources = require("opentelemetry.sdk.resources", "opentelemetry")
        metrics = require("opentelemetry.sdk.metrics", "opentelemetry")
        sending = require("opentelemetry.sdk.metrics.export", "opentelemetry")
        exporter = require("opentelemetry.exporter.otlp.proto.http.metric_exporter", "opentelemetry")
        resource = resources.Resource.create({"service.name": service, "rank": rank or 0})
        base = None if endpoint is None else endpoint.rstrip("/")
        header_dict = None if headers is None else dict(headers)
        reader = sending.PeriodicExportingMetricReader(
            exporter.OTLPMetricExporter(endpoint=base and f"{base}/v1/metrics", headers=header_dict),
            export_interval_millis=every_s * 1e3,
        )
        self._metrics = metrics.MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._meter = self._metrics.get_meter("ds_monitor")
        self._instruments: dict[str, Any] = {}
        self._traces: Any = None
        if spans:
            trace = require("opentelemetry.sdk.trace", "opentelemetry")
            batches = require("opentelemetry.sdk.trace.export", "opentelemetry")
            out = require("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry")
            self._traces = trace.TracerProvider(resource=resource, shutdown_on_exit=False)
            send = out.OTLPSpanExporter(endpoint=base and f"{base}/v1/traces", headers=header_dict)
            self._traces.add_span_processor(batches.BatchSpanProcessor(send))
            self._tracer = self._traces.get_tracer("ds_monitor")

    def write(self, record: Measurement) -> None:
        """Add to a counter, collect a gauge, send a span."""
        if record.kind is RecordKind.COUNTER:
            self._instrument(record.name, "create_counter").add(record.value)
        elif record.kind is RecordKind.GAUGE:
            super().write(record)
        elif self._traces is not None and record.kind is not RecordKind.HISTOGRAM:
            attrs = {
                key: value if isinstance(value, str | bool | int | float) else str(value)
                for key, value in record.attrs.items()
            }
            began_ns = int(record.time_s * 1e9)
            span = self._tracer.start_span(record.name, start_time=began_ns, attributes={"step": record.step, **attrs})
            span.end(end_time=began_ns + int(record.value * 1e9))

    def put(self, name: str, value: float, x: int, time_s: float) -> None:
        """Set one gauge."""
        self._instrument(name, "create_gauge").set(value)

    def close(self) -> None:
        """Send what is left."""
        self._metrics.shutdown()
        if self._traces is not None:
            self._traces.shutdown()

    def _instrument(self, name: str, make: str) -> Any:
        if name not in self._instruments:
            self._instruments[name] = getattr(self._meter, make)(_FORBIDDEN.sub("_", name)[:255])
        return self._instruments[name]
