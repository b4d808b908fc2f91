"""Histograms and texts in every sink that has pictures of them, purge_step, and flops counted: beside torch's writer and counter."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import ds_monitor as m
from ds_config.errors import ConfigError
from ds_monitor import RecordKind
from ds_monitor.model_flops import count_flops
from ds_monitor.value_counts import ValueCounts, count_values

torch = pytest.importorskip("torch")
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 2.0, math.nan, math.inf]


def board(folder: Path) -> Any:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulators.EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


@pytest.mark.parametrize(
    "values", [[1e308, -1e308], [1e20, 1e20], [1.7e308], [-1.7e308, -1.7e308], [5e-324, 0.0], [3e38, -3e38]]
)
def test_numbers_at_the_ends_of_their_range_are_counted(values: list[float]) -> None:
    """A histogram of them raised in the training loop: a difference overflowed, or was 0."""
    for counted in (count_values(values, 4), count_values(torch.tensor(values, dtype=torch.float64), 4)):
        assert (counted.min, counted.max, sum(counted.counts)) == (min(values), max(values), len(values))
        assert all(math.isfinite(edge) for edge in counted.edges)
        assert list(counted.edges) == sorted(counted.edges)
    assert count_values(torch.tensor([3e38, -3e38]), 2).counts == (1, 1)


def test_numbers_arrays_and_tensors_are_counted_alike() -> None:
    expected = ValueCounts(6, 0.0, 2.0, 7.0, 0.25 + 1 + 2.25 + 8, 2, (0.0, 0.5, 1.0, 1.5, 2.0), (1, 1, 1, 3))
    assert count_values(VALUES, 4) == expected
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert count_values(torch.tensor(VALUES, dtype=dtype), 4) == expected
    assert count_values(torch.tensor(VALUES[:6]).numpy(), 4) == count_values(VALUES[:6], 4)
    drawn = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = count_values(drawn, 20), torch.histogram(drawn, 20)
    assert list(ours.counts) == theirs.hist.int().tolist()
    assert ours.edges == pytest.approx(theirs.bin_edges.tolist())
    assert count_values([3.0, 3.0], 2).counts == (2, 0)
    assert count_values([math.nan]).nonfinite == 1
    assert count_values([]).num == 0
    with pytest.raises(ConfigError, match="monitor-bins"):
        count_values(VALUES, 0)


def test_tensorboard_reads_back_histograms_and_texts_as_torch_writes_them(tmp_path: Path) -> None:
    m.configure([m.TensorBoardSink(tmp_path / "ours")])
    m.set_step(7)
    m.histogram("weights", torch.tensor(VALUES), bins=4)
    m.text("sample", "**once** upon")
    m.shutdown()
    ours = board(tmp_path / "ours")
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    counts = count_values(VALUES, 4)
    with tensorboard.SummaryWriter(str(tmp_path / "theirs")) as writer:
        writer.add_histogram_raw("weights", counts.min, counts.max, counts.num, counts.sum, counts.sum_squares, list(counts.edges),
                                 [0, *counts.counts], 7)  # fmt: skip
        writer.add_text("sample", "**once** upon", 7)
    theirs = board(tmp_path / "theirs")
    (a,), (b,) = ours.Histograms("weights"), theirs.Histograms("weights")
    assert (a.step, a.histogram_value) == (b.step, b.histogram_value)
    (c,), (d,) = ours.Tensors("sample"), theirs.Tensors("sample/text_summary")
    assert list(c.tensor_proto.string_val) == list(d.tensor_proto.string_val)


def steps(folder: Path, first: int, last: int, value: float, **options: Any) -> None:
    m.configure([m.TensorBoardSink(folder, **options)])
    m.event("config", begins=first)  # before the job says its step
    for step in range(first, last + 1):
        m.set_step(step)
        m.gauge("loss", value)
    m.shutdown()


def test_a_resumed_job_purges_what_it_repeats(tmp_path: Path) -> None:
    steps(tmp_path / "resumed", 1, 5, 1.0)
    steps(tmp_path / "resumed", 4, 6, 2.0)
    curve = [(s.step, s.value) for s in board(tmp_path / "resumed").Scalars("loss")]
    assert curve == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
    steps(tmp_path / "asked", 1, 5, 1.0)
    steps(tmp_path / "asked", 5, 6, 2.0, purge_step=3)
    assert [s.step for s in board(tmp_path / "asked").Scalars("loss")] == [1, 2, 5, 6]
    steps(tmp_path / "kept", 1, 3, 1.0)
    steps(tmp_path / "kept", 2, 3, 2.0, purge_step=-1)
    assert len(board(tmp_path / "kept").Scalars("loss")) == 5


def test_other_sinks_take_them_or_leave_them_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = []
    run = types.SimpleNamespace(
        define_metric=lambda *a, **k: None,
        log=rows.append,
        finish=lambda: None,
        config=types.SimpleNamespace(update=lambda *a, **k: None),
    )
    fake = types.SimpleNamespace(
        init=lambda **k: run,
        Histogram=lambda np_histogram: ("histogram", np_histogram),
        Html=lambda text: ("html", text),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sent: list[tuple[str, Any]] = []
    experiment = types.SimpleNamespace(
        log_text=lambda text, step, metadata: sent.append((text, step, metadata)),
        log_asset_data=lambda data, name, step: sent.append((name, data)),
        log_metrics=lambda row, step: None, end=lambda: None,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "comet_ml", types.SimpleNamespace(start=lambda **k: experiment))
    memory = m.MemorySink()
    m.configure([m.CsvSink(tmp_path / "csv"), m.JsonlSink(tmp_path / "a.jsonl"), m.WandbSink(), m.CometSink(), memory])
    m.set_step(3)
    m.histogram("lengths", [1, 2, 4], bins=3)
    m.text("sample", "<b>")
    m.gauge("loss", 1.0)
    m.shutdown()
    assert [r.kind for r in memory.records] == [RecordKind.HISTOGRAM, RecordKind.TEXT, RecordKind.GAUGE]
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert lines[0]["attrs"]["counts"] == [1, 1, 1]
    assert lines[0]["value"] == 3
    assert lines[1]["attrs"] == {"text": "<b>"}
    assert [p.name for p in (tmp_path / "csv").iterdir()] == ["loss.csv"]
    edges = lines[0]["attrs"]["edges"]
    assert rows == [
        {
            "lengths": ("histogram", ([1, 1, 1], edges)),
            "sample": ("html", "<pre>&lt;b&gt;</pre>"),
            "Train/step": 3,
            "loss": 1.0,
        }
    ]
    assert sent[0] == ("lengths.3.histogram.json", lines[0]["attrs"])
    assert sent[1] == ("<b>", 3, {"name": "sample"})


def test_without_a_sink_nothing_is_counted() -> None:
    m.configure([])
    m.histogram("x", object())
    m.text("x", "y")


# ---- flops -----------------------------------------------------------------------------------------------------------


def test_flops_are_those_of_torchs_counter_and_of_the_formula() -> None:
    flop_counter = pytest.importorskip("torch.utils.flop_counter")
    layers, hidden, tokens = 3, 16, 10
    model = torch.nn.Sequential(*(torch.nn.Linear(hidden, hidden, bias=False) for _ in range(layers)))
    x = torch.randn(tokens, hidden, requires_grad=True)
    found = count_flops(lambda: model(x).sum().backward())
    assert found.total == 6 * layers * hidden * hidden * tokens  # forward, and twice as many backward
    with flop_counter.FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert found.total == counter.get_total_flops() == sum(found.by_operator.values())
    assert found.by_module["Sequential"] == found.total
    assert found.by_module["Sequential.1"] == found.total // layers
    conv = torch.nn.Conv2d(3, 8, 3)
    assert count_flops(lambda: conv(torch.randn(2, 3, 6, 6))).total == 2 * 2 * 8 * 4 * 4 * 3 * 9


def test_the_module_loads_no_torch() -> None:
    code = "import sys, ds_monitor.model_flops, ds_monitor.value_counts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
