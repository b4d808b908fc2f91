"""Ranks of one host: `shm` against gloo and against one memcpy, shared arenas, DDP's overhead, and the recorder's.

usage: nox -s bench -- comm [MODE ...] [SECONDS]      MODE: collectives arena ddp recorder adam onebit forgetful

With SECONDS, trainings (adam, onebit, forgetful) end after them and go on in the next call.

Each row says which share of the machine other processes took; it is tried up to four times, and the quietest counts.
Two ranks with one thread each; variants alternate inside one pair of processes, the slower rank counts, medians.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tables
import torch

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "comm.json"
WORKER = Path(__file__).parent / "workers" / "comm.py"
TRAINED = {"adam": "Adam", "onebit": "1-bit Adam", "forgetful": "1-bit Adam, no feedback"}
MODES = ["collectives", "arena", "ddp", "recorder", *TRAINED]
RANKS = 2


def run(mode: str, *limits: str) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    base = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    base |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), mode, *limits],
            env={**base, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for r in range(RANKS)
    ]  # fmt: skip
    outs = [rank.communicate(timeout=3600) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("\n".join(error for _, error in outs))
    return json.loads(outs[0][0].splitlines()[-1])


def size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def show(seconds: float, nbytes: int) -> str:
    return f"{seconds * 1e6:9.1f} us" if nbytes < 1 << 20 else f"{nbytes / seconds / 1e9:7.2f} GB/s"


def print_rows(rows: list[dict[str, Any]], base: str) -> None:
    """Each variant, and how many times faster than `base` it is."""
    for row in rows:
        cells = []
        for name, found in row.items():
            if isinstance(found, dict):
                ratio, in_row = (row[base][how] / found[how] for how in ("median_s", "row_s"))
                factor = "" if name == base else f" ({ratio:.1f}x, {in_row:.1f}x in a row)"
                cells.append(f"{name} {show(found['median_s'], row['nbytes'])}{factor}")
        print(f"  {row['op']:17} {size(row['nbytes']):>8}: {'; '.join(cells)}{disturbed(row)}")


def disturbed(row: dict[str, Any]) -> str:
    return f"; others took {row['others']:.0%} of the machine" if row["others"] > 0.04 else ""


def report(mode: str, found: dict[str, Any]) -> None:
    print(mode)
    if mode in ("collectives", "arena"):
        print_rows(found["rows"], "gloo")
    if mode == "ddp":
        for batch, row in found["rows"].items():
            alone = row["alone"]["row_s"]
            over = {name: row[name]["over_s"] for name in ("gloo", "shm")}
            print(f"  {batch}: forward + backward {alone * 1e3:.1f} ms; DDP adds {over['gloo'] * 1e3:.1f} ms on gloo, "
                  f"{over['shm'] * 1e3:.1f} ms on shm ({over['shm'] / over['gloo']:.2f} of it){disturbed(row)}")  # fmt: skip
    if mode == "recorder":
        for what in ("step", "100 operations"):
            off, on = found[what]["off"]["median_s"], found[what]["on"]["median_s"]
            print(f"  {what}: {off * 1e3:.3f} ms without, {on * 1e3:.3f} ms with ({(on / off - 1) * 100:+.2f} %)")
        print(f"  memory of one rank's record: {found['recorder_bytes'] / 1024:.0f} KiB")
    if mode in TRAINED:
        print(
            f"  {TRAINED[mode]}: {found['loss']:.4f} nats a byte after {found['steps']} steps in {found['seconds']:.0f} s"
        )


def main(words: list[str]) -> None:
    """Run and write one mode after the other, and then the page."""
    limits = [word for word in words if word.isdigit()]
    if wrong := [word for word in words if not word.isdigit() and word not in MODES]:
        sys.exit(f"{', '.join(wrong)}: neither a limit in seconds nor one of {', '.join(MODES)}")
    for mode in [word for word in words if word not in limits] or MODES:
        found = run(mode, *limits)
        if found.get("steps", 0) < found.get("of", 0):
            print(f"{mode}: {found['steps']} of {found['of']} steps; the next call goes on")
            continue
        record = json.loads(DATA.read_text()) if DATA.exists() else {}
        record[mode] = found
        report(mode, found)
        record["date"] = time.strftime("%Y-%m-%d")
        record["machine"] = {
            "processor": platform.processor() or platform.machine(), "cpus": os.cpu_count(),
            "kernel": platform.release(), "torch": torch.__version__,
        }  # fmt: skip
        DATA.parent.mkdir(parents=True, exist_ok=True)
        DATA.write_text(json.dumps(record, indent=1) + "\n")
        print(f"written: {DATA.relative_to(ROOT)}", flush=True)
    tables.fill("comm")


if __name__ == "__main__":
    main(sys.argv[1:])
