"""`ds monitor show RUN` draws what a run reported; `ds monitor trace DIR` puts the spans of all its ranks into one file and one picture."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ds_config.errors import DsError

__all__ = ["HELP", "main", "register"]

HELP = "draw the curves of a run; merge the traces of its ranks"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    commands = parser.add_subparsers(dest="what", required=True)
    show = commands.add_parser("show", help="draw metrics from the files of CsvSink and JsonlSink")
    show.add_argument("run", type=Path, help="a folder or a file")
    show.add_argument("--metric", nargs="+", default=[], help="parts of names; by default every metric")
    show.add_argument("--smooth", type=float, default=0.0, help="weight of the moving average, 0 to 0.99")
    show.add_argument("--png", type=Path, help="also draw them into this PNG")
    show.add_argument("--html", type=Path, help="also draw them into this page, which needs no other file")
    show.add_argument(
        "--json", action="store_true", help="print every value as JSON instead of drawing in the terminal"
    )
    trace = commands.add_parser("trace", help="match the collectives of all ranks and name who came late")
    trace.add_argument(
        "folder", type=Path, help="files of JsonlSink with ranks: all, or of torch's profiler, one a rank"
    )
    trace.add_argument("--out", type=Path, help="for https://ui.perfetto.dev; by default DIR/merged.perfetto-trace")
    trace.add_argument("--png", type=Path, help="the picture; by default DIR/merged.png")
    trace.add_argument("--step", type=int, help="draw this step; by default the last one whole")
    trace.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        return _show(args) if args.what == "show" else _trace(args)
    except DsError as error:
        print(error, file=sys.stderr)
        return 1


def _show(args: argparse.Namespace) -> int:
    from ds_monitor import curves
    from ds_monitor.plot import page, plot_grid, smooth

    selected = curves.select(curves.read_run(args.run), args.metric)
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    smoothed = [curves.Curve(c.name, c.x, smooth(c.y, args.smooth)) if args.smooth else c for c in selected]
    for curve, shown in zip(selected, smoothed, strict=True) if not args.json else ():
        print(curves.draw(shown, width=width, last=curve.y[-1]))
    drawn = []
    if args.png:
        drawn.append(plot_grid(selected, args.png, weight=args.smooth, title=args.run.name))
    if args.html:
        drawn.append(page(selected, args.html, weight=args.smooth, title=args.run.name))
    if args.json:
        records = [{"name": c.name, "x": _numbers(c.x), "y": _numbers(c.y)} for c in smoothed]
        print(json.dumps({"curves": records, "drawn": list(map(str, drawn))}))
        return 0
    for path in drawn:
        print(f"drawn: {path}")
    return 0


def _numbers(values: Sequence[float]) -> list[float | str]:
    """Convert values as JsonlSink writes them: values that are not finite become strings."""
    return [value if math.isfinite(value) else str(value) for value in values]


def _trace(args: argparse.Namespace) -> int:
    from ds_monitor.tracing import lateness, match, offsets, read_ranks, straggler, write_perfetto
    from ds_monitor.tracing.trace_plot import draw, report

    ranks = read_ranks(args.folder)
    calls = match(ranks)
    clocks = offsets(calls)
    late = lateness(calls, clocks)
    out = write_perfetto(ranks, calls, args.out or args.folder / "merged.perfetto-trace", clocks)
    seconds = max(s.ended_s for r in ranks for s in r.spans) - min(s.began_s for r in ranks for s in r.spans)
    worst = straggler(late, seconds)
    if not args.json:
        print(report(len(ranks), calls, clocks, late, worst))
        print(f"written: {out}")
    picture = draw(ranks, late, clocks, args.png or args.folder / "merged.png", step=args.step)
    if args.json:
        summary = {
            "ranks": [rank.rank for rank in ranks],
            "collectives": len(calls),
            "clocks": [{"rank": rank, "ahead_s": value} for rank, value in sorted(clocks.items())],
            "lateness": [asdict(item) for item in late],
            "straggler": None if worst is None else worst.rank,
            "written": str(out),
            "drawn": str(picture),
        }
        print(json.dumps(summary, indent=1))
        return 0
    print(f"drawn: {picture}")
    return 0


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["monitor", *sys.argv[1:]]))
