"""`nox -s bench -- monitor`: what reporting takes of a training step of 20 ms; docs/benchmarks/monitor.md says how it is measured.

One rank trains a small model whose step is stretched to 20 ms by more of the same work, first with nobody listening, then with the
sinks of a configuration, in turns of 50 steps. Beside the difference of wall-clock times, which a busy machine blurs, it tells what
can be counted: the processor time of the engine's report of a step, of spans and counters within it, and of the sinks' threads.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import records
import tables
import torch
from quiet import Watch
from torch import nn

import ds_engine
import ds_monitor
from ds_config import load
from ds_engine.step_telemetry import Telemetry
from ds_monitor import recording
from ds_monitor.config import MonitorConfig, make_sinks

STEP_MS, BUDGET_US = 20, 200  # 1 %


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
    """Processor seconds of this thread inside reporting, and of the sinks' threads."""

    def __init__(self) -> None:
        self.calls_s = 0.0
        self._inside = False

    def install(self) -> None:
        """Time the engine's report of a step, and the two places where any other report reaches a sink."""
        for name in ("_emit", "set_step"):
            setattr(recording, name, self._timed(getattr(recording, name)))
        ds_monitor.set_step = recording.set_step  # type: ignore[assignment]
        Telemetry.step = self._timed(Telemetry.step)  # type: ignore[method-assign]

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **named: Any) -> Any:
            if self._inside or threading.current_thread() is not threading.main_thread():
                return call(*args, **named)
            begun, self._inside = time.thread_time(), True
            try:
                return call(*args, **named)
            finally:
                self.calls_s += time.thread_time() - begun
                self._inside = False

        return timed

    def take_us(self, count: int) -> float:
        """Microseconds of a step since the last call."""
        taken, self.calls_s = self.calls_s / count * 1e6, 0.0
        return taken

    @staticmethod
    def threads_s() -> float:
        clocks = [t.ident for t in threading.enumerate() if t.name.startswith("ds-monitor") and t.ident]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in clocks)


def main() -> None:
    parser = records.parser_of("monitor", __doc__, turns=6, steps=50)
    parser.add_argument("--dry", action="store_true", help="write no data and no page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    watch, meter = Watch(), Meter()
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
        if took_ms >= STEP_MS:
            break
        engine.close()
        repeats = max(repeats + 1, int(repeats * min(STEP_MS / took_ms, 8)))
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            measured(name, lambda section=section: turn(engine, x, args.steps, section, meter), args.turns)
            for name, section in sections(folder).items()
        ]
    engine.close()
    if args.dry:
        return
    records.write("monitor", others=watch.others(), budget_us=BUDGET_US, lines=lines)
    tables.fill("monitor")


def turn(engine: Any, x: torch.Tensor, count: int, section: dict[str, Any], meter: Meter) -> dict[str, float]:
    """Steps with nobody listening, then as many with the section's sinks."""
    meter.take_us(count)
    quiet_ms = steps(engine, x, count)
    unheard_us = meter.take_us(count)
    sinks = make_sinks(load(MonitorConfig, section))
    ds_monitor.attach(sinks)
    steps(engine, x, 2)  # files are opened, threads started
    meter.take_us(count)
    before_s = meter.threads_s()
    loud_ms = steps(engine, x, count)
    calls_us = meter.take_us(count) - unheard_us
    ds_monitor.event("end of a turn")  # handed over at once
    time.sleep(0.1)
    threads_us = (meter.threads_s() - before_s) / count * 1e6
    ds_monitor.detach(sinks)
    return {"step_ms": quiet_ms, "with_ms": loud_ms, "calls_us": calls_us, "threads_us": threads_us}


def measured(name: str, once: Callable[[], dict[str, float]], turns: int) -> dict[str, Any]:
    """A line of the record: medians over the turns."""
    found = [once() for _ in range(turns)]
    line: dict[str, Any] = {"sinks": name}
    line |= {key: round(statistics.median(one[key] for one in found), 3) for key in found[0]}
    line["share"] = round((line["calls_us"] + line["threads_us"]) / (STEP_MS * 1e3), 5)
    print(json.dumps(line), flush=True)
    return line


def steps(engine: Any, x: torch.Tensor, count: int) -> float:
    """Median milliseconds of a step."""
    took = []
    for _ in range(count):
        begun = time.perf_counter()
        engine.train_batch(iter([(x,)]))
        took.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(took)


if __name__ == "__main__":
    main()
