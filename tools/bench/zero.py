"""Sharded training against its peers: forward + backward alone, DDP, FSDP2, ZeroRedundancyOptimizer, DeepSpeed.

usage: nox -s bench -- zero [ROUNDS] [CONFIG ...] [ENGINE ...] [--within SECONDS] [--more]

Two ranks with one thread each (and one rank for `small`). Every (engine, config) is a fresh pair of processes; engines
alternate, rounds repeat, medians of medians are reported. Losses must agree with DDP's (or DeepSpeed's), or the row says so. `--more` goes on
with the record that is there. Three configurations: `compute` (17 M-parameter GPT, batch 2 x 128), `comm` (1 x 32) and `small`
(24 Linear layers of 64 x 64).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from peers import ensure

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "zero.json"
WORKER = Path(__file__).parent / "workers" / "zero.py"
STEPS = {"compute": 10, "comm": 20, "small": 100}
ENGINES = ["fwdbwd", "local", "ours1@shm", "ours2@shm", "ours3@shm", "deepspeed1", "deepspeed2", "deepspeed3", "ddp", "ours0", "ours1",
           "ours2", "ours3", "zero_redundancy", "fsdp2_keep", "fsdp2", "deepspeed1_tuned", "deepspeed2_tuned", "deepspeed3_tuned",
           "ddp@shm", "fsdp2@shm"]  # fmt: skip


def run(engine: str, config: str, world: int) -> dict | None:
    """One fresh set of ranks; None (with the end of its output) if it failed."""
    python = str(ensure("deepspeed")) if engine.startswith("deepspeed") else sys.executable
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    base = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(world),
    }
    base |= {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", "LOCAL_SIZE": str(world)}
    ranks = [
        subprocess.Popen(
            [python, str(WORKER), engine, config, str(STEPS[config])],
            env={**base, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,  # the kernel shares processors between sessions, see `burst` of the worker
        )
        for r in range(world)
    ]  # fmt: skip
    for p in ranks:  # from the start, so that a run is short; the rank itself says it again around what is timed
        with contextlib.suppress(OSError):
            Path(f"/proc/{p.pid}/autogroup").write_text("-15")
    try:
        outs = [p.communicate(timeout=240) for p in ranks]
    except subprocess.TimeoutExpired:
        for p in ranks:
            p.kill()
        print(f"  {engine}/{config}/{world}: no end after 240 s")
        return None
    found = [json.loads(line) for out, _ in outs for line in out.splitlines() if line.startswith("{")]
    if len(found) < world:
        print(f"  {engine}/{config}/{world} failed: {outs[0][1].strip().splitlines()[-1:]}")
        return None
    return found[0] | {"node_mb": sum(r["pss_mb"] for r in found)}


def summary(runs: list[dict]) -> dict:
    # Of each run the median of its steps.
    keys = ("step_ms", "min_ms", "cpu_ms", "init_ms", "node_mb", "peak_mb", "psi_mb")
    if all("pair_ratio" in r for r in runs):
        keys += ("pair_over_ms", "pair_ratio")
    return {k: round(statistics.median(r[k] for r in runs), 2) for k in keys} | {
        "rounds": len(runs),
        "losses": runs[0]["losses"],
    }


def floor_mb(engine: str, rows: dict[str, dict], world: int, *, shared: bool = False) -> float | None:
    """Least memory of a node for what an engine keeps, each rank for itself: activations, parameters, gradients, two moments.

    With `shared` the parameters exist once for all ranks.

    Activations (and workspace) are what forward + backward alone take beyond parameters and gradients. A stage-3 rank has half
    of the parameters and the largest block (the embedding, with its gradient's share counted as a whole gradient).
    """
    psi, alone = rows["fwdbwd"]["psi_mb"], rows["fwdbwd"]["node_mb"] / world
    stage = {"fsdp2": 3, "fsdp2_keep": 2, "zero_redundancy": 1, "ddp": 0, "local": 0}.get(engine.partition("@")[0])
    if stage is None:
        stage = next((int(c) for c in engine if c.isdigit()), None)
    if stage is None or psi < 10:
        return None
    block = 8192 * 384 * 4 / 1e6
    params = psi if stage < 3 else psi / world + block
    if shared:
        params = psi / world
    moments = 2 * psi / (world if stage else 1)
    return world * (alone - 2 * psi + params + psi + moments)


def agrees(row: dict, reference: dict) -> bool:
    pairs = zip(row["losses"][:10], reference["losses"][:10], strict=True)
    return all(abs(a - b) <= 1e-6 * abs(b) + 1e-9 for a, b in pairs)


def table(rows: dict[str, dict], world: int) -> None:
    reference = next((rows[e] for e in ("ddp", "deepspeed1", "local") if e in rows), None)
    print(
        f"  {'engine':18} {'step ms':>9} {'over f+b':>9} {'cpu ms':>8} {'init ms':>9} {'node MB':>8} {'/ floor':>8}  losses"
    )
    for engine, row in rows.items():
        row["over_ms"] = round(overhead(row, rows), 2)
        row["agrees"] = engine == "fwdbwd" or (reference is not None and agrees(row, reference))
        floor_of = floor_mb(engine, rows, world)
        row["over_floor"] = None if floor_of is None else round(row["node_mb"] / floor_of, 2)
        print(f"  {engine:18} {row['step_ms']:9.2f} {row['over_ms']:9.2f} {row['cpu_ms']:8.1f} {row['init_ms']:9.1f} "
              f"{row['node_mb']:8.1f} {row['over_floor'] or '':8}  {'agree' if row['agrees'] else 'DIFFER'}")  # fmt: skip
    for stage, via in ((s, v) for v in ("@shm", "") for s in (1, 2, 3)):
        mine, peer = rows.get(f"ours{stage}{via}"), rows.get(f"deepspeed{stage}")
        if mine and peer:
            print(f"  stage {stage} on {via[1:] or 'gloo'}: {quotient(mine, peer):.2f}x of DeepSpeed's step, overhead "
                  f"{peer['over_ms'] / max(mine['over_ms'], 1e-3):.1f}x smaller")  # fmt: skip


def overhead(row: dict, rows: dict[str, dict]) -> float:
    """Milliseconds over forward and backward alone: of neighbours in time where they were measured so."""
    return row.get("pair_over_ms", row["step_ms"] - rows["fwdbwd"]["step_ms"])


def quotient(mine: dict, peer: dict) -> float:
    """Step over step; where both were measured beside forward and backward alone, each in units of that."""
    if "pair_ratio" in mine and "pair_ratio" in peer:
        return mine["pair_ratio"] / peer["pair_ratio"]
    return mine["step_ms"] / peer["step_ms"]


def record(rounds: int, where: tuple[str, int], chosen: list[str], end: float) -> None:
    """Bring the chosen engines of one configuration to so many rounds; what is there stays, every run is kept at once."""
    config, world = where
    kept = json.loads(DATA.read_text())["results"] if DATA.exists() else {}
    entry = kept.setdefault(f"{config}-{world}", {"runs": {}})
    alone = [e for e in chosen if not e.startswith(("ddp", "fsdp2", "zero_redundancy")) and "@" not in e]
    for number in range(rounds):
        for engine in chosen if world > 1 else alone:
            runs = entry["runs"].setdefault(engine, [])
            if len(runs) > number or time.monotonic() > end:
                continue
            result = run(engine, config, world)
            if result is None:
                continue
            runs.append(result | {"losses": result["losses"][:10]})
            entry["machine"] = {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
            entry["date"] = time.strftime("%Y-%m-%d")
            DATA.parent.mkdir(parents=True, exist_ok=True)
            DATA.write_text(json.dumps({"results": kept}, indent=1) + "\n")
    rows = {e: summary(entry["runs"][e]) for e in ENGINES if entry["runs"].get(e)}
    if "fwdbwd" in rows:
        print(f"{config}, {world} rank(s), on gloo or where @shm says so on shared memory", flush=True)
        table(rows, world)


def main(asked: list[str]) -> None:
    within_s = float(asked[asked.index("--within") + 1]) if "--within" in asked else math.inf
    if "--more" not in asked:
        DATA.unlink(missing_ok=True)
    chosen, end = [e for e in ENGINES if e in asked] or ENGINES, time.monotonic() + within_s
    for config in [c for c in asked if c in STEPS] or list(STEPS):
        for world in (1, 2) if config == "small" else (2,):
            record(int(asked[0]) if asked and asked[0].isdigit() else 3, (config, world), chosen, end)


if __name__ == "__main__":
    main(sys.argv[1:])
