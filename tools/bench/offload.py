"""Training whose optimizer state is kept in host memory or in a file: beside DeepSpeed, stages 1 to 3, fp32 and bf16, two ranks.

Engines of a line are alive at once and take turns (`turns.py`); all have the same model and data, and their losses are compared first.
DeepSpeed's files need libaio's headers (Debian: libaio-dev). The rate of the file is measured in the same run by ds-ops' own transfers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import tables
import torch
from peers import ensure
from quiet import Watch
from turns import Ranks, Told, meet

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "offload.json"
WORKER = Path(__file__).parent / "workers" / "offload.py"
LINES = [(stage, where, kind) for kind in ("", "-bf16") for stage in (1, 2, 3) for where in ("host", "file")
         if (stage, where) not in {(1, "file"), (2, "file")}]  # fmt: skip
"""Stage, where, format. DeepSpeed keeps files at stage 3 only."""


def started(engine: str, config: str, folder: str, first: dict[str, dict]) -> Ranks:
    python = str(ensure("deepspeed")) if engine.startswith("deepspeed") else sys.executable

    def keep(found: list[dict]) -> None:
        first[engine] = {
            "losses": found[0]["losses"], "mb": sum(one["mb"] for one in found),
            "moved": [sum(one["moved"][i] for one in found) for i in (0, 1)],
        }  # fmt: skip

    return Told([python, str(WORKER), engine, config, folder], 2, keep)


def file_rates(folder: str, nbytes: int = 64 << 20, rounds: int = 7) -> dict[str, float]:
    """GB/s of ds-ops' own transfers, of one file: reading, writing, and both at once counted together."""
    from ds_ops.io import AsyncIO, IOSettings

    path, one, two = (
        str(Path(folder) / "rate"),
        torch.zeros(nbytes, dtype=torch.uint8),
        torch.zeros(nbytes, dtype=torch.uint8),
    )
    found: dict[str, list[float]] = {"read": [], "write": [], "both": []}
    with AsyncIO(IOSettings()) as io:
        io.write(path, torch.zeros(2 * nbytes, dtype=torch.uint8), 0).wait()
        for _ in range(rounds):
            for kind in found:
                began = time.perf_counter()
                under_way = [io.read(path, one, 0)] if kind != "write" else []
                under_way += [io.write(path, two, nbytes)] if kind != "read" else []
                for transfer in under_way:
                    transfer.wait()
                found[kind].append(len(under_way) * nbytes / (time.perf_counter() - began) / 1e9)
    os.unlink(path)
    return {kind: statistics.median(rates) for kind, rates in found.items()}


def overlap(config: str, folder: str) -> dict[str, list]:
    """When two steps of rank 0 compute, read and write: stage 3, a file, shared memory."""
    ranks = Ranks([sys.executable, str(WORKER), "timeline@shm", config, folder], 2, interactive=False)
    try:
        return ranks.answers()[0]
    finally:
        ranks.end()


def drawing(found: dict[str, list]) -> str:
    """The same as SVG: three rows over time."""
    end = max(to for _, _, to in found["computes"] + found["moves"])
    at = lambda ms: 90 + 650 * ms / end  # noqa: E731
    colours = {"forward": "#9fa8da", "backward": "#5c6bc0", "update": "#283593", "read": "#00897b", "write": "#ef6c00"}
    text = "<text x='{}' y='{}' font-family='sans-serif' font-size='12' fill='#1f2430'>{}</text>"
    parts = [text.format(16, 24, "Two steps of stage 3 whose optimizer state is in a file (rank 0)")]
    for number, row in enumerate(("computes", "read", "write")):
        y = 40 + 34 * number
        parts.append(text.format(16, y + 17, row + ("s" if row != "computes" else "")))
        rows = found["computes"] if row == "computes" else [m for m in found["moves"] if m[0] == row]
        for what, begin, to in rows:
            wide = max(0.5, at(to) - at(begin))
            parts.append(f"<rect x='{at(begin):.1f}' y='{y}' width='{wide:.1f}' height='24' fill='{colours[what]}' fill-opacity='0.8'>"
                         f"<title>{what}, {begin:.1f} to {to:.1f} ms</title></rect>")  # fmt: skip
            if row == "computes":
                parts.append(text.format(f"{at(begin) + 3:.1f}", y + 16, what).replace("#1f2430", "#ffffff"))
    parts += [text.format(90, 158, "0 ms"), text.format(690, 158, f"{end:.0f} ms")]
    head = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 760 170' role='img' aria-label='Computing, reads and writes over time'>"
    return "\n".join([head, "<rect width='760' height='170' rx='8' fill='#ffffff'/>", *parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="nox -s bench -- offload", description=__doc__)
    parser.add_argument(
        "--config", default="comm", choices=("comm", "compute"), help="of `zero.py`: 1 x 32 or 2 x 128 tokens"
    )
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--peer-files", action="store_true", help="DeepSpeed with files, too; here it did not answer within 4 minutes"
    )
    parser.add_argument("--folder", help="of the files; else a new one beside the checkout")
    args = parser.parse_args()
    ensure("deepspeed")
    lines, watch = [], Watch()
    with tempfile.TemporaryDirectory(dir=args.folder or ROOT / ".nox", prefix="offload-") as folder:
        rates = file_rates(folder)
        print("file, GB/s: " + ", ".join(f"{kind} {rate:.2f}" for kind, rate in rates.items()), flush=True)
        for stage, where, kind in LINES:
            engines = [f"ours{stage}-device{kind}@shm", f"ours{stage}-{where}{kind}@shm", f"ours{stage}-{where}{kind}",
                       f"deepspeed{stage}-{where}{kind}"]  # fmt: skip
            if where == "file" and not args.peer_files:
                engines.pop()
            if where == "host":
                engines.insert(2, f"ours{stage}-early{kind}@shm")
            first: dict[str, dict] = {}
            start = {e: (lambda e=e, f=first: started(e, args.config, folder, f)) for e in engines}
            found = meet(start, args.cycles, args.steps)
            took = {engine: statistics.median(turn["ms"] for turn in turns) for engine, turns in found.items()}
            base = next((first[e]["losses"] for e in reversed(engines) if e in found), [])
            line = {"stage": stage, "where": where, "bf16": bool(kind), "engines": {}}
            for engine, ms in took.items():
                bound = 2e-2 if kind else 1e-5
                alike = all(abs(a - b) <= bound * abs(b) for a, b in zip(first[engine]["losses"], base, strict=True))
                beside = [
                    a["ms"] / b["ms"]
                    for a, b in zip(found[engine], found.get(f"deepspeed{stage}-{where}{kind}", []), strict=False)
                ]
                line["engines"][engine] = first[engine] | {
                    "ms": ms, "alike": alike, "of_deepspeed": statistics.median(beside) if beside else None
                }  # fmt: skip
                print(f"stage {stage}, {where}{kind}: {engine:28} {ms:7.1f} ms, {first[engine]['mb']:6.0f} MB"
                      + (f", {statistics.median(beside):.2f} of DeepSpeed's" if beside else "")
                      + ("" if alike else ", LOSSES DIFFER"), flush=True)  # fmt: skip
            lines.append(line)
        times = overlap(args.config, folder)
    (DATA.parents[1] / "img" / "offload-overlap.svg").write_text(drawing(times))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    DATA.write_text(
        json.dumps(
            {
                "date": time.strftime("%Y-%m-%d"),
                "machine": machine,
                "others": watch.others(),
                "config": args.config,
                "file": rates,
                "lines": lines,
            },
            indent=1,
        )
        + "\n"
    )
    tables.fill("offload")


if __name__ == "__main__":
    main()
