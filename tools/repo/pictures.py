"""The pictures of docs/benchmarks: bars made from docs/benchmarks/data, so that a picture never says what no record says."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from repo import ROOT
from repo.bars import Bar, Chart, boxes, svg

__all__ = ["GENERATION", "PICTURES", "file_of", "generation_rates", "text_of"]

FOLDER = ROOT / "docs" / "benchmarks"


def file_of(name: str) -> Path:
    """Where the picture of a page is."""
    if name == "packages":
        return ROOT / "docs" / "assets" / "packages.svg"
    return FOLDER / "img" / f"{name}.svg"


def text_of(name: str) -> str:
    """The picture as SVG."""
    if name == "packages":
        return boxes(_ROWS)
    return svg(PICTURES[name]())


# The drawing of the landing page: what each package is for, from your script down. The order of layers is that of layers.toml.
_ROWS = (
    ("", (("your script", "and its configuration"),)),
    ("the whole", (("ds-engine", "Config, Plan, Engine"), ("ds-inference", "generate, serve"))),
    (
        "each works alone in a plain loop",
        (
            ("ds-zero", "states in shards"),
            ("ds-ckpt", "checkpoints"),
            ("ds-pipe", "stages"),
            ("ds-moe", "experts"),
            ("ds-parallel", "tensors, sequences"),
            ("ds-data", "token files"),
            ("ds-compress", "smaller models"),
        ),
    ),
    (
        "what they stand on",
        (("ds-comm", "ranks, collectives"), ("ds-ops", "kernels, files"), ("ds-accel", "the device")),
    ),
    ("below everything", (("ds-launcher", "ds run"), ("ds-monitor", "who listens"), ("ds-config", "strict settings"))),
)


def _record(name: str) -> Any:
    return json.loads((FOLDER / "data" / f"{name}.json").read_text())


def _bars(values: Mapping[str, float], ours: str = "ds-") -> list[Bar]:
    return [Bar(label, value, "ours" if label.startswith(ours) else "theirs") for label, value in values.items()]


# ---- zero ------------------------------------------------------------------------------------------------------------

_ZERO = {
    "ours1@shm": "ds-zero, stage 1",
    "ours3@shm": "ds-zero, stage 3",
    "ddp": "DDP",
    "fsdp2_keep": "FSDP2, not resharding",
    "fsdp2": "FSDP2",
    "deepspeed1_tuned": "DeepSpeed, stage 1, tuned",
    "deepspeed3_tuned": "DeepSpeed, stage 3, tuned",
}


def _zero_rows() -> Mapping[str, Mapping[str, float]]:
    folder = str(ROOT / "tools" / "bench")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from zero_record import rows_of  # type: ignore[import-not-found]

    rows: Mapping[str, Mapping[str, float]] = rows_of(_record("zero")["results"]["compute-2"])
    return rows


def _step_time() -> Chart:
    rows = _zero_rows()
    floor = Bar("forward + backward alone", rows["fwdbwd"]["step_ms"], "limit")
    bars = [floor, *_bars({label: rows[engine]["step_ms"] for engine, label in _ZERO.items()})]
    return Chart(
        "Time of a step",
        "GPT of 17 million parameters, two CPU ranks, fp32, each with its best transport; less is better",
        "ms",
        bars,
    )


def _memory() -> Chart:
    rows = _zero_rows()
    bars = _bars({label: rows[engine]["node_mb"] for engine, label in _ZERO.items()})
    return Chart("Memory of both ranks", "the same runs, beyond what the imports take; less is better", "MB", bars)


def _zero() -> Sequence[Chart]:
    return [_step_time(), _memory()]


# ---- the others ------------------------------------------------------------------------------------------------------


def _saves() -> Chart:
    rates = _record("ckpt")["bandwidth"]["save_gb_per_s"]
    names = {"ds-ckpt": "ds-ckpt", "safetensors": "safetensors", "torch.save": "torch.save", "dcp": "torch DCP"}
    bars = [
        Bar("the disk alone", rates["raw"], "limit"),
        *_bars({label: rates[name] for name, label in {**names, "deepspeed": "DeepSpeed"}.items()}),
    ]
    return Chart("Saving a checkpoint", "492 MB, until the bytes are on the disk; more is better", "GB/s", bars, 2)


def _ckpt() -> Sequence[Chart]:
    cold = _record("ckpt")["cold"]["load_gb_per_s"]
    names = {"dcp": "torch DCP", "torch.load, mapped": "torch.load, mapped", "safetensors": "safetensors"}
    bars = [
        Bar("the disk alone", cold["raw"], "limit"),
        *_bars(
            {label: cold[name] for name, label in {"ds-ckpt": "ds-ckpt", **names, "deepspeed": "DeepSpeed"}.items()}
        ),
    ]
    return [_saves(), Chart("Loading it", "files not in the page cache; more is better", "GB/s", bars, 2)]


def _clients() -> Sequence[Chart]:
    rows = _record("clients")["rows"]
    names = {
        "plain_loop[2-fp32]": "a plain loop, stage 2",
        "plain_loop[3-fp32]": "a plain loop, stage 3",
        "accelerate[2-plugin]": "Accelerate, stage 2",
        "accelerate[3-plugin]": "Accelerate, stage 3",
        "trainer[2-]": "HF Trainer, stage 2",
        "trainer[3-]": "HF Trainer, stage 3",
        "sft": "TRL, SFT",
        "lightning[3]": "Lightning, stage 3",
    }
    found = {label: rows[name] for name, label in names.items() if name in rows}
    bars = [Bar(label, row["upstream"]["step_ms"] / row["ours"]["step_ms"], "ours") for label, row in found.items()]
    return [Chart("Client programs", "steps as many times as fast as with DeepSpeed; equal losses", "x", bars, 2)]


def _comm() -> Sequence[Chart]:
    charts = []
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        row = next(r for r in _record("comm")["collectives"]["rows"] if r["op"] == op and r["nbytes"] == 16 * 2**20)
        rate = {name: row["nbytes"] / row[name]["median_s"] / 1e9 for name in ("memcpy", "shm", "gloo")}
        bars = [
            Bar("one memcpy", rate["memcpy"], "limit"),
            Bar("ds-comm, shm", rate["shm"], "ours"),
            Bar("gloo", rate["gloo"]),
        ]
        charts.append(Chart(op, "16 MiB, two ranks of one host; more is better", "GB/s", bars, 1))
    return charts


def _data() -> Sequence[Chart]:
    rows = {row["what"]: row for row in _record("data")["lines"]}
    names = {
        "TokenLoader": "ds-data, TokenLoader",
        "DataLoader(0), same sequences": "DataLoader, no worker",
        "DataLoader(2), same sequences": "DataLoader, 2 workers",
    }
    bars = _bars({label: rows[name]["tokens_s"] / 1e6 for name, label in names.items()})
    return [
        Chart("Reading tokens", "packed sequences with labels and documents; more is better", "M tokens/s", bars, 1)
    ]


def _engine() -> Sequence[Chart]:
    charts = []
    for ranks, rows in _record("engine")["initialize"].items():
        values = {"ds-engine": rows["ds_engine"], "DeepSpeed": rows["deepspeed"]}
        bars = _bars({name: row["import_s"] + row["initialize_s"] for name, row in values.items()})
        note = f"import and initialize, {ranks} rank{'s' if ranks != '1' else ''}; less is better"
        charts.append(Chart("From import to an engine", note, "s", bars, 2))
    return charts


def _io() -> Sequence[Chart]:
    charts = []
    for direction in ("write", "read"):
        rows = [
            r for r in _record("io")["rows"] if (r["direction"], r["block_bytes"], r["depth"]) == (direction, 2**20, 32)
        ]
        bars = [Bar(f"ds-ops, {row['backend']}", row["ours_gb_s"], "ours") for row in rows]
        best = max(row["fio_gb_s"] for row in rows)
        bars.append(Bar("fio, its best backend", best))
        charts.append(Chart(f"File {direction}s past the page cache", "1 MiB x 32; more is better", "GB/s", bars, 1))
    return charts


def _import_time() -> Sequence[Chart]:
    rows = _record("import_time")["rows"]
    bars = [
        Bar(name, row["median_ms"], "limit" if name == "import torch" else "ours")
        for name, row in rows.items()
        if "whole" not in name
    ]
    return [Chart("Import time", "in a new process; less is better", "ms", bars)]


def _launch() -> Sequence[Chart]:
    record = _record("launch")
    said = "; other work ran on the machine" if record["beside_others"] else ""
    return [
        Chart(
            f"Starting two ranks: {script}",
            f"the whole command; less is better{said}",
            "s",
            [
                Bar(name, row["wall_s"], "ours" if name.startswith("ds run") else "theirs")
                for name, row in launchers.items()
            ],
            2,
        )
        for script, launchers in record["rows"].items()
    ]


def _moe() -> Sequence[Chart]:
    names = {"zipf": "64 experts, uneven routing", "balanced": "8 experts, even routing"}
    charts = []
    for config, label in names.items():
        row = next(
            r
            for r in _record("moe")["lines"]
            if (r["config"], r["ranks"], r["ours"], r["peer"]) == (config, 2, "ours@shm", "deepspeed")
        )
        bars = [Bar("ds-moe", row["ms"][0], "ours"), Bar("DeepSpeed", row["ms"][1])]
        charts.append(
            Chart(label, "one layer, forward and backward, nothing dropped, two ranks; less is better", "ms", bars, 1)
        )
    return charts


def _monitor() -> Sequence[Chart]:
    """With the bound alone where nothing is recorded yet."""
    recorded = (FOLDER / "data" / "monitor.json").exists()
    lines = _record("monitor")["lines"] if recorded else []
    bars = [Bar(line["sinks"], line["calls_us"] + line["threads_us"], "ours") for line in lines]
    note = "processor time of all threads, one rank; less is better" if recorded else "the bound; no record yet"
    return [Chart("What reporting takes of a step of 20 ms", note, "µs", [Bar("1 % of the step", 200, "limit"), *bars])]


def _ops() -> Sequence[Chart]:
    row = next(r for r in _record("ops")["rows"] if r["case"] == "flat_ours" and r["threads"] == 1)
    values = {"ds-ops": row["melements_s"]}
    for key, label in (
        ("x_deepspeed", "DeepSpeed CPUAdam"),
        ("x_torch_fused", "torch, fused"),
        ("x_torch_foreach", "torch, foreach"),
    ):
        values[label] = row["melements_s"] / row[key]
    bars = [Bar("what memory allows", row["most_melements_s"], "limit"), *_bars(values)]
    return [Chart("AdamW on one core", "34 million fp32 parameters; more is better", "M elements/s", bars)]


def _pipe() -> Sequence[Chart]:
    record = _record("pipe")
    bars = [Bar("computing alone", record["ideal_ms"], "limit")]
    for line in record["lines"]:
        who, _, schedule = line["engine"].partition(":")
        bars.append(
            Bar(
                f"{'ds-pipe' if who == 'ours' else 'torch'}, {schedule}",
                line["ms"],
                "ours" if who == "ours" else "theirs",
            )
        )
    return [
        Chart(
            "One step of four stages",
            "eight microbatches, kernels that sleep; less is better",
            "ms",
            bars,
        )
    ]


def _parallel() -> Sequence[Chart]:
    lines = _record("parallel")["lines"]
    titles = {
        "exchange": "Ulysses: the exchanges of 2,048 tokens",
        "tensor": "Two Llama blocks, each cut in two",
    }
    names = {
        "ours@shm": "ds-parallel, shm",
        "ours": "ds-parallel, gloo",
        "deepspeed": "DeepSpeed",
        "torch": "torch",
        "half": "the arithmetic alone",
    }
    charts = []
    for config, title in titles.items():
        ms = {
            line[who]: line["ms"][i]
            for line in lines
            if line["config"] == config
            for i, who in enumerate(("ours", "peer"))
        }
        bars = [
            Bar(names[who], ms[who], "limit" if who == "half" else "ours" if who.startswith("ours") else "theirs")
            for who in sorted(ms, key=lambda one: (one != "half", one not in ("ours@shm",), one != "ours", one))
        ]
        charts.append(Chart(title, "forward and backward, two ranks; less is better", "ms", bars, 1))
    return charts


def _offload() -> Sequence[Chart]:
    charts = []
    for line in _record("offload")["lines"]:
        if line["stage"] != 3 or line["bf16"]:
            continue
        names = {
            "ours3-device@shm": "ds-zero, all on the device",
            f"ours3-{line['where']}@shm": "ds-zero, shm",
            f"ours3-{line['where']}": "ds-zero, gloo",
            f"deepspeed3-{line['where']}": "DeepSpeed",
        }
        found = {label: line["engines"][name]["ms"] for name, label in names.items() if name in line["engines"]}
        title = f"Stage 3, optimizer state {'in a file' if line['where'] == 'file' else 'on the host'}"
        charts.append(
            Chart(title, "a step of a GPT of 17 million parameters, two ranks; less is better", "ms", _bars(found))
        )
    return charts


_HOSTS = {
    "comm": {
        "ours2": "ds-zero, stage 2",
        "ours3": "ds-zero, stage 3",
        "ddp": "DDP",
        "fsdp2": "FSDP2",
        "deepspeed2": "DeepSpeed, stage 2",
        "deepspeed3": "DeepSpeed, stage 3",
    },
    "comm_bf16": {
        "ours3": "ds-zero, stage 3",
        "ours3_int8": "ds-zero, stage 3, weights in int8",
        "fsdp2": "FSDP2",
        "deepspeed3": "DeepSpeed, stage 3",
    },
}


def _rehearse() -> Sequence[Chart]:
    """Bytes alone: the least step of stage 3, which FSDP2 and DeepSpeed's stage 3 send as well."""
    lines = [line for line in _record("rehearse")["lines"] if line["kind"] == "hosts" and line["gbits"] == 1]
    charts = []
    for config, names in _HOSTS.items():
        steps = {line["engine"]: line for line in lines if line["config"] == config}
        least = Bar("what stage 3's bytes allow", steps["ours3"]["least_ms"], "limit")
        bars = [least, *_bars({label: steps[engine]["step_ms"] for engine, label in names.items()})]
        note = (
            f"GPT of 17 million parameters, {'bf16' if config != 'comm' else 'fp32'}, one rank a host; less is better"
        )
        charts.append(Chart("A step on two hosts, 1 Gb/s between them", note, "ms", bars))
    return charts


