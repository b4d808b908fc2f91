"""Fill the tables of docs/benchmarks/zero.md and of its notes from the record that `zero.py` wrote.

usage: python tools/bench/zero_page.py [--check]

A table stands between `<!-- table CONFIG WORLD TRANSPORT -->` and `<!-- end -->`; the pages' own text is left alone. `--check`
only says whether the pages are as the record is.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from bench_page import fenced, markdown_table
from zero_record import DATA, beside, floor_mb, quotient, rows_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from repo import pictures

PAGES = (DATA.parent.parent / "zero.md", DATA.parents[2] / "decisions" / "measured" / "zero.md")
TABLE = fenced(r"table (\w+) (\d) (\w+)", "end")

_NAMES = {
    "fwdbwd": "forward + backward alone",
    "local": "AdamW on each rank, no communication",
    "ddp": "DDP",
    "zero_redundancy": "ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "fsdp2_keep": "FSDP2, not resharding",
}


def name_of(engine: str) -> str:
    plain, _, via = engine.partition("@")
    if plain.startswith("ours"):
        return f"**ds-zero {plain[4]}**, {via or 'gloo'}"
    if plain.startswith("deepspeed"):
        return f"DeepSpeed {plain[9]}" + (", tuned" if plain.endswith("tuned") else "")
    return _NAMES[plain] + (f", our {via}" if via else "")


def chosen(engine: str, transport: str) -> bool:
    """Whether a row belongs in a table: `best` gives each its best transport, `gloo` and `shm` that one, `all` every row."""
    ours, via = engine.startswith("ours"), engine.partition("@")[2]
    if transport == "best":
        return via == "shm" if ours else not via
    if transport == "gloo":
        return not via
    if transport == "shm":
        return via == "shm" or engine == "fwdbwd"
    return True


def table(entry: dict, world: int, transport: str) -> str:
    rows = rows_of(entry)
    digits = 0 if rows["fwdbwd"]["step_ms"] > 20 else 2
    head = ["engine", "step ms", "over f+b", "CPU ms", "setup ms", "node MB", "of floor", "of shared floor", "turns"]
    lines = []
    for engine, row in rows.items():
        if not chosen(engine, transport):
            continue
        floor = floor_mb(engine, rows, world)
        shared = floor_mb(engine, rows, world, shared=True) if "@" in engine and engine.startswith("ours") else None
        cells = [
            name_of(engine),
            f"{row['step_ms']:.{digits}f}",
            f"{row['over_ms']:.{digits}f}" if "over_ms" in row else "",
            f"{row['cpu_ms']:.{min(digits, 1)}f}",
        ]
        cells += [f"{row['init_ms']:.0f}", f"{row['node_mb']:.0f}"]
        cells += [f"{row['node_mb'] / f:.2f}" if f else "" for f in (floor, shared)]
        lines.append([*cells, str(row["turns"])])
    others = f"; background load {100 * entry['others']:.1f} %" if "others" in entry else ""
    return markdown_table(head, lines) + f"\nMeasured on {entry['date']}{others}.\n"


def filled(page: str, results: dict) -> str:
    """The page with every table that has a record as the record says."""

    def one(match: re.Match[str]) -> str:
        head, config, world, transport, end = match.groups()
        if f"{config}-{world}" not in results:
            return match.group()
        return head + "\n" + table(results[f"{config}-{world}"], int(world), transport) + "\n" + end

    return TABLE.sub(one, page)


def ratios(results: dict) -> str:
    """What the page's sentences are made of."""
    lines = []
    for name, entry in results.items():
        rows = rows_of(entry)
        for mine, peer in ((f"ours{s}{v}", f"deepspeed{s}") for v in ("@shm", "") for s in (1, 2, 3)):
            if not beside(entry, mine, peer):
                continue
            others = [
                f"{quotient(entry, mine, e):.2f}x of {e}" for e in ("ddp", "fsdp2", "local") if beside(entry, mine, e)
            ]
            cpu = (rows[peer]["cpu_ms"] - rows["fwdbwd"]["cpu_ms"]) / (rows[mine]["cpu_ms"] - rows["fwdbwd"]["cpu_ms"])
            lines.append(
                f"{name} {mine}: step {quotient(entry, mine, peer):.3f}x, overhead {rows[peer]['over_ms'] / rows[mine]['over_ms']:.1f}x, "
                f"in CPU {cpu:.1f}x less; {', '.join(others)}"
            )
    return "\n".join(lines)


def main(asked: list[str]) -> int:
    results = json.loads(DATA.read_text())["results"]
    changed = {page: new for page in PAGES if (new := filled(page.read_text(), results)) != page.read_text()}
    if "--check" in asked:
        return int(bool(changed))
    for page, new in changed.items():
        page.write_text(new)
    for name in ("zero", "start-step", "start-memory"):
        pictures.file_of(name).write_text(pictures.text_of(name))
    print(ratios(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
