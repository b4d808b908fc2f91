"""Predicted beside measured, as a picture. Needs matplotlib (the extra `show`)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_config.errors import UnsupportedError

__all__ = ["draw"]


def draw(rows: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """Draw predicted against measured step time and memory per rank, a point per measured trial.

    A line shows where both agree.

    Args:
        rows: As `ds_tune.results_writer.rows_of` builds them.
    Raises:
        UnsupportedError: matplotlib is not installed ("tune-picture").
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "a picture was asked for, and matplotlib is not installed",
            code="tune-picture",
            fix="pip install 'ds-tune[show]'.",
        ) from error
    figure = figures.Figure(figsize=(9, 4.2), layout="constrained")
    for axes, (kind, unit, scale) in zip(
        figure.subplots(1, 2), (("ms", "ms a step", 1.0), ("bytes", "MiB a rank", 2.0**-20)), strict=True
    ):
        points = [
            (row[f"predicted_{kind}"] * scale, row[f"measured_{kind}"] * scale, row["name"])
            for row in rows
            if row[f"predicted_{kind}"] is not None and row[f"measured_{kind}"] is not None
        ]
        axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], s=28)
        if points:
            low, high = (f(min(p[:2]) if f is min else max(p[:2]) for p in points) for f in (min, max))
            axes.plot([low, high], [low, high], linewidth=1, linestyle="--", color="0.5")
            for x, y, name in sorted(points, key=lambda p: p[1])[:3]:
                axes.annotate(name, (x, y), fontsize=7, xytext=(4, -8), textcoords="offset points")
        axes.set(xlabel=f"predicted, {unit}", ylabel=f"measured, {unit}")
    if title:
        figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