def _quant() -> Sequence[Chart]:
    rows = [r for r in _record("quant")["rows"] if r["threads"] == 1 and r.get("share")]
    chosen = [r for r in rows if r["name"].startswith(("quantize ", "dequantize "))][:8]
    bars = [Bar(row["name"], 100 * row["share"], "ours") for row in chosen]
    return [
        Chart("Quantizers on one core", "share of what a copy of the same bytes reaches; more is better", "%", bars)
    ]


def _compile() -> Sequence[Chart]:
    rows = [
        (f"{via}: {engine}", row)
        for via, found in _record("compile")["meetings"].items()
        for engine, row in found.items()
    ]
    ours = lambda name: "ours" if "compiled" in name or "kept" in name else "theirs"  # noqa: E731
    values = {"A step": ("ms", 1.0, "ms"), "Memory that comes and goes within one": ("passing", 2.0**20, "MiB")}
    return [
        Chart(
            title,
            "two ranks, ZeRO stage 3; less is better",
            unit,
            [Bar(name, row[key] / of, ours(name)) for name, row in rows],
        )
        for title, (key, of, unit) in values.items()
    ]


def _gpu() -> Sequence[Chart]:
    rows = _record("gpu")["training"]
    ours = lambda name: "theirs" if name in ("plain", "FSDP2") else "ours"  # noqa: E731
    return [
        Chart(
            title,
            "one GPU, GPT of 368 million parameters; less is better",
            unit,
            [Bar(r["name"], r[key], ours(r["name"])) for r in rows],
            1,
        )
        for title, key, unit in (("A training step", "ms", "ms"), ("Peak memory", "peak_gib", "GiB"))
    ]


