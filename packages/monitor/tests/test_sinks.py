"""What each sink writes, read back with the tools its readers use."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ds_monitor as m
from ds_config.errors import ConfigError, UnsupportedError
from ds_monitor import RecordKind, metric_names
from ds_monitor.sinks.progress import duration
from ds_monitor.sinks.sink import ScalarSink


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def train(first: int = 1, last: int = 3) -> None:
    """Three steps of 8 samples and 100 tokens, two micro-batches each."""
    for step in range(first, last + 1):
        m.set_step(step, samples=8 * step)
        with m.span("forward", micro=0):
            m.gauge(metric_names.LOSS, 99.0)  # replaced by the second value of the step
        m.gauge(metric_names.LOSS, 1 / step)
        m.counter(metric_names.TOKENS, 60)
        m.counter(metric_names.TOKENS, 40)
    m.shutdown()


class Rows(ScalarSink):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, float, int]] = []

    def put(self, name: str, value: float, x: int, time_s: float) -> None:
        self.seen.append((name, value, x))


def test_scalar_sinks_get_one_value_per_name_and_step() -> None:
    sink = Rows()
    m.configure([sink])
    train()
    assert sink.seen == [
        (metric_names.LOSS, 1.0, 1),
        (metric_names.TOKENS, 100.0, 1),
        (metric_names.LOSS, 0.5, 2),
        (metric_names.TOKENS, 200.0, 2),
        (metric_names.LOSS, 1 / 3, 3),
        (metric_names.TOKENS, 300.0, 3),
    ]


def test_csv_has_the_files_and_headers_dashboards_expect(tmp_path: Path) -> None:
    m.configure([m.CsvSink(tmp_path / "logs", axis="samples")])
    train()
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["Train_Samples_train_loss.csv", "Train_tokens.csv"]
    assert rows(tmp_path / "logs/Train_Samples_train_loss.csv") == [
        ["step", "train_loss"],
        ["8", "1.0"],
        ["16", "0.5"],
        ["24", str(1 / 3)],
    ]


def test_csv_is_continued_by_a_resumed_job_with_one_header(tmp_path: Path) -> None:
    for first, last in ((1, 2), (3, 4)):
        m.configure([m.CsvSink(tmp_path)])
        train(first, last)
    assert [row[0] for row in rows(tmp_path / "Train_tokens.csv")] == ["step", "1", "2", "3", "4"]


def test_csv_makes_no_directory_before_the_first_value(tmp_path: Path) -> None:
    m.configure([m.CsvSink(tmp_path / "logs")])
    m.shutdown()
    assert not (tmp_path / "logs").exists()


def test_jsonl_keeps_every_record_and_values_json_has_no_number_for(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.jsonl"
    m.configure([m.JsonlSink(path)])
    m.gauge("loss", math.nan)
    m.gauge("loss", -math.inf)
    m.event("config", where=Path("x"), degree=2)
    with m.span("forward", micro=1):
        pass
    m.shutdown()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["name"]) for line in lines] == [
        ("gauge", "loss"),
        ("gauge", "loss"),
        ("event", "config"),
        ("span", "forward"),
    ]
    assert [line["value"] for line in lines[:2]] == ["nan", "-inf"]
    assert lines[2]["attrs"] == {"where": "x", "degree": 2}


def test_an_odd_record_costs_no_sink(tmp_path: Path) -> None:
    """A name that no file can have, or attributes that JSON cannot hold, ended the sink for the rest of the run."""
    m.configure([m.JsonlSink(tmp_path / "a.jsonl"), m.CsvSink(tmp_path / "csv")])
    itself: list[Any] = []
    itself.append(itself)
    m.event("odd", itself=itself)
    m.event("keys", by={(1, 2): 3})
    names = ["x" * 300 + "1", "x" * 300 + "2", "a\0b", "\ud800"]
    for name in [*names, "loss"]:
        m.gauge(name, 1.0)
    assert len(m.active_sinks()) == 2
    m.shutdown()
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["odd", "keys", *names, "loss"]
    assert lines[0]["attrs"] == {"itself": "[[...]]"}
    assert len(list((tmp_path / "csv").iterdir())) == 5


def test_jsonl_leaves_out_kinds_and_lines_are_visible_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    m.configure([m.JsonlSink(path, kinds=[RecordKind.GAUGE])])
    m.set_step(1)
    m.gauge("loss", 1.0)
    m.counter("tokens", 5)
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["loss"]


def test_tensorboard_reads_back_scalars_and_the_events_text(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    m.configure([m.TensorBoardSink(tmp_path, axis="samples")])
    m.event("config", zero={"stage": 2})
    train()
    board = accumulators.EventAccumulator(str(tmp_path))
    board.Reload()
    assert [(s.step, s.value) for s in board.Scalars(metric_names.TOKENS)] == [(8, 100.0), (16, 200.0), (24, 300.0)]
    assert [s.value for s in board.Scalars(metric_names.LOSS)] == pytest.approx([1.0, 0.5, 1 / 3])
    assert b'"stage": 2' in board.Tensors("config")[0].tensor_proto.string_val[0]


def test_progress_without_a_terminal_writes_plain_lines() -> None:
    out = io.StringIO()
    m.configure([m.ProgressSink(10, file=out, every_s=0)])
    train()
    lines = out.getvalue().splitlines()
    assert len(lines) == 3  # the last state is not said twice
    assert lines[1].startswith("step 2/10  loss 0.5000  ")
    assert "tokens/s" in lines[1]
    assert lines[1].endswith(" left")
    assert "\x1b" not in out.getvalue()


def test_progress_says_the_last_state_at_the_end() -> None:
    out = io.StringIO()
    m.configure([m.ProgressSink(3, file=out, every_s=3600)])
    train()
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 3/3"]


def test_progress_knows_no_loss_before_one_is_reported() -> None:
    out = io.StringIO()
    m.configure([m.ProgressSink(3, file=out, every_s=0)])
    with m.span("engine/forward"):
        pass
    m.set_step(1)
    m.gauge(metric_names.LOSS, math.nan)
    m.set_step(2)
    lines = [line.split("  ")[:2] for line in out.getvalue().splitlines()]
    assert lines == [["step 0/3", "loss ?"], ["step 1/3", "loss nan"]]


def test_progress_on_a_terminal_is_a_bar() -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    m.configure([m.ProgressSink(3, file=out)])
    train()
    assert "3/3" in out.getvalue()
    assert "loss 0.3333" in out.getvalue()
    assert "\x1b[?25h" in out.getvalue()  # the cursor is shown again


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (75.9, "1:15"), (3700, "1:01:40"), (math.nan, "?"), (-1, "?")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class FakeRun:
    """The part of a wandb run that is used, as documented by wandb."""

    def __init__(self, **options: Any) -> None:
        self.options, self.logged, self.metrics, self.finished = options, [], [], False
        self.config = types.SimpleNamespace(update=self.update)

    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        self.configured = values

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self.logged.append(row)

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_one_row_a_step_on_its_own_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(**options))
        return runs[0]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    m.configure([m.WandbSink(axis="samples", project="p", entity="team")])
    m.event("config", stage=2)
    train()
    run = runs[0]
    assert run.options == {"project": "p", "entity": "team"}
    assert run.metrics == [("Train/samples", None), ("*", "Train/samples")]
    assert run.logged[1] == {metric_names.LOSS: 0.5, metric_names.TOKENS: 200.0, "Train/samples": 16}
    assert len(run.logged) == 3
    assert run.configured == {"config": {"stage": "2"}}
    assert run.finished


class FakeExperiment:
    """The part of a comet experiment that is used."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, float]]] = []
        self.name = ""
        self.ended = False

    def set_name(self, name: str) -> None:
        self.name = name

    def log_metrics(self, row: dict[str, float], step: int) -> None:
        self.sent.append((step, row))

    def log_parameters(self, values: dict[str, str], prefix: str) -> None:
        self.parameters = (prefix, values)

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize(("interval", "steps"), [(0, [1, 2, 3, 4, 5]), (16, [1, 3, 5]), (100, [1])])
def test_comet_is_thinned_by_samples(monkeypatch: pytest.MonkeyPatch, interval: int, steps: list[int]) -> None:
    experiment, options = FakeExperiment(), {}

    def start(**given: Any) -> FakeExperiment:
        options.update(given)
        return experiment

    monkeypatch.setitem(sys.modules, "comet_ml", types.SimpleNamespace(start=start))
    m.configure([m.CometSink(samples_log_interval=interval, project="p", workspace=None, experiment_name="n")])
    m.event("config", stage=2)
    train(1, 5)
    assert options == {"project": "p"}
    assert experiment.name == "n"
    assert [step for step, _ in experiment.sent] == steps
    assert experiment.sent[0][1] == {metric_names.LOSS: 1.0, metric_names.TOKENS: 100.0}
    assert experiment.parameters == ("config", {"stage": "2"})
    assert experiment.ended


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("wandb", lambda path: m.WandbSink()),
        ("comet_ml", lambda path: m.CometSink()),
        ("tensorboard", lambda path: m.TensorBoardSink(path)),
        ("mlflow", lambda path: m.MlflowSink()),
        ("opentelemetry", lambda path: m.OpenTelemetrySink()),
        ("prometheus_client", lambda path: m.PrometheusSink(path=path)),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, make: Callable[[Path], object]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedError, match=package) as caught:
        make(tmp_path)
    assert caught.value.code == "monitor-extra"
    assert "pip install 'ds-monitor[" in caught.value.fix


def test_sinks_by_name_and_the_nearest_one(tmp_path: Path) -> None:
    assert {"csv", "jsonl", "tensorboard", "progress", "memory", "wandb", "comet"} <= set(m.sink_names())
    assert isinstance(m.make_sink("csv", directory=tmp_path), m.CsvSink)
    with pytest.raises(UnsupportedError, match="`tensorbord`") as caught:
        m.make_sink("tensorbord")
    assert "`tensorboard`" in caught.value.fix


@pytest.mark.parametrize("axis", ["STEP", "time", None])
def test_an_axis_that_no_sink_has_is_refused(tmp_path, axis):
    with pytest.raises(ConfigError, match="axis of CsvSink") as caught:  # was taken for steps
        m.CsvSink(tmp_path, axis=axis)
    assert caught.value.code == "monitor-sink-options"
