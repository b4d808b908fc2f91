"""Sharded training against its peers: forward + backward alone, DDP, FSDP2, ZeroRedundancyOptimizer, DeepSpeed.

Two ranks with one thread each (and one rank for `small`). A round runs every (engine, config) alone, in fresh processes, for its
memory, setup and losses, and then lets engines that are alive at once take turns for the time of their steps (`turns.py`); medians over
everything are reported. Losses must agree with DDP's (or DeepSpeed's), or the row says so.
Four configurations: `compute` (17 M-parameter GPT, batch 2 x 128), `bf16` (the same, mixed precision), `comm` (1 x 32) and `small` (24
Linear layers of 64 x 64).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import records
import tables
from peers import python_of
from quiet import Watch
from turns import RankFailedError, Ranks, meet
from zero_record import ENGINES, MEETINGS, beside, floor_mb, quotient, rows_of

WORKER = Path(__file__).parent / "workers" / "zero.py"
STEPS = {"compute": 10, "comm": 10, "small": 100, "bf16": 10}
TURN = {"compute": 3, "comm": 8, "small": 40, "bf16": 3}
# A turn of `small` is over in some tenths of a second, and the machine's speed changes within one.
CYCLES = {"compute": 10, "comm": 10, "small": 15, "bf16": 10}
FEW = [
    "fwdbwd",
    "local",
    "ours1@shm",
    "ours2@shm",
    "ours3@shm",
    "ours1",
    "ours3",
    "deepspeed1",
    "deepspeed3",
    "ddp",
    "fsdp2",
]
USUAL = {"compute": ENGINES, "comm": ENGINES, "small": FEW, "bf16": FEW}
"""Engines of a configuration, where none is named."""


def ranks(engine: str, config: str, world: int, *, turns: bool) -> Ranks:
    return Ranks(
        [python_of(engine), str(WORKER), engine, config, "0" if turns else str(STEPS[config])], world, interactive=turns
    )


def run(engine: str, config: str, world: int) -> dict | None:
    """One set of ranks alone on the machine: memory, setup, losses; None (with the end of its output) if it failed."""
    alone = ranks(engine, config, world, turns=False)
    try:
        found = alone.answers()
    except RankFailedError as error:
        print(f"  {engine}/{config}/{world} failed: {error}")
        return None
    finally:
        alone.end()
    return found[0] | {"node_mb": sum(r["pss_mb"] for r in found), "losses": found[0]["losses"][:10]}


def agrees(row: dict, reference: dict, within: float) -> bool:
    pairs = zip(row["losses"][:10], reference["losses"][:10], strict=True)
    return all(abs(a - b) <= within * abs(b) + 1e-9 for a, b in pairs)


def show(entry: dict, world: int) -> None:
    rows = rows_of(entry)
    reference = next((rows[e] for e in ("ddp", "deepspeed1", "local") if e in rows), None)
    print(
        f"  {'engine':18} {'step ms':>9} {'over f+b':>9} {'cpu ms':>8} {'init ms':>9} {'node MB':>8} {'/ floor':>8}  losses"
    )
    for engine, row in rows.items():
        agree = engine == "fwdbwd" or (reference is not None and agrees(row, reference, entry.get("within", 1e-6)))
        floor = floor_mb(engine, rows, world) if "fwdbwd" in rows else None
        over = f"{row['node_mb'] / floor:8.2f}" if floor else " " * 8
        print(f"  {engine:18} {row['step_ms']:9.2f} {row.get('over_ms', math.nan):9.2f} {row['cpu_ms']:8.1f} {row['init_ms']:9.1f} "
              f"{row['node_mb']:8.1f} {over}  {'agree' if agree else 'DIFFER'}")  # fmt: skip
    for mine, peer in ((f"ours{s}{via}", f"deepspeed{s}") for via in ("@shm", "") for s in (1, 2, 3)):
        if not beside(entry, mine, peer):
            continue
        said = [f"{quotient(entry, mine, e):.2f}x of {e}" for e in ("ddp", "fsdp2", "local") if beside(entry, mine, e)]
        over, cpu = (
            (rows[peer][k] - rows["fwdbwd"][k]) / max(rows[mine][k] - rows["fwdbwd"][k], 1e-3)
            for k in ("step_ms", "cpu_ms")
        )
        print(
            f"  {mine}: {quotient(entry, mine, peer):.3f}x of DeepSpeed's step, overhead {over:.1f}x, in CPU {cpu:.1f}x less; {', '.join(said)}"
        )


def record(kept: dict, rounds: int, where: tuple[str, int], chosen: list[str], end: float) -> None:
    """Bring the chosen engines of one configuration to so many rounds in `kept`; every run is written at once."""
    config, world = where
    entry, watch = kept.setdefault(f"{config}-{world}", {"runs": {}, "meetings": []}), Watch()
    entry["within"] = 1e-2 if config == "bf16" else 1e-6  # in bf16 engines round at different places
    if world == 1:
        chosen = [e for e in chosen if not e.startswith(("ddp", "fsdp2", "zero_redundancy")) and "@" not in e]

    def keep() -> None:
        entry.update(machine=records.machine(), date=time.strftime("%Y-%m-%d"), others=watch.others())
        records.write("zero", results=kept)

    for number in range(rounds):
        for engine in chosen:
            runs = entry["runs"].setdefault(engine, [])
            if len(runs) <= number and time.monotonic() < end and (result := run(engine, config, world)):
                runs.append(result)
                keep()
        for members in MEETINGS:
            invited = [e for e in ENGINES if e in chosen and e in members]
            held = [m for m in entry["meetings"] if set(m) >= set(invited)]
            if invited[1:] and len(held) <= number and time.monotonic() < end:
                start = {e: lambda e=e: ranks(e, config, world, turns=True) for e in invited}
                entry["meetings"].append(meet(start, CYCLES[config], TURN[config]))
                keep()
    print(f"{config}, {world} rank(s), on gloo or where @shm says so on shared memory", flush=True)
    show(entry, world)


def arguments(words: list[str]) -> argparse.Namespace:
    parser = records.parser_of("zero", __doc__)
    parser.add_argument(
        "what", nargs="*", help="number of rounds (1), configurations and engines (the usual ones of each)"
    )
    parser.add_argument(
        "--within", type=float, default=math.inf, metavar="SECONDS", help="start nothing new after so long"
    )
    parser.add_argument(
        "--more", action="store_true", help="go on with what is recorded of these configurations; else it is replaced"
    )
    given = parser.parse_args(words)
    if wrong := [w for w in given.what if not w.isdigit() and w not in STEPS and w not in ENGINES]:
        known = ", ".join([*STEPS, *ENGINES])
        parser.error(f"{', '.join(wrong)}: neither a number nor one of {known}")
    return given


def main(words: list[str]) -> None:
    given = arguments(words)
    end, asked = time.monotonic() + given.within, given.what
    kept = records.read("zero").get("results", {})
    rounds = next((int(w) for w in asked if w.isdigit()), 1)
    for config in [c for c in STEPS if c in asked] or list(STEPS):
        for world in (1, 2) if config == "small" else (2,):
            if not given.more:
                kept.pop(f"{config}-{world}", None)
            record(kept, rounds, (config, world), [e for e in ENGINES if e in asked] or USUAL[config], end)
    tables.fill("zero")


if __name__ == "__main__":
    main(sys.argv[1:])
