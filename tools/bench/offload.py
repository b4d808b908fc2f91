"""Training whose optimizer state is kept in host memory or in a file: beside DeepSpeed, stages 1 to 3, fp32 and bf16, two ranks.

Engines of a line are alive at once and take turns (`turns.py`); all have the same model and data, and their losses are compared first.
DeepSpeed's files need libaio's headers (Debian: libaio-dev). The rate of the file is measured in the same run by ds-ops' own transfers.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import records
import tables
import torch
from meetings import Met
from quiet import Watch

LINES = [(stage, where, kind) for kind in ("", "-bf16") for stage in (1, 2, 3) for where in ("host", "file")
         if (stage, where) not in {(1, "file"), (2, "file")}]  # fmt: skip
"""Stage, where, format. DeepSpeed keeps files at stage 3 only."""


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


def line_of(met: Met, stage: int, where: str, kind: str) -> dict[str, Any]:
    """What the engines of a line took, kept and moved from and to storage."""
    engines = met.rows(f"deepspeed{stage}-{where}{kind}", within=2e-2 if kind else 1e-5)
    for engine, row in engines.items():
        row["moved"] = [sum(one["moved"][i] for one in met.first[engine]) for i in (0, 1)]
    return {"stage": stage, "where": where, "bf16": bool(kind), "engines": engines}


def main() -> None:
    parser = records.parser_of("offload", __doc__)
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
    lines, watch = [], Watch()
    with tempfile.TemporaryDirectory(dir=args.folder or records.ROOT / ".nox", prefix="offload-") as folder:
        rates = file_rates(folder)
        print("file, GB/s: " + ", ".join(f"{kind} {rate:.2f}" for kind, rate in rates.items()), flush=True)
        for stage, where, kind in LINES:
            engines = [f"ours{stage}-device{kind}@shm", f"ours{stage}-{where}{kind}@shm", f"ours{stage}-{where}{kind}",
                       f"deepspeed{stage}-{where}{kind}"]  # fmt: skip
            if where == "file" and not args.peer_files:
                engines.pop()
            if where == "host":
                engines.insert(2, f"ours{stage}-early{kind}@shm")
            lines.append(
                line_of(Met("offload", engines, [args.config, folder], args.cycles, args.steps), stage, where, kind)
            )
    records.write("offload", others=watch.others(), config=args.config, file=rates, lines=lines)
    tables.fill("offload")


if __name__ == "__main__":
    main()
