"""Experts over two ranks against DeepSpeed's MoE layer, against a loop by hand on one rank, and against the copies they need.

Engines are alive at once and take turns (`turns.py`). All have the same weights and tokens, and their losses are compared first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import tables
import torch
from peers import ensure
from quiet import Watch
from turns import Ranks, Told, meet

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "moe.json"
WORKER = Path(__file__).parent / "workers" / "moe.py"
# configuration, ranks, engines, (ours, theirs, aim: theirs over ours at least, or ours over theirs at most)
MEETINGS = [
    ("zipf", 2, ["ours@shm", "ours", "deepspeed", "ours_drop@shm", "deepspeed_drop"],
     [("ours@shm", "deepspeed", ">=", 3.0), ("ours", "deepspeed", ">=", 3.0), ("ours_drop@shm", "deepspeed_drop", ">=", 1.0)]),
    ("balanced", 2, ["ours@shm", "ours", "deepspeed"], [("ours@shm", "deepspeed", ">=", 1.1), ("ours", "deepspeed", ">=", 1.1)]),
    ("balanced", 2, ["moving@shm", "least@shm", "copies@shm"],
     [("moving@shm", "copies@shm", "<=", 1.3), ("moving@shm", "least@shm", "<=", 1.1), ("least@shm", "copies@shm", "<=", 1.3)]),
    ("balanced", 1, ["ours", "loop", "deepspeed"], [("ours", "loop", "<=", 1.05), ("ours", "deepspeed", ">=", 1.0)]),
    ("zipf", 1, ["ours", "loop", "deepspeed"], [("ours", "loop", "<=", 1.05), ("ours", "deepspeed", ">=", 1.0)]),
]  # fmt: skip


def started(engine: str, config: str, world: int, losses: dict[str, float]) -> Ranks:
    python = str(ensure("deepspeed")) if engine.startswith("deepspeed") else sys.executable
    return Told([python, str(WORKER), engine, config], world, lambda found: losses.update({engine: found[0]["loss"]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    ensure("deepspeed")
    lines, watch = [], Watch()
    for config, world, engines, pairs in MEETINGS:
        losses: dict[str, float] = {}
        found = meet(
            {e: (lambda e=e, config=config, world=world, losses=losses: started(e, config, world, losses)) for e in engines},
            args.cycles, args.steps,
        )  # fmt: skip
        took = {engine: statistics.median(turn["ms"] for turn in turns) for engine, turns in found.items()}
        print(f"{config}, {world} rank(s): " + ", ".join(f"{e} {ms:.2f} ms" for e, ms in took.items()))
        for ours, theirs, sense, aim in pairs:
            if ours not in found or theirs not in found:
                print(f"  {ours} beside {theirs}: one of them failed")
                continue
            each = [
                b["ms"] / a["ms"] if sense == ">=" else a["ms"] / b["ms"]
                for a, b in zip(found[ours], found[theirs], strict=True)
            ]
            ratio = statistics.median(each)
            alike = (
                "copies" in theirs
                or "least" in theirs
                or abs(losses[ours] - losses[theirs]) <= 1e-5 * abs(losses[theirs])
            )
            word = "x the tokens a second of" if sense == ">=" else "x the time of"
            print(f"  {ours}: {ratio:.2f}{word} {theirs} (aim {sense} {aim}){'' if alike else ', LOSSES DIFFER'}")
            lines.append({"config": config, "ranks": world, "ours": ours, "theirs": theirs, "ratio": ratio, "aim": f"{sense} {aim}",
                          "ms": [took[ours], took[theirs]], "losses": [losses[ours], losses[theirs]], "alike": alike})  # fmt: skip
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    DATA.parent.mkdir(parents=True, exist_ok=True)
    DATA.write_text(
        json.dumps(
            {"date": time.strftime("%Y-%m-%d"), "machine": machine, "others": watch.others(), "lines": lines}, indent=1
        )
        + "\n"
    )
    tables.fill("moe")


if __name__ == "__main__":
    main()
