"""The record of `zero`: which engines meet, and what is read out of their turns."""

from __future__ import annotations

import statistics

# Those of a line are alive at once and take turns; half of the memory of a small machine is what limits a line.
MEETINGS = [
    ["fwdbwd", "local", "ours1@shm", "ours2@shm", "ours3@shm", "deepspeed1", "deepspeed2", "deepspeed3", "ddp", "ours1", "ours2", "ours3",
     "fsdp2"],
    ["fwdbwd", "ours0", "zero_redundancy", "fsdp2_keep", "deepspeed1_tuned", "deepspeed2_tuned", "deepspeed3_tuned", "ddp@shm",
     "fsdp2@shm"],
]  # fmt: skip
ENGINES = list(dict.fromkeys(engine for members in MEETINGS for engine in members))


def rows_of(entry: dict) -> dict[str, dict]:
    """Medians by engine: of its runs alone, and of its steps in turn (`step_ms`, `cpu_ms`, and `over_ms` beside `fwdbwd`)."""
    rows = {}
    for engine in (e for e in ENGINES if entry["runs"].get(e)):
        runs = entry["runs"][engine]
        row = {k: statistics.median(r[k] for r in runs) for k in ("step_ms", "cpu_ms", "init_ms", "node_mb", "psi_mb")}
        both = beside(entry, engine, "fwdbwd")
        if both:
            row |= {k: statistics.median(mine[k] for mine, _ in both) for k in ("ms", "cpu_ms")}
            row["step_ms"] = row.pop("ms")
            row["over_ms"] = statistics.median(mine["ms"] - alone["ms"] for mine, alone in both)
        rows[engine] = row | {"rounds": len(runs), "turns": len(both), "losses": runs[0]["losses"]}
    return rows


def beside(entry: dict, mine: str, peer: str) -> list[tuple[dict, dict]]:
    """What both took in the same cycle, for every cycle of every meeting where both were."""
    meetings = [m for m in entry.get("meetings", []) if mine in m and peer in m]
    return [both for m in meetings for both in zip(m[mine], m[peer], strict=True)]


def quotient(entry: dict, mine: str, peer: str) -> float:
    """Step over step of the same moment."""
    return statistics.median(a["ms"] / b["ms"] for a, b in beside(entry, mine, peer))


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
