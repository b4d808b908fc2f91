"""Generation on a CPU: ours in several formats of weights beside transformers, alive at once, taking turns.

nox -s bench -- inference [--layers 24] [--cycles 3] [--engines ours-bf16,transformers-bf16] [--parts decode,first,batch]
                          [--batch-cycles 1]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("workers") / "inference.py"
ENGINES = "ours-bf16,ours-int8,ours-int8-rounded,ours-int4,ours-int4-rounded,transformers-bf16"
PARTS = {"decode": ("decode 12", 12), "first": ("first 512", 512), "batch": ("batch 64", 32 * 64)}
"""What is asked, and for how many tokens."""


class Engine:
    """A worker process that answers line by line."""

    def __init__(self, name: str, layers: int) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, str(WORKER), name, str(layers)]
        self._process = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.bytes = self._answer()["bytes"]

    def ask(self, line: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return float(self._answer()["found"])

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with {self._process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--engines", default=ENGINES)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--batch-cycles", type=int, default=1, help="of the 32 requests, which take longest")
    args = parser.parse_args()
    names, parts = args.engines.split(","), args.parts.split(",")
    engines = {name: Engine(name, args.layers) for name in names}
    times: dict[str, dict[str, list[float]]] = {name: {part: [] for part in parts} for name in names}
    reads: list[float] = []
    resident: dict[str, float] = {}
    turns = [(part, cycle) for cycle in range(args.cycles) for part in parts if part != "batch"]
    turns += [("batch", cycle) for cycle in range(args.batch_cycles) if "batch" in parts]
    for part, _ in turns:
        for name, engine in engines.items():
            times[name][part].append(engine.ask(PARTS[part][0]))
            print(f"{name} {part} {times[name][part][-1]:.4f} s", file=sys.stderr, flush=True)
            if part != "decode":
                continue
            resident.setdefault(name, engine.ask("resident"))  # before `read` takes its 512 MiB
            reads.append(engine.ask("read"))
    for engine in engines.values():
        engine.end()
    lines = []
    for name in names:
        line: dict[str, object] = {
            "engine": name,
            "bytes": engines[name].bytes,
            "times_s": times[name],
            "resident_bytes": resident.get(name),
        }
        said = [f"{name:20} {engines[name].bytes / 1e6:5.0f} MB"]
        for part in parts:
            middle, least = statistics.median(times[name][part]), min(times[name][part])
            if part == "decode":
                said.append(
                    f"decode {1 / middle:6.1f} tokens/s, best {1 / least:6.1f} = {engines[name].bytes / least / 1e9:5.1f} GB/s"
                )
            elif part == "first":
                said.append(f"first of 512 {middle:6.2f} s, best {least:6.2f}")
            else:
                said.append(f"32 requests {PARTS[part][1] / middle:6.0f} tokens/s, best {PARTS[part][1] / least:6.0f}")
        if name in resident:
            said.append(f"resident {resident[name] / 1e6:5.0f} MB")
        lines.append(line)
        print("; ".join(said), flush=True)
    if reads:
        print(f"read bandwidth: median {statistics.median(reads) / 1e9:.1f} GB/s, best {max(reads) / 1e9:.1f} GB/s")
    record = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load": os.getloadavg()[0],
        "layers": args.layers,
        "read_bytes_per_s": reads,
        "engines": lines,
    }
    target = ROOT / "docs" / "benchmarks" / "data" / "inference.json"
    target.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
