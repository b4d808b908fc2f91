"""Pipeline schedules at work, with kernels that sleep: how much of the ranks' time computes, beside torch's schedules in one run.

Four ranks, eight microbatches; all engines live in the same four processes and take turns.
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

import torch
from torch import nn
from turns import Ranks

import ds_pipe

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "pipe.json"
WORKER = Path(__file__).parent / "workers" / "pipe.py"
RANKS, MICROBATCHES, PASS_MS = 4, 8, 8.0
ENGINES = ["ours:1f1b", "ours:zb-h1", "ours:zbv", "torch:1f1b", "torch:interleaved-zb", "torch:zbv"]


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
    machine = f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}"
    DATA.parent.mkdir(parents=True, exist_ok=True)
    DATA.write_text(
        json.dumps({"machine": machine, "ideal_ms": ideal_ms, "action_us": cost, "lines": lines}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
