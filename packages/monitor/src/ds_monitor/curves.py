"""The curves of a run: found in the files of `CsvSink` and `JsonlSink`, and drawn with characters."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from ds_config.errors import ConfigError
from ds_monitor.plot import Curve, read_curve

__all__ = ["Curve", "draw", "read_run", "select"]

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character, by column and row
_BLANK = 0x2800


def read_run(run: str | Path) -> tuple[Curve, ...]:
    """Read every gauge of a run, and the totals of its counters, by name.

    Curves are over steps, or over samples where a CSV file has samples.

    Raises:
        ConfigError: there are no metrics in `run` ("monitor-curve").
    """
    run = Path(run)
    files = sorted(run.rglob("*")) if run.is_dir() else [run]
    curves: dict[str, Curve] = {}
    for file in files:
        if file.suffix == ".csv" and file.stat().st_size:
            curve = read_curve(file)
            curves.setdefault(_named(file, curve.name, run), curve)
        elif file.suffix == ".jsonl":
            for curve in _jsonl(file):
                curves.setdefault(_named(file, curve.name, run), curve)
    if not curves:
        raise ConfigError(
            f"there are no metrics in {run}",
            code="monitor-curve",
            fix="Name the folder that csv_monitor or a sink of the configuration (csv, jsonl) writes to.",
        )
    return tuple(Curve(name, curve.x, curve.y) for name, curve in sorted(curves.items()))


def select(curves: Sequence[Curve], parts: Sequence[str]) -> tuple[Curve, ...]:
    """Select the curves whose name contains any of `parts`; all curves without `parts`.

    Raises:
        ConfigError: no curve matches ("monitor-curve").
    """
    chosen = tuple(c for c in curves if not parts or any(part.lower() in c.name.lower() for part in parts))
    if not chosen:
        raise ConfigError(
            f"no metric has {' or '.join(map(repr, parts))} in its name",
            code="monitor-curve",
            fix=f"There are: {', '.join(c.name for c in curves)}.",
        )
    return chosen


def draw(curve: Curve, *, width: int = 100, height: int = 8, last: float | None = None) -> str:
    """Draw a curve in braille characters, two by four dots each, with its name, bounds and last value.

    Values that are not finite are left out and counted. `last` replaces the last value where the curve is smoothed.
    """
    points = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
    title = curve.title
    if not points:
        return f"{title}\n"
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, end = points[0][0], points[-1][0]
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels))
    columns = max(10, width - margin - 2)
    grid = [[0] * columns for _ in range(height)]
    before: tuple[int, int] | None = None
    for x, y in points:
        across = round((x - first) / (end - first) * (columns * 2 - 1)) if end > first else 0
        down = round((high - y) / (high - low) * (height * 4 - 1)) if high > low else height * 2
        for c, r in _line(before or (across, down), (across, down)):
            grid[r // 4][c // 2] |= _DOTS[c % 2][r % 4]
        before = (across, down)
    edges = [labels[0], *[""] * (height - 2), labels[1]]
    rows = [
        f"{edge:>{margin}} ┤{''.join(chr(_BLANK + cell) for cell in row)}"
        for edge, row in zip(edges, grid, strict=True)
    ]
    foot = f"{'':{margin}} {first:g}".ljust(width - len(f"{end:g}")) + f"{end:g}"
    return "\n".join([f"{title}: {points[-1][1] if last is None else last:.6g}", *rows, foot, ""])


def _line(a: tuple[int, int], b: tuple[int, int]) -> list[tuple[int, int]]:
    """List the dots of a line from a to b."""
    count = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
    return [
        (round(a[0] + (b[0] - a[0]) * i / count), round(a[1] + (b[1] - a[1]) * i / count)) for i in range(count + 1)
    ]


def _named(file: Path, name: str, run: Path) -> str:
    """Ranks have files of their own: which one it is stands before the name."""
    ranks = [
        part
        for part in (*file.relative_to(run if run.is_dir() else run.parent).parts, *file.name.split("."))
        if part.startswith("rank")
    ]
    return f"{ranks[0]} {name}" if ranks else name


def _count(totals: dict[float, float], step: float, value: float) -> None:
    """Add to the total of a counter. A job that has gone back to an earlier step counts from there again.

    Step 0 is what records have before a resumed job says its step: it adds to the newest total.
    """
    newest = next(reversed(totals), None)
    if newest is not None and step == 0:
        step = newest
    if newest is not None and step < newest:
        for later in [known for known in totals if known >= step]:
            del totals[later]
        newest = next(reversed(totals), None)
    totals[step] = (0.0 if newest is None else totals[newest]) + value


def _jsonl(file: Path) -> list[Curve]:
    last: dict[str, dict[float, float]] = {}
    with open(file, encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the last line of a process that was killed
            kind = row.get("kind") if isinstance(row, dict) else None
            if kind == "gauge":
                last.setdefault(row["name"], {})[row["step"]] = float(row["value"])
            elif kind == "counter":
                _count(last.setdefault(row["name"], {}), row["step"], float(row["value"]))
    return [
        Curve(name, tuple(x for x, _ in sorted(v.items())), tuple(y for _, y in sorted(v.items())))
        for name, v in last.items()
    ]
