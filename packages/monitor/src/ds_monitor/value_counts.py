"""How numbers are distributed, counted where they are: on the device of a tensor, in numpy's arrays, or one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ds_config.errors import ConfigError

__all__ = ["ValueCounts", "count_values"]


@dataclass(frozen=True, slots=True)
class ValueCounts:
    """Numbers in bins of equal width; bin i has those from `edges[i]` up to `edges[i + 1]`, the last one its upper edge, too.

    Attributes:
        num: Of finite values.
        nonfinite: Of others, which count in nothing else.
    """

    num: int
    min: float
    max: float
    sum: float
    sum_squares: float
    nonfinite: int
    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def attributes(self) -> dict[str, Any]:
        """Return what a record of it has."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def count_values(values: Any, bins: int = 64) -> ValueCounts:
    """Count a tensor's, an array's or a list's numbers.

    Raises:
        ConfigError: fewer than one bin ("monitor-bins").
    """
    if bins < 1:
        raise ConfigError(f"a histogram of {bins} bins", code="monitor-bins", fix="Give at least 1.")
    if hasattr(values, "detach") and hasattr(values, "isfinite"):
        return _of_tensor(values.detach(), bins)
    return _of_numbers(values.ravel().tolist() if hasattr(values, "ravel") else values, bins)


def _of_tensor(values: Any, bins: int) -> ValueCounts:
    flat = values.flatten()
    flat = flat.double() if values.device.type == "cpu" else flat.float()  # mps has no fp64
    finite = flat[flat.isfinite()]
    nonfinite = flat.numel() - finite.numel()
    if not finite.numel():
        return _nothing(nonfinite)
    low, high = (float(bound) for bound in finite.aminmax())
    top = high if high > low else low + 1.0
    places = ((finite - low) * (bins / (top - low))).long().clamp(0, bins - 1)
    counts = places.bincount(minlength=bins).tolist()
    sums = float(finite.sum()), float(finite.square().sum())
    return ValueCounts(finite.numel(), low, high, *sums, nonfinite, _edges(low, top, bins), tuple(counts))


def _of_numbers(values: Iterable[Any], bins: int) -> ValueCounts:
    numbers = [float(value) for value in values]
    finite = [value for value in numbers if math.isfinite(value)]
    nonfinite = len(numbers) - len(finite)
    if not finite:
        return _nothing(nonfinite)
    low, high = min(finite), max(finite)
    top = high if high > low else low + 1.0
    counts = [0] * bins
    for value in finite:
        counts[min(int((value - low) * (bins / (top - low))), bins - 1)] += 1
    squares = math.fsum(value * value for value in finite)
    return ValueCounts(
        len(finite), low, high, math.fsum(finite), squares, nonfinite, _edges(low, top, bins), tuple(counts)
    )


def _edges(low: float, top: float, bins: int) -> tuple[float, ...]:
    return (*(low + (top - low) * i / bins for i in range(bins)), top)


def _nothing(nonfinite: int) -> ValueCounts:
    return ValueCounts(0, 0.0, 0.0, 0.0, 0.0, nonfinite, (0.0, 1.0), (0,))