GENERATION = {
    "ours-bf16": "ours bf16",
    "openvino-fp16": "OpenVINO GenAI fp16",
    "llamacpp-bf16": "llama.cpp bf16",
    "transformers-bf16": "transformers bf16",
    "ours-int8-rounded": "ours int8, inputs rounded",
    "ours-int8": "ours int8",
    "openvino-int8": "OpenVINO GenAI int8",
    "llamacpp-q8_0": "llama.cpp q8_0",
    "ours-int4-rounded": "ours int4, inputs rounded",
    "ours-int4": "ours int4",
    "ours-bf16-avx2": "ours bf16, AVX2 only",
    "ours-int8-avx2": "ours int8, AVX2 only",
}
"""Engines of the page of generation, by what its table calls them."""


def generation_rates(entry: Mapping[str, Any]) -> Mapping[str, float]:
    """Tokens a second of one request and of 32, seconds of a first token; parts that were measured."""
    took = {part: statistics.median(times) for part, times in entry["times_s"].items() if times}
    tokens = {"decode": 1, "batch": 32 * 64}
    return {part: s if part == "first" else tokens[part] / s for part, s in took.items()}


def _inference() -> Sequence[Chart]:
    found = {
        title: generation_rates(e)
        for name, title in GENERATION.items()
        if (e := _record("inference")["engines"].get(name))
    }
    parts = {
        "decode": ("One request", "more is better", "tokens/s", 0),
        "first": ("First token of 512", "less is better", "s", 2),
        "batch": ("32 requests", "more is better", "tokens/s", 0),
    }
    return [
        Chart(title, note, unit, _bars({name: f[part] for name, f in found.items() if part in f}, "ours"), digits)
        for part, (title, note, unit, digits) in parts.items()
    ]


