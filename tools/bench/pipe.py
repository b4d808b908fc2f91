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
from pathlib import Path

import torch
from turns import Ranks

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "pipe.json"
WORKER = Path(__file__).parent / "workers" / "pipe.py"
RANKS, MICROBATCHES, PASS_MS = 4, 8, 8.0
ENGINES = ["ours:1f1b", "ours:zb-h1", "ours:zbv", "torch:1f1b", "torch:interleaved-zb", "torch:zbv"]


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
    machine = f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}"
    DATA.parent.mkdir(parents=True, exist_ok=True)
    DATA.write_text(json.dumps({"machine": machine, "ideal_ms": ideal_ms, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
