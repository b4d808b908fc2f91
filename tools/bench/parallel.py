"""Tensor and sequence shards on two ranks: beside DeepSpeed's and torch's, and ways of sharing a sequence beside one another.

Engines of a configuration are alive at once and take turns (`turns.py`). All have the same weights and inputs, and their losses are
compared first. Writes its data; `docs/benchmarks/parallel.md` shows them.
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
DATA = ROOT / "docs" / "benchmarks" / "data" / "parallel.json"
WORKER = Path(__file__).parent / "workers" / "parallel.py"
TURNS = {"exchange": (8, 8), "ulysses": (8, 6), "tensor": (8, 4), "long": (4, 3), "loss": (3, 2)}
"""Cycles, and steps of a turn."""
# configuration, ranks, engines, (ours, peer, aim: time of ours over the peer's at most)
MEETINGS = [
    ("exchange", 2, ["ours@shm", "ours", "deepspeed"], [("ours@shm", "deepspeed", 0.5), ("ours", "deepspeed", 1.0)]),
    ("ulysses", 2, ["ours@shm", "ours", "deepspeed"], [("ours@shm", "deepspeed", 1.0), ("ours", "deepspeed", 1.0)]),
    ("tensor", 2, ["ours@shm", "ours", "torch", "deepspeed", "half"],
     [("ours@shm", "torch", 0.7), ("ours@shm", "deepspeed", 0.7), ("ours", "torch", 1.0), ("ours", "deepspeed", 1.0),
      ("ours@shm", "half", None)]),
    ("long", 2, ["ours@shm", "ring@shm", "zigzag@shm"], [("ring@shm", "ours@shm", None), ("zigzag@shm", "ours@shm", None)]),
    ("loss", 1, ["tiled", "whole"], [("tiled", "whole", 1.1)]),
]  # fmt: skip


def started(engine: str, config: str, world: int, first: dict[str, dict]) -> Ranks:
    """One engine; what its first line says is put into `first`."""
    python = str(ensure("deepspeed")) if engine.startswith("deepspeed") else sys.executable
    return Told([python, str(WORKER), engine, config], world, lambda found: first.update({engine: found[0]}))


def keep(lines: list[dict]) -> None:
    """Write the record: after each configuration."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    DATA.write_text(
        json.dumps({"date": time.strftime("%Y-%m-%d"), "machine": machine, "lines": lines}, indent=1) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="nox -s bench -- parallel", description=__doc__)
    parser.add_argument("configs", nargs="*", default=[config for config, *_ in MEETINGS])
    parser.add_argument(
        "--cycles", type=int, help="turns of each engine; by default as many as the configuration is short"
    )
    args = parser.parse_args()
    ensure("deepspeed")
    kept = json.loads(DATA.read_text())["lines"] if DATA.exists() else []
    lines = [line for line in kept if line["config"] not in args.configs]
    for config, world, engines, pairs in MEETINGS:
        if config not in args.configs:
            continue
        first: dict[str, dict] = {}
        watch = Watch()
        cycles, steps = TURNS[config]
        start = {e: (lambda e=e, c=config, w=world, f=first: started(e, c, w, f)) for e in engines}
        found = meet(start, args.cycles or cycles, steps)
        others = watch.others()
        took = {engine: statistics.median(turn["ms"] for turn in turns) for engine, turns in found.items()}
        print(f"{config}, {world} rank(s): " + ", ".join(f"{e} {ms:.2f} ms" for e, ms in took.items()))
        for ours, peer, aim in pairs:
            if ours not in found or peer not in found:
                print(f"  {ours} beside {peer}: one of them failed")
                continue
            ratio = statistics.median(a["ms"] / b["ms"] for a, b in zip(found[ours], found[peer], strict=True))
            alike = peer == "half" or abs(first[ours]["loss"] - first[peer]["loss"]) <= 1e-5 * abs(first[peer]["loss"])
            print(f"  {ours}: {ratio:.2f} x the time of {peer}{'' if alike else ', LOSSES DIFFER'}")
            lines.append({"config": config, "ranks": world, "ours": ours, "peer": peer, "ratio": ratio, "aim": aim,
                          "ms": [took[ours], took[peer]], "step_mb": [first[e]["step_mb"] for e in (ours, peer)],
                          "alike": alike, "others": others, "date": time.strftime("%Y-%m-%d")})  # fmt: skip
        keep(lines)
    tables.fill("parallel")


if __name__ == "__main__":
    main()
