"""Generation on a CPU: ours in several formats of weights beside transformers, OpenVINO GenAI and llama.cpp, one engine after the other.

nox -s bench -- inference [--engines ours-bf16,openvino-fp16] [--parts decode,first,batch] [--cycles 3] [--layers 24] [--threads 2]
                          [--make] [--label -avx2]

Engines that are measured replace their entries in docs/benchmarks/data/inference.json, all others stay; the page's picture and table
follow. `--make` only installs the peers into environments of their own and writes each one's form of the same random weights (.nox/),
which takes minutes; without it that is done before the first measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import inference_page
import peers
from quiet import Watch

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).with_name("workers")
DATA = ROOT / "docs" / "benchmarks" / "data" / "inference.json"
OURS = ("ours-bf16", "ours-int8", "ours-int8-rounded", "ours-int4", "ours-int4-rounded")
ENGINES = (*OURS, "openvino-fp16", "openvino-int8", "llamacpp-bf16", "llamacpp-q8_0", "transformers-bf16")
PARTS = {"decode": ("decode 32", 1), "first": ("first 512", 1), "batch": ("batch 64", 32 * 64)}
"""What is asked, and for how many tokens; seconds of a decode are of one token already."""


def command(engine: str) -> list[str]:
    kind = engine.split("-")[0]
    if kind in ("ours", "transformers"):
        return [sys.executable, str(WORKERS / "inference.py")]
    return [str(peers.ensure(kind)), str(WORKERS / "inference_peers.py")]


class Engine:
    """A worker process that answers line by line."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        env = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONWARNINGS": "ignore",
            "DS_BENCH_THREADS": str(threads),
        }
        run = [*command(name), "run", str(folder), name]
        self._process = subprocess.Popen(run, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.first = self._answer()

    def ask(self, line: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return float(self._answer()["found"])

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, float] = json.loads(line)
                return found
        raise SystemExit(f"a worker ended with {self._process.wait()}")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def made(name: str, layers: int) -> Path:
    """The model's folder; it, and this engine's form of it beside it, are made where they are not there yet."""
    folder = ROOT / ".nox" / f"inference-{layers}" / "model"
    ours = [sys.executable, str(WORKERS / "inference.py")]
    subprocess.run([*ours, "make", str(folder), str(layers)], check=True)
    if name.split("-")[0] not in ("ours", "transformers"):
        subprocess.run([*command(name), "make", str(folder), name], check=True)
    return folder


def measured(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    watch = Watch()
    engine, parts = Engine(name, folder, args.threads), args.parts.split(",")
    times: dict[str, list[float]] = {part: [] for part in parts}
    for cycle in range(args.cycles):
        for part in parts:
            if part == "batch" and cycle >= args.batch_cycles:
                continue
            times[part].append(engine.ask(PARTS[part][0]))
            print(f"{name} {part} {times[part][-1]:.4f} s", file=sys.stderr, flush=True)
    found: dict[str, Any] = {"bytes": engine.first["bytes"], "times_s": times, "threads": args.threads}
    found |= {
        "resident_bytes": engine.ask("resident"),
        "peak_bytes": engine.ask("peak"),
        "when": time.strftime("%Y-%m-%d %H:%M"),
    }
    if name.startswith("ours"):
        found["read_bytes_per_s"] = max(engine.ask("read") for _ in range(5))
    engine.end()
    return found | {"others_share": watch.others()}


def said(name: str, entry: dict[str, Any]) -> str:
    words = [f"{name:20} {entry['bytes'] / 1e6:5.0f} MB"]
    for part, times in entry["times_s"].items():
        rate = [PARTS[part][1] / t for t in times]
        if times:
            words.append(
                f"first of 512 {statistics.median(times):.3f} s"
                if part == "first"
                else f"{part} {statistics.median(rate):.1f} tokens/s, best {max(rate):.1f}"
            )
    return "; ".join(
        [*words, f"resident {entry['resident_bytes'] / 1e6:.0f} MB, peak {entry['peak_bytes'] / 1e6:.0f} MB"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--batch-cycles", type=int, default=2, help="of the 32 requests, which take longest")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--make", action="store_true", help="nothing is measured")
    parser.add_argument("--label", default="", help="added to the names of the entries, for example -avx2")
    args = parser.parse_args()
    record: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {"engines": {}}
    record |= {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "layers": args.layers}
    for name in args.engines.split(","):
        folder = made(name, args.layers)
        if args.make:
            continue
        entry = measured(name, folder, args)
        print(said(name, entry), flush=True)
        record["engines"][name + args.label] = entry
        DATA.write_text(json.dumps(record, indent=1) + "\n")
        inference_page.main()


if __name__ == "__main__":
    main()
