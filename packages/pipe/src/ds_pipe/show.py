"""Pictures of programs: a table of text, and a Gantt chart (needs matplotlib, the extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from ds_config.errors import UnsupportedError
from ds_pipe.actions import ActionKind
from ds_pipe.schedule_timing import Span

__all__ = ["as_gantt", "as_table"]

_COLOURS = {
    ActionKind.FORWARD: "#6fa8dc",
    ActionKind.BACKWARD: "#93c47d",
    ActionKind.INPUT_GRAD: "#93c47d",
    ActionKind.WEIGHT_GRAD: "#ffd966",
}


def as_table(ranks: Sequence[Sequence[Span]], columns: int = 160) -> str:
    """Draw one rank per line, time from left to right, dots for waiting.

    An action's text is truncated to the width of its time.

    Args:
        columns: Characters of a line, at most.
    """
    end = max((span[1] for row in ranks for span in row), default=0.0)
    shortest = min((b - a for row in ranks for a, b, _ in row if b > a), default=1.0)
    longest_text = max((len(str(action)) for row in ranks for _, _, action in row), default=1)
    scale = min((longest_text + 1) / shortest, columns / end) if end else 1.0
    lines = []
    for number, row in enumerate(ranks):
        line = ["."] * round(end * scale)
        for begin, stop, action in row:
            a, b = round(begin * scale), round(stop * scale)
            line[a:b] = str(action)[: max(0, b - a - 1)].ljust(b - a)
        lines.append(f"rank {number:<2} {''.join(line)}")
    return "\n".join(lines)


def as_gantt(charts: Sequence[tuple[str, Sequence[Sequence[Span]]]], path: str | PathLike[str]) -> None:
    """Draw programs below each other, with one time axis, into a PNG (or any format matplotlib knows by its name).

    Args:
        charts: Title and spans by rank of each, as `simulate` gives or a run measured.
        path: The file.
    Raises:
        UnsupportedError: matplotlib is not installed ("pipe-plot").
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "a picture needs matplotlib, which is not installed",
            code="pipe-plot",
            fix="Install ds-pipe[plot], or leave the picture out.",
        ) from error
    rows = sum(len(ranks) for _, ranks in charts)
    figure = Figure(figsize=(14, 0.9 * len(charts) + 0.45 * rows), layout="constrained")
    axes = figure.subplots(len(charts), 1, squeeze=False, sharex=True)
    for axis, (title, ranks) in zip(axes[:, 0], charts, strict=True):
        _draw(axis, title, ranks)
    axes[-1, 0].set_xlabel("time")
    figure.savefig(path, dpi=110)


def _draw(axis: Any, title: str, ranks: Sequence[Sequence[Span]]) -> None:
    stages = 1 + max((action.stage for row in ranks for _, _, action in row), default=0)
    total = max((span[1] for row in ranks for span in row), default=0.0)
    for number, row in enumerate(ranks):
        for begin, end, action in row:
            # Later stages of a rank are darker.
            shade = 1.0 - 0.45 * (action.stage // max(1, len(ranks))) / max(1, stages // max(1, len(ranks)))
            axis.barh(
                number,
                end - begin,
                left=begin,
                color=_COLOURS.get(action.op, "#cccccc"),
                alpha=shade,
                edgecolor="white",
            )
            if end - begin > total / 150:
                text = f"{action.op.value}{action.microbatch}"
                axis.text((begin + end) / 2, number, text, ha="center", va="center", fontsize=6)
    axis.set_yticks(range(len(ranks)), [f"rank {r}" for r in range(len(ranks))])
    axis.invert_yaxis()
    axis.set_title(title, fontsize=9, loc="left")
