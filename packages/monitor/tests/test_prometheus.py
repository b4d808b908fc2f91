"""What Prometheus reads, as its own client parses it: from the endpoint and from the text file."""

from __future__ import annotations

import math
import socket
import urllib.request
from pathlib import Path

import pytest

import ds_config
import ds_monitor as m
from ds_config.errors import ConfigError
from ds_monitor import metric_names
from ds_monitor.config import MonitorConfig, make_sinks
from ds_monitor.sinks.prometheus import metric_name

parser = pytest.importorskip("prometheus_client.parser")


def parsed(text: str) -> dict[str, tuple[float, dict[str, str]]]:
    return {
        sample.name + sample.labels.pop("span", ""): (sample.value, sample.labels)
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def report() -> None:
    for step in (1, 2):
        m.set_step(step, samples=8 * step)
        m.gauge(metric_names.LOSS, math.nan if step == 1 else 0.5)
        m.counter(metric_names.TOKENS, 100)
        with m.span("engine/forward", unit="x"):
            pass


def test_the_endpoint_is_scraped_while_the_job_runs() -> None:
    m.configure([sink := m.PrometheusSink(port=0)])
    report()
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        found = parsed(answer.read().decode())
    assert found["ds_train_samples_train_loss"] == (0.5, {"rank": "0"})
    assert found["ds_train_tokens_total"] == (200.0, {"rank": "0"})
    assert found["ds_step"][0] == 2
    assert found["ds_samples"][0] == 16
    assert found["ds_span_seconds_countengine/forward"][0] == 2
    m.shutdown()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", sink.port)) != 0


def test_the_text_file_of_each_rank_is_whole_and_ends_with_the_last_state(tmp_path: Path) -> None:
    m.configure([m.PrometheusSink(path=tmp_path / "ds.prom", rank=3)])
    report()
    assert not math.isnan(parsed((tmp_path / "ds.rank3.prom").read_text())["ds_step"][0])
    m.shutdown()
    found = parsed((tmp_path / "ds.rank3.prom").read_text())
    assert found["ds_train_samples_train_loss"] == (0.5, {"rank": "3"})
    assert [file.name for file in tmp_path.iterdir()] == ["ds.rank3.prom"]


def test_a_sink_that_goes_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither a port nor a path"):
        m.PrometheusSink()


def test_a_port_in_use_is_told_and_the_other_sinks_go_on(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        asked = [
            {"sink": "prometheus", "options": {"port": taken.getsockname()[1]}},
            {"sink": "jsonl", "options": {"path": str(tmp_path / "a.jsonl")}},
        ]
        config = ds_config.load(MonitorConfig, {"monitor": {"sinks": asked}})
        with pytest.warns(RuntimeWarning, match="prometheus could not start.*in use"):
            m.configure(make_sinks(config))
    report()
    m.shutdown()
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("name", "metric"),
    [("Train/Samples/lr", "ds_train_samples_lr"), ("moe/model.layers.0/dropped", "ds_moe_model_layers_0_dropped")],
)
def test_metric_names(name: str, metric: str) -> None:
    assert metric_name(name) == metric
