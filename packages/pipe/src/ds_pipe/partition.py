"""Where a list of layers is cut into parts: arithmetic on weights, no torch.

A partition of n layers into p parts is p + 1 bounds: part k has layers `bounds[k]` up to, not including, `bounds[k + 1]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ds_config.errors import PlanError

__all__ = ["balanced", "matching", "uniform"]


def uniform(layers: int, parts: int) -> tuple[int, ...]:
    """Split the layers into equal parts; the first parts have one layer more where `parts` does not divide."""
    _check(layers, parts)
    size, more = divmod(layers, parts)
    return tuple(k * size + min(k, more) for k in range(parts + 1))


def balanced(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the partition whose heaviest part is lightest; among equals the least sum of squares.

    Every part has at least one layer. Layers of no weight stay with the part before them: an activation that works in
    place is not separated from the layer that it follows.

    Args:
        weights: Of every layer, 0 or more: parameters, seconds, or 1 for layers that count.
    Raises:
        PlanError: fewer layers than parts ("pipe-layers").
    Cost: layers^2 x parts additions.
    """
    _check(len(weights), parts)
    n = len(weights)
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[i]: (heaviest, sum of squares) of the first i layers in k parts; back[k][i]: where the last part begins.
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [(float("inf"), float("inf"))] * n
    back: list[list[int]] = []
    for k in range(1, parts + 1):
        row, came = [(float("inf"), float("inf"))] * (n + 1), [0] * (n + 1)
        for end in range(k, n - (parts - k) + 1):
            for start in range(k - 1, end):
                last = sums[end] - sums[start]
                key = (max(best[start][0], last), best[start][1] + last * last)
                if key <= row[end]:
                    row[end], came[end] = key, start
        best = row
        back.append(came)
    bounds = [n]
    for k in range(parts, 0, -1):
        bounds.append(back[k - 1][bounds[-1]])
    return tuple(reversed(bounds))


def matching(names: Sequence[str], pattern: str) -> list[float]:
    """Return 1 for every layer whose class name matches (anywhere, ignoring case), 0 for other layers.

    Raises:
        PlanError: the pattern is not a regular expression, or no layer matches the pattern ("pipe-partition").
    """
    try:
        weights = [1.0 if re.search(pattern, name, re.IGNORECASE) else 0.0 for name in names]
    except re.error as error:
        raise PlanError(
            f"type:{pattern} is not a regular expression: {error}", code="pipe-partition", fix="Correct the pattern."
        ) from error
    if not any(weights):
        raise PlanError(
            f"no layer has a class name that matches {pattern!r}; there are {', '.join(sorted(set(names)))}",
            code="pipe-partition",
            fix="Name a class of the model after `type:`.",
        )
    return weights


def _check(layers: int, parts: int) -> None:
    if parts < 1 or layers < parts:
        raise PlanError(
            f"{layers} layers cannot be cut into {parts} stages of at least one layer",
            code="pipe-layers",
            fix="Use fewer stages (num_stages, or fewer virtual ones), or give the model as more layers.",
        )
