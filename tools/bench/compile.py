"""Compiled training against eager training of the same stage and against torch.compile with FSDP2: time, memory, time to compile.

Engines are alive at once and take turns (`turns.py`). All have the same weights and tokens; losses after four steps are compared first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from turns import Ranks, meet

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "compile.json"
PICTURE = ROOT / "docs" / "benchmarks" / "compile.svg"
PAGE = ROOT / "docs" / "benchmarks" / "compile.md"
TABLES = re.compile(r"(<!-- tables -->\n).*?(<!-- end -->)", re.DOTALL)
WORKER = Path(__file__).parent / "workers" / "compile.py"
# engines that take turns; the first one is what the others are compared with
MEETINGS = {"shm": ["compiled@shm", "eager@shm", "fsdp2"], "gloo": ["compiled", "kept", "eager", "fsdp2"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("meetings", nargs="*", choices=[*MEETINGS, []])
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--picture", action="store_true", help="only draw and write what is recorded")
    args = parser.parse_args()
    recorded = json.loads(DATA.read_text()) if DATA.exists() else {"meetings": {}}
    for name in [] if args.picture else args.meetings or MEETINGS:
        recorded["meetings"][name] = measured(MEETINGS[name], args.cycles, args.steps)
        recorded["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        recorded["date"] = time.strftime("%Y-%m-%d")
        DATA.write_text(json.dumps(recorded, indent=1) + "\n")
    PICTURE.write_text(picture(recorded["meetings"]))
    PAGE.write_text(filled(PAGE.read_text(), recorded))


_NAMES = {
    "compiled": "compiled (`compile.deepcompile`)",
    "kept": "compiled, `prefetch` and `keep` from step 2 on",
    "eager": "eager",
    "fsdp2": "torch.compile and FSDP2",
}


def filled(page: str, recorded: dict) -> str:
    """The page with its tables as the record says."""
    parts = [tables(name, rows) for name, rows in recorded["meetings"].items()]
    parts.append(
        f"Measured {recorded['date']} on {recorded['machine']}; `alone` in the record says what others took meanwhile.\n"
    )
    text = "\n".join(parts)
    return TABLES.sub(lambda match: f"{match[1]}\n{text}\n{match[2]}", page)


def tables(name: str, rows: dict[str, dict]) -> str:
    """What was measured in one run: steps and memory, and what it takes to compile."""
    first = next(iter(rows))
    least = rows[first]
    lines = [
        f"| two ranks, ZeRO stage 3, {name} | a step | compiled takes | comes and goes within a step | loss after 4 steps |"
    ]
    lines.append("|---|---|---|---|---|")
    for engine, row in rows.items():
        plain, _, via = engine.partition("@")
        passing = f"{row['passing'] / 2**20:.1f} MiB"
        if engine.startswith("eager"):
            passing += f" (compiled: **{least['passing'] / row['passing']:.2f}** of it, aim 1.0)"
        of = "" if engine == first else f"**{row['of']:.3f}** of it (aim 0.95)"
        lines.append(
            f"| {_NAMES[plain]}, {via or 'gloo'} | {row['ms']:.1f} ms | {of} | {passing} | {row['loss']:.6f} |"
        )
    lines += ["", "| to compile | |", "|---|---|"]
    lines.append(f"| with an empty cache | {least['compile_s']:.1f} s ({least['graphs']} graphs, two ranks) |")
    lines.append(f"| the same run again, from torch's cache on disk | {least['warm_compile_s']:.1f} s |")
    return "\n".join(lines) + "\n"


def measured(engines: list[str], cycles: int, steps: int) -> dict[str, dict]:
    """What each engine said of itself, and its median step; with a cache that is empty at first, then what a second start takes."""
    cache = tempfile.mkdtemp()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    told: dict[str, dict] = {}

    def start(engine: str) -> Ranks:
        ranks = Ranks([sys.executable, str(WORKER), engine], 2, interactive=True)
        answers = ranks.answers

        def noted() -> list[dict]:
            found = answers()
            if "loss" in found[0]:
                told[engine] = {k: max(one[k] for one in found) for k in found[0]}
            return found

        ranks.answers = noted  # type: ignore[method-assign]
        return ranks

    try:
        found = meet({engine: (lambda engine=engine: start(engine)) for engine in engines}, cycles, steps)
        cold = dict(told)
        again = start(engines[0])
        again.answers()
        again.end()
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    first = engines[0]
    rows = {}
    for engine, turns in found.items():
        ratios = [a["ms"] / b["ms"] for a, b in zip(found[first], turns, strict=True)]
        rows[engine] = {
            **cold[engine],
            "ms": statistics.median(t["ms"] for t in turns),
            "of": statistics.median(ratios),
        }
    rows[first]["warm_compile_s"] = told[first]["compile_s"]
    for engine, row in rows.items():
        print(f"{engine}: {row['ms']:.1f} ms, {first} takes {row['of']:.3f} of it; passing {row['passing'] / 2**20:.1f} MiB, "
              f"loss {row['loss']:.6f}, start {row['start_s']:.1f} s, compile {row.get('compile_s', 0):.1f} s")  # fmt: skip
    return rows


def picture(meetings: dict[str, dict[str, dict]]) -> str:
    """Bars: milliseconds of a step, and MiB that come and go within one."""
    rows = [(f"{name}: {engine}", row) for name, found in meetings.items() for engine, row in found.items()]
    high = 24 * len(rows) + 50
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {high}" font-family="sans-serif" font-size="12">']
    out.append('<text x="180" y="20">a step, ms</text><text x="480" y="20">comes and goes within a step, MiB</text>')
    for at, (name, row) in enumerate(rows):
        y = 34 + 24 * at
        out.append(f'<text x="170" y="{y + 13}" text-anchor="end">{name}</text>')
        colour = "#2a6f97" if "compiled" in name or "kept" in name else "#adb5bd"
        for x, value, most in (
            (180, row["ms"], max(r["ms"] for _, r in rows)),
            (480, row["passing"] / 2**20, max(r["passing"] for _, r in rows) / 2**20),
        ):
            wide = 200 * value / most
            out.append(f'<rect x="{x}" y="{y}" width="{wide:.0f}" height="16" fill="{colour}"/>')
            out.append(f'<text x="{x + wide + 4:.0f}" y="{y + 13}">{value:.0f}</text>')
    return "\n".join([*out, "</svg>\n"])


if __name__ == "__main__":
    main()
