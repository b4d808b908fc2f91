"""A picture of rehearsals: the step of each, split into computing and waiting, beside the least that the bytes allow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_comm.rehearsal.rehearsal_report import RehearsalResult
from ds_config.errors import UnsupportedError

__all__ = ["draw"]


def draw(results: Sequence[RehearsalResult], file: Path) -> None:
    """Draw results to `file`, whose ending says the format: bars, or lines over the world where several worlds were rehearsed.

    Raises:
        UnsupportedError: matplotlib is not installed ("rehearsal-picture").
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "--picture without matplotlib", code="rehearsal-picture", fix="pip install 'ds-comm[plot]'"
        ) from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.subplots()
    if len({result.world_size for result in results}) > 1:
        _lines(axes, results)
    else:
        _bars(axes, results)
    axes.set_ylabel("milliseconds a step")
    axes.set_title(f"rehearsed on {results[0].device}, {results[0].fabric}" if results else "nothing was rehearsed")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def _bars(axes: Any, results: Sequence[RehearsalResult]) -> None:
    places = range(len(results))
    compute = [result.compute_s * 1e3 for result in results]
    axes.bar(places, compute, label="computing")
    axes.bar(places, [result.exposed_s * 1e3 for result in results], bottom=compute, label="waiting for links")
    axes.plot(places, [result.least_s * 1e3 for result in results], "k_", markersize=24, label="what the bytes allow")
    axes.set_xticks(list(places), [result.label or f"rank {result.rank}" for result in results])


def _lines(axes: Any, results: Sequence[RehearsalResult]) -> None:
    for label in dict.fromkeys(result.label for result in results):
        line = [result for result in results if result.label == label]
        worlds = [result.world_size for result in line]
        (drawn,) = axes.plot(worlds, [r.step_s * 1e3 for r in line], marker="o", label=label or "step")
        axes.plot(worlds, [r.least_s * 1e3 for r in line], ":", color=drawn.get_color(), label=f"{label} least".strip())
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.set_xlabel("ranks")
