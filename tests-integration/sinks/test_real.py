"""Sinks of services against the services' own libraries, offline: `nox -s sinks`. Each is read back as its library wrote it."""

from __future__ import annotations

import http.server
import json
import struct
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ds_config
import ds_monitor as m
from ds_monitor import metric_names
from ds_monitor.config import MonitorConfig, make_sinks


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No library finds a key, a home or a network here."""
    monkeypatch.chdir(tmp_path)
    home = str(tmp_path / "home")
    Path(home).mkdir()
    for name, value in {
        "HOME": home, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path), "COMET_OFFLINE_DIRECTORY": str(tmp_path),
        "COMET_DISABLE_AUTO_LOGGING": "1", "COMET_AUTO_LOG_OUTPUT_LOGGER": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "COMET_LOGGING_CONSOLE": "ERROR", "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield
    m.shutdown()


def run(config: dict[str, Any], rank: int = 0) -> None:
    """Three steps under a configuration, as an engine reports them."""
    m.configure(make_sinks(ds_config.load(MonitorConfig, config), rank=rank))
    m.event("engine/plan", stage=2)
    for step in (1, 2, 3):
        m.set_step(step, samples=8 * step)
        m.gauge(metric_names.LOSS, 1 / step)
        m.counter(metric_names.TOKENS, 100)
        with m.span("engine/forward", unit="a"):
            pass
    m.shutdown()


def asked(sink: str, ranks: str = "lead", **options: Any) -> dict[str, Any]:
    return {"monitor": {"sinks": [{"sink": sink, "ranks": ranks, "options": options}]}}


def log_records(data: bytes, block: int = 32768) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, which starts after wandb's header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # no header fits into the end of a block
            at += block - at % block
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or last
            yield parts
            parts = b""


def wandb_rows(tmp_path: Path) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    rows = []
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            )
    return rows


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run({"wandb": {"enabled": True, "project": "p", "group": "g"}})
    rows = wandb_rows(tmp_path)
    assert [row[metric_names.LOSS] for row in rows] == pytest.approx([1.0, 0.5, 1 / 3])
    assert [row["Train/samples"] for row in rows] == [8, 16, 24]
    assert [row[metric_names.TOKENS] for row in rows] == [100, 200, 300]


def test_comet_offline(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")
    section = {
        "enabled": True,
        "samples_log_interval": 0,
        "online": False,
        "project": "p",
        "experiment_name": "n",
        "api_key": "k" * 25,
    }
    run({"comet": section})
    (file,) = tmp_path.rglob("*.zip")
    with zipfile.ZipFile(file) as archive:
        told = [json.loads(line) for line in archive.read("messages.json").decode().splitlines()]
    metrics = [message["payload"]["metric"] for message in told if message["type"] == "metric_msg"]
    losses = [
        (metric["step"], metric["metricValue"]) for metric in metrics if metric["metricName"] == metric_names.LOSS
    ]
    assert losses == [(8, 1.0), (16, 0.5), (24, pytest.approx(1 / 3))]


def test_mlflow_in_files(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"file://{tmp_path}/runs"
    run(asked("mlflow", "all", tracking_uri=uri, experiment="e", run_name="r"), rank=1)
    client = mlflow.MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (found.info.run_name, found.info.status, found.data.tags["rank"]) == ("r-rank1", "FINISHED", "1")
    history = client.get_metric_history(found.info.run_id, metric_names.LOSS)
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert [file.path for file in client.list_artifacts(found.info.run_id, "engine")] == ["engine/plan.json"]


class Collector(http.server.BaseHTTPRequestHandler):
    """An OTLP/HTTP collector that keeps what it is sent."""

    sent: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        self.sent.append((self.path, body))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Silent."""


def test_opentelemetry_over_otlp() -> None:
    pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    Collector.sent = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        run(asked("opentelemetry", endpoint=f"http://127.0.0.1:{server.server_port}", service="job", spans=True))
        server.shutdown()
    metrics, spans, services = {}, [], set()
    for path, body in Collector.sent:
        if path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
                for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                    points = metric.gauge.data_points or metric.sum.data_points
                    metrics[metric.name] = points[-1].as_double
        else:
            assert path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans += [span.name for scope in resource.scope_spans for span in scope.spans]
    assert services == {"job"}
    # The SDK makes names of instruments lower case: they are told apart without case.
    assert metrics[metric_names.LOSS.lower()] == pytest.approx(1 / 3)
    assert metrics[metric_names.TOKENS.lower()] == 300
    assert sorted(spans) == ["engine/forward"] * 3 + ["engine/plan"]
