"""Generation on a CPU: ours in several formats of weights beside transformers, OpenVINO GenAI and llama.cpp, one engine after the other.

nox -s bench -- inference [--engines ours-bf16,openvino-fp16] [--parts decode,first,batch] [--cycles 3] [--layers 24] [--threads 2]
                          [--make] [--label -avx2]

Engines that are measured replace their entries in docs/benchmarks/data/inference.json, all others stay; the page's picture and table
follow. `--make` only installs the peers into environments of their own and writes each one's form of the same random weights (.nox/),
which takes minutes; without it that is done before the first measurement.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import peers
import records
import tables
from in_turn import Answering
from meetings import WORKERS
from quiet import Watch

OURS = ("ours-bf16", "ours-int8", "ours-int8-rounded", "ours-int4", "ours-int4-rounded")
ENGINES = (*OURS, "openvino-fp16", "openvino-int8", "llamacpp-bf16", "llamacpp-q8_0", "transformers-bf16")
PARTS = {"decode": "decode 32", "first": "first 512", "batch": "batch 64"}
"""What is asked."""


def command(engine: str) -> list[str]:
    kind = engine.split("-")[0]
    if kind in ("ours", "transformers"):
        return [sys.executable, str(WORKERS / "inference.py")]
    return [str(peers.ensure(kind)), str(WORKERS / "inference_peers.py")]


def made(name: str, layers: int) -> Path:
    """The model's folder; it, and this engine's form of it beside it, are made where they are not there yet."""
    folder = records.ROOT / ".nox" / f"inference-{layers}" / "model"
    ours = [sys.executable, str(WORKERS / "inference.py")]
    subprocess.run([*ours, "make", str(folder), str(layers)], check=True)
    if name.split("-")[0] not in ("ours", "transformers"):
        subprocess.run([*command(name), "make", str(folder), name], check=True)
    return folder


def measured(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    watch = Watch()
    threads = {"OMP_NUM_THREADS": str(args.threads), "PYTHONWARNINGS": "ignore", "DS_BENCH_THREADS": str(args.threads)}
    engine, parts = Answering([*command(name), "run", folder, name], **threads), args.parts.split(",")
    times: dict[str, list[float]] = {part: [] for part in parts}
    for cycle in range(args.cycles):
        for part in parts:
            if part == "batch" and cycle >= args.batch_cycles:
                continue
            times[part].append(engine.ask(PARTS[part]))
            print(f"{name} {part} {times[part][-1]:.4f} s", file=sys.stderr, flush=True)
    found: dict[str, Any] = {"bytes": engine.first["bytes"], "times_s": times, "threads": args.threads}
    found |= {
        "resident_bytes": engine.ask("resident"),
        "peak_bytes": engine.ask("peak"),
        "when": time.strftime("%Y-%m-%d %H:%M"),
    }
    if name.startswith("ours"):
        found["read_bytes_per_s"] = max(engine.ask("read") for _ in range(5))
    engine.close()
    return found | {"others_share": watch.others()}


def main() -> None:
    parser = records.parser_of("inference", __doc__, layers=24, threads=2, cycles=3)
    parser.add_argument("--batch-cycles", type=int, default=2, help="of the 32 requests, which take longest")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--make", action="store_true", help="nothing is measured")
    parser.add_argument("--label", default="", help="added to the names of the entries, for example -avx2")
    args = parser.parse_args()
    for name in args.engines.split(","):
        folder = made(name, args.layers)
        if args.make:
            continue
        entry = measured(name, folder, args)
        engines = records.read("inference").get("engines", {})
        records.add("inference", layers=args.layers, engines=engines | {name + args.label: entry})
        tables.fill("inference")


if __name__ == "__main__":
    main()