def _start() -> Sequence[Chart]:
    """The three of the landing page: the same numbers with fewer rows."""
    step, memory, saves = _step_time(), _memory(), _saves()

    def few(chart: Chart, *labels: str) -> Chart:
        bars = [bar for label in labels for bar in chart.bars if bar.label == label]
        return Chart(chart.title, chart.note, chart.unit, bars, chart.digits)

    engines = ("ds-zero, stage 3", "FSDP2", "DeepSpeed, stage 3, tuned")
    return [few(step, *engines), few(memory, *engines), few(saves, "ds-ckpt", "torch DCP", "DeepSpeed")]


def _one(index: int) -> Callable[[], Sequence[Chart]]:
    return lambda: [_start()[index]]


PICTURES: Mapping[str, Callable[[], Sequence[Chart]]] = {
    "zero": _zero,
    "ckpt": _ckpt,
    "clients": _clients,
    "comm": _comm,
    "compile": _compile,
    "data": _data,
    "engine": _engine,
    "gpu": _gpu,
    "import_time": _import_time,
    "inference": _inference,
    "io": _io,
    "launch": _launch,
    "moe": _moe,
    "monitor": _monitor,
    "offload": _offload,
    "ops": _ops,
    "parallel": _parallel,
    "pipe": _pipe,
    "quant": _quant,
    "rehearse": _rehearse,
    "start-step": _one(0),
    "start-memory": _one(1),
    "start-checkpoint": _one(2),
}
