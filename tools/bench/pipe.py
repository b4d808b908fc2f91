"""Pipelines: what a schedule makes of four ranks whose kernels sleep, and two stages of real models, beside torch and DeepSpeed.

Eight microbatches. Engines take turns: those that sleep live in the same four processes, those that compute are sets of ranks of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tables
import torch
from peers import ensure
from quiet import Watch
from torch import nn
from turns import Ranks, Told, meet

import ds_pipe

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "pipe.json"
WORKER = Path(__file__).parent / "workers" / "pipe.py"
RANKS, MICROBATCHES, PASS_MS = 4, 8, 8.0
ENGINES = ["ours:1f1b", "ours:zb-h1", "ours:zbv", "torch:1f1b", "torch:interleaved-zb", "torch:zbv"]


REAL = ["ours@shm:1f1b", "ours:1f1b", "ours@shm:zb-h1", "torch:1f1b", "deepspeed", "alone"]


def stages(config: str, cycles: int, steps: int) -> dict[str, dict]:
    """Two stages of a real model: of each engine the median step, and beside DeepSpeed's of the same moment."""
    worker, first = WORKER.with_name("pipe_real.py"), {}

    def started(engine: str) -> Ranks:
        python = str(ensure("deepspeed")) if engine == "deepspeed" else sys.executable

        def keep(found: list[dict]) -> None:
            first[engine] = {"losses": found[0]["losses"], "mb": sum(one["mb"] for one in found)}

        return Told([python, str(worker), engine, config], 2, keep)

    found = meet({engine: (lambda e=engine: started(e)) for engine in REAL}, cycles, steps)
    told = {}
    for engine, turns in found.items():
        ms = statistics.median(turn["ms"] for turn in turns)
        beside = [a["ms"] / b["ms"] for a, b in zip(turns, found.get("deepspeed", []), strict=False)]
        base = first.get("deepspeed", first[engine])["losses"]
        alike = engine == "alone" or all(
            abs(a - b) <= 1e-5 * abs(b) for a, b in zip(first[engine]["losses"], base, strict=True)
        )
        told[engine] = {"ms": ms, "of_deepspeed": statistics.median(beside) if beside else None, "alike": alike,
                        **first[engine]}  # fmt: skip
        print(f"{config}, two stages: {engine:16} {ms:7.2f} ms, {told[engine]['mb']:.0f} MB"
              + (f", {told[engine]['of_deepspeed']:.2f} of DeepSpeed's" if beside else "") + ("" if alike else ", LOSSES DIFFER"))  # fmt: skip
    return told


def action_us(microbatches: int = 64, rounds: int = 15) -> float:
    """Microseconds that running an action costs: a step of one stage and a plain loop over the same layer take turns.

    The model is one small layer; what the step takes longer than the loop is divided by its actions (a forward and a backward a
    microbatch). Medians.
    """
    model = ds_pipe.PipelineModule([nn.Linear(1, 1)], num_stages=1, loss_fn=nn.functional.mse_loss)
    step, layer = ds_pipe.pipeline(model, microbatches), nn.Linear(1, 1)
    data = [(torch.ones(1, 1), torch.ones(1, 1))] * microbatches

    def loop() -> None:
        for x, y in data:
            (nn.functional.mse_loss(layer(x), y) / microbatches).backward()

    def took(what: Callable[[], object]) -> float:
        begin = time.perf_counter()
        what()
        return time.perf_counter() - begin

    pairs = [(took(lambda: step(data)), took(loop)) for _ in range(rounds + 2)][2:]
    step.close()
    ours, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
    return 1e6 * (ours - plain) / (2 * microbatches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    watch = Watch()
    ranks = Ranks(
        [sys.executable, str(WORKER), ",".join(ENGINES), str(args.cycles), str(args.steps)], RANKS, interactive=False
    )
    try:
        found = ranks.answer(0)
    finally:
        ranks.end()
    ideal_ms = 3 * PASS_MS * MICROBATCHES
    lines = []
    for engine, times in found.items():
        ms, best = statistics.median(times), min(times)
        lines.append({"engine": engine, "ms": ms, "best_ms": best, "efficiency": ideal_ms / ms})
        print(f"{engine:<22} {ms:7.1f} ms a step (best {best:.1f}), {ideal_ms / ms:.1%} of the time computes")
    cost = action_us()
    print(f"running an action costs {cost:.1f} us (one stage, beside a plain loop)")
    real = {config: stages(config, 2 * args.cycles, args.steps) for config in ("gpt", "small")}
    machine = f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}"
    record = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "others": watch.others(), "ideal_ms": ideal_ms,
              "action_us": cost, "lines": lines, "stages": real}  # fmt: skip
    DATA.parent.mkdir(parents=True, exist_ok=True)
    DATA.write_text(json.dumps(record, indent=1) + "\n")
    tables.fill("pipe")


if __name__ == "__main__":
    main()
