"""`nox -s bench -- monitor`: what reporting takes of a training step of 20 ms.

One rank trains a small model whose step is stretched to 20 ms by more of the same work, first with nobody listening, then with the
sinks of a configuration, in turns of 50 steps. Beside the difference of wall-clock times, which a busy machine blurs, it tells what
can be counted: the processor time of the calls that report, and that of the sinks' threads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ds_engine
import ds_monitor
from ds_config import load
from ds_monitor import api
from ds_monitor.config import MonitorConfig, make_sinks

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "benchmarks" / "data" / "monitor.json"
PAGE = ROOT / "docs" / "benchmarks" / "monitor.md"
BUDGET = 0.01


class Layers(nn.Module):
    def __init__(self, width: int, repeats: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.repeats = repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repeats):
            x = self.layers(x)
        return x.square().mean()


def sections(folder: str) -> dict[str, dict[str, Any]]:
    files = {
        "csv": {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"}},
        "jsonl": {"monitor": {"sinks": [{"sink": "jsonl", "options": {"path": f"{folder}/a.jsonl"}}]}},
        "tensorboard": {"tensorboard": {"enabled": True, "output_path": folder, "job_name": "board"}},
        "prometheus": {"monitor": {"sinks": [{"sink": "prometheus", "options": {"port": 0}}]}},
    }
    every = [one["monitor"]["sinks"][0] for one in files.values() if "monitor" in one]
    return files | {"all four": {**files["csv"], **files["tensorboard"], "monitor": {"sinks": every}}}


class Meter:
    """Processor seconds of this thread inside `ds_monitor`'s reporting, and of the sinks' threads."""

    def __init__(self) -> None:
        self.calls_s = 0.0

    def install(self) -> None:
        """Time the two places where a report reaches a sink."""
        for name in ("_emit", "set_step"):
            setattr(api, name, self._timed(getattr(api, name)))
        ds_monitor.set_step = api.set_step  # type: ignore[assignment]

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **named: Any) -> Any:
            begun = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                self.calls_s += time.thread_time() - begun

        return timed

    @staticmethod
    def threads_s() -> float:
        clocks = [t.ident for t in threading.enumerate() if t.name.startswith("ds-monitor") and t.ident]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in clocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dry", action="store_true", help="write no data and no page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    meter = Meter()
    meter.install()
    config = {
        "train_batch_size": 32,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
    }
    x = torch.randn(32, 256)
    repeats = 1
    while True:  # as much work as takes 20 ms
        engine = ds_engine.initialize(model=Layers(256, repeats), config=config)[0]
        took_ms = steps(engine, x, 20)
        if took_ms >= 20:
            break
        engine.close()
        repeats = max(repeats + 1, int(repeats * min(20 / took_ms, 8)))
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, section in sections(folder).items():
            quiet, loud, calls, threads = [], [], [], []
            for _ in range(args.turns):
                quiet.append(steps(engine, x, args.steps))
                sinks = make_sinks(load(MonitorConfig, section))
                ds_monitor.attach(sinks)
                steps(engine, x, 2)  # files are opened, threads started
                meter.calls_s, before_s = 0.0, meter.threads_s()
                loud.append(steps(engine, x, args.steps))
                calls.append(meter.calls_s / args.steps * 1e6)
                ds_monitor.event("end of a turn")  # handed over at once
                time.sleep(0.1)
                threads.append((meter.threads_s() - before_s) / args.steps * 1e6)
                ds_monitor.detach(sinks)
            wall, with_sinks = statistics.median(quiet), statistics.median(loud)
            line = {
                "sinks": name,
                "step_ms": wall,
                "with_ms": with_sinks,
                "calls_us": statistics.median(calls),
                "threads_us": statistics.median(threads),
            }
            line["share"] = (line["calls_us"] + line["threads_us"]) / 20_000
            lines.append(line)
            print(json.dumps(line))
    engine.close()
    if args.dry:
        return
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    data = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "lines": lines}
    OUT.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(page(data))


def steps(engine: Any, x: torch.Tensor, count: int) -> float:
    """Median milliseconds of a step."""
    took = []
    for _ in range(count):
        begun = time.perf_counter()
        engine.train_batch(iter([(x,)]))
        took.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(took)


def page(data: dict[str, Any]) -> str:
    rows = [
        f"| {line['sinks']} | {line['calls_us']:.0f} | {line['threads_us']:.0f} | {100 * line['share']:.2f} % | "
        f"{line['step_ms']:.2f} | {line['with_ms']:.2f} |"
        for line in data["lines"]
    ]
    return "\n".join(
        [
            "# What reporting takes of a step",
            "",
            "A training step of 20 ms on one rank reports loss, learning rate, norm, speed, memory and spans.",
            "The sinks of a configuration write on threads of their own, so a step waits only for handing over.",
            f"The bound is {100 * BUDGET:g} % of the step, 200 µs, for calls and threads together.",
            "",
            "| sinks | µs of the step's thread | µs of the sinks' threads | of 20 ms | ms without | ms with |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "The first three columns are processor time; the last two are medians of wall-clock time in turns, which differ by more than",
            "what is looked for when others use the machine.",
            "",
            f"`nox -s bench -- monitor`; {data['machine']}; {data['date']}.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
