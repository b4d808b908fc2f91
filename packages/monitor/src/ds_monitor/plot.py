"""Curves as pictures, from the files that the CSV and JSONL sinks write."""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_config.errors import ConfigError
from ds_monitor.sinks.sink import require

__all__ = ["Curve", "page", "plot_curves", "plot_grid", "read_curve", "smooth"]


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over training. `x` and `y` have one length; `x` rises."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    @property
    def title(self) -> str:
        """Return the name, and how many values a picture cannot show."""
        lost = sum(not math.isfinite(value) for value in self.y)
        return self.name + (f"  ({lost} values are not finite)" if lost else "")


def read_curve(path: str | Path, name: str | None = None) -> Curve:
    """Read one metric from a file of `CsvSink` (`*.csv`) or `JsonlSink` (any other ending).

    Of a step that a resumed job has repeated, the last value counts.

    Args:
        path: the file.
        name: which metric; needed for JSONL, where it is matched in full; renames the curve of a CSV file.
    Raises:
        ConfigError: no such file, or nothing of that name in it ("monitor-curve").
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", code="monitor-curve", fix="Name a file a sink wrote.")
    points = _csv_points(path) if path.suffix == ".csv" else _jsonl_points(path, name)
    if not points:
        raise ConfigError(
            f"{path} has no value" + (f" called {name!r}" if name else ""),
            code="monitor-curve",
            fix="Check the metric's name; a job writes it when its first step is complete.",
        )
    return Curve(name or path.stem, tuple(x for x, _ in points), tuple(y for _, y in points))


def smooth(values: Sequence[float], weight: float = 0.9) -> tuple[float, ...]:
    """Compute the exponential moving average with bias correction; a weight of 0 returns the values.

    A value that is not finite stays as it is, and the average goes on without it.

    Bias correction as in Kingma & Ba 2015, section 3.
    """
    average, scale = 0.0, 0.0
    smoothed = []
    for value in values:
        if not math.isfinite(value):
            smoothed.append(value)
            continue
        average = weight * average + (1 - weight) * value
        scale = weight * scale + (1 - weight)
        smoothed.append(average / scale)
    return tuple(smoothed)


def plot_curves(
    curves: Sequence[Curve], path: str | Path, *, title: str = "", xlabel: str = "step", ylabel: str = ""
) -> Path:
    """Draw the curves into one PNG: values pale, their moving average in full colour.

    Raises:
        UnsupportedError: matplotlib is not installed ("monitor-extra").
    """
    figures = require("matplotlib.figure", "plot")
    figure = figures.Figure(figsize=(8, 4.5), dpi=120, layout="constrained")  # not pyplot: no global state, no display
    axes = figure.add_subplot()
    for index, curve in enumerate(curves):
        axes.plot(curve.x, curve.y, color=f"C{index}", alpha=0.3, linewidth=1)
        axes.plot(curve.x, smooth(curve.y), color=f"C{index}", linewidth=1.8, label=curve.title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if curves:
        axes.legend()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def plot_grid(curves: Sequence[Curve], path: str | Path, *, weight: float = 0.0, title: str = "") -> Path:
    """Plot a panel for each curve, three in a row, into one PNG file.

    Raises:
        UnsupportedError: matplotlib is not installed ("monitor-extra").
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _grid(curves, weight, title).savefig(path, format="png")
    return path


def page(curves: Sequence[Curve], path: str | Path, *, weight: float = 0.0, title: str = "") -> Path:
    """Write the panels as a self-contained HTML page, with the last, lowest and highest value of each curve.

    Raises:
        UnsupportedError: matplotlib is not installed ("monitor-extra").
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.StringIO()
    _grid(curves, weight, "").savefig(picture, format="svg")
    svg = picture.getvalue()
    rows = "".join(
        f"<tr><td>{html.escape(c.name)}</td><td>{c.y[-1]:.6g}</td><td>{low:.6g}</td><td>{high:.6g}</td></tr>"
        for c, (low, high) in ((c, _bounds(c)) for c in curves)
    )
    head = "<tr><th>metric</th><th>last</th><th>lowest</th><th>highest</th></tr>"
    style = (
        "body{font:14px sans-serif;margin:2em}svg{max-width:100%;height:auto}td,th{padding:.2em 1em;text-align:right}"
    )
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{style}td:first-child,"
        f"th:first-child{{text-align:left}}</style><h1>{html.escape(title)}</h1>{svg[svg.index('<svg') :]}"
        f"<table>{head}{rows}</table>\n",
        encoding="utf-8",
    )
    return path


def _bounds(curve: Curve) -> tuple[float, float]:
    finite = [value for value in curve.y if math.isfinite(value)] or [math.nan]
    return min(finite), max(finite)


def _grid(curves: Sequence[Curve], weight: float, title: str) -> Any:
    figures = require("matplotlib.figure", "plot")
    across = min(3, max(1, len(curves)))
    down = -(-len(curves) // across)
    figure = figures.Figure(figsize=(4.6 * across, 2.7 * down), dpi=110, layout="constrained")
    if title:
        figure.suptitle(title)
    for index, curve in enumerate(curves):
        axes = figure.add_subplot(down, across, index + 1)
        axes.plot(curve.x, curve.y, color="C0", alpha=0.3 if weight else 1.0, linewidth=1.2)
        if weight:
            axes.plot(curve.x, smooth(curve.y, weight), color="C0", linewidth=1.8)
        axes.set_title(curve.title, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    return figure


def _csv_points(path: Path) -> list[tuple[float, float]]:
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return sorted({float(x): float(y) for x, y in rows[1:]}.items())


def _jsonl_points(path: Path, name: str | None) -> list[tuple[float, float]]:
    last: dict[float, float] = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if row["kind"] == "gauge" and row["name"] == name:
                last[row["step"]] = float(row["value"])
    return sorted(last.items())
