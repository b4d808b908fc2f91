"""A picture of one step on all ranks, and in words who came late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_monitor.metric_names import MEMORY
from ds_monitor.sinks.sink import require
from ds_monitor.tracing.matching import Collective, Lateness
from ds_monitor.tracing.trace_reader import Rank, Span

__all__ = ["draw", "report"]


def report(
    ranks: int,
    calls: Sequence[Collective],
    clocks: Mapping[int, float],
    late: Sequence[Lateness],
    worst: Lateness | None,
) -> str:
    """Summarize the merged trace as readable lines of text."""
    lines = [f"{ranks} ranks, {len(calls)} collectives matched"]
    lines += [f"clock of rank {rank}: {value * 1e3:+.1f} ms, taken away" for rank, value in sorted(clocks.items())]
    lines += [
        f"rank {item.rank}: last {item.times_last} times, waited for {item.seconds * 1e3:.1f} ms" for item in late
    ]
    if worst is None:
        lines.append("no rank stands out")
    else:
        lines.append(f"straggler: rank {worst.rank}, for which the others waited {worst.seconds * 1e3:.1f} ms")
    return "\n".join(lines)


def draw(
    ranks: Sequence[Rank],
    late: Sequence[Lateness],
    clocks: Mapping[int, float],
    path: str | Path,
    *,
    step: int | None = None,
) -> Path:
    """Draw phases and collectives of a step rank by rank, waiting time per rank, and memory over time.

    Args:
        step: A step that the files name; by default the last that is complete on every rank. Files without steps are
            drawn in full.
    Raises:
        UnsupportedError: matplotlib is not installed ("monitor-extra").
    """
    figures = require("matplotlib.figure", "plot")
    remembered = [rank for rank in ranks if any(name == MEMORY for name, _, _ in rank.gauges)]
    figure = figures.Figure(
        figsize=(13, 1.6 + 0.75 * len(ranks) + 2.5 * bool(remembered)), dpi=110, layout="constrained"
    )
    upper, lower = (
        figure.subfigures(2, 1, height_ratios=(1.6 + 0.75 * len(ranks), 2.5)) if remembered else (figure, None)
    )
    if lower is not None:
        _memory(lower.subplots(), remembered, clocks)
    left, right = upper.subplots(1, 2, width_ratios=(4, 1))
    begin_s, end_s, title = _window(ranks, step)
    colors: dict[str, str] = {}
    for height, rank in enumerate(ranks):
        for span in rank.spans:
            if begin_s <= span.began_s <= end_s:
                _bar(left, span, (height, begin_s + clocks.get(rank.rank, 0.0)), colors)
    left.set_yticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks])
    left.invert_yaxis()
    left.set_xlabel("ms")
    left.set_title(title, fontsize=10)
    handles = [left.scatter([], [], color=color, marker="s", label=name) for name, color in colors.items()]
    left.legend(
        handles=handles, fontsize=8, ncols=min(6, max(1, len(colors))), loc="upper center", bbox_to_anchor=(0.5, -0.22)
    )
    seconds = {item.rank: item.seconds * 1e3 for item in late}
    right.barh(range(len(ranks)), [seconds.get(rank.rank, 0.0) for rank in ranks], color="C3")
    right.set_yticks(range(len(ranks)), [])
    right.invert_yaxis()
    right.set_title("waited for it, ms in all", fontsize=10)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _memory(axes: Any, ranks: Sequence[Rank], clocks: Mapping[int, float]) -> None:
    """Plot the memory in use over the whole trace."""
    zero_s = min(rank.spans[0].began_s - clocks.get(rank.rank, 0.0) for rank in ranks)
    for rank in ranks:
        points = [
            (at_s - clocks.get(rank.rank, 0.0) - zero_s, value / 2**20)
            for name, at_s, value in rank.gauges
            if name == MEMORY
        ]
        axes.step(
            [at for at, _ in points], [mib for _, mib in points], where="post", marker=".", label=f"rank {rank.rank}"
        )
    axes.set(xlabel="s", ylabel="MiB", title="memory in use")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))  # beside the lines, which may be anywhere
    axes.grid(alpha=0.3)


def _window(ranks: Sequence[Rank], step: int | None) -> tuple[float, float, str]:
    """Return begin, end and title of the drawn step, which lies between two ends of `engine/step`.

    Without at least two ends, the window is the whole trace.
    """
    ends = [[span.ended_s for span in rank.spans if span.name == "engine/step"] for rank in ranks]
    count = min(map(len, ends))
    first = min(span.began_s for rank in ranks for span in rank.spans)
    if count < 2:
        return first, max(span.ended_s for rank in ranks for span in rank.spans), "whole trace"
    index = count - 1 if step is None else min(max(step, 2), count) - 1
    return min(e[index - 1] for e in ends), max(e[index] for e in ends), f"step {index + 1}"


def _bar(axes: Any, span: Span, where: tuple[float, float], colors: dict[str, str]) -> None:
    height, zero_s = where
    collective = span.name.startswith("comm/") or bool(span.group)
    name = span.name.removeprefix("comm/").removeprefix("engine/")
    if name not in colors:
        if len(colors) >= 14:
            return  # a legend that nobody reads; the file for Perfetto has all
        colors[name] = f"C{len(colors) % 10}"
    low = height + (0.06 if collective else -0.38)
    at = [(1e3 * (span.began_s - zero_s), max(1e3 * span.seconds, 1e-3))]
    axes.broken_barh(at, (low, 0.32 if collective else 0.4), color=colors[name], alpha=0.85)
