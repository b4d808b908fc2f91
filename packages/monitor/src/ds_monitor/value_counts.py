"""How numbers are distributed, counted where they are: on the device of a tensor, in numpy's arrays, or one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
    first, width, scale = _range(low, high)
    places = ((finite * scale - first) / width * bins).long().clamp(0, bins - 1)
    counts = places.bincount(minlength=bins).tolist()
    sums = float(finite.sum()), float(finite.square().sum())
    edges = _edges(first, width, scale, bins)
    return ValueCounts(finite.numel(), low, high, *sums, nonfinite, edges, tuple(counts))


def _of_numbers(values: Iterable[Any], bins: int) -> ValueCounts:
    numbers = [float(value) for value in values]
    finite = [value for value in numbers if math.isfinite(value)]
    nonfinite = len(numbers) - len(finite)
    if not finite:
        return _nothing(nonfinite)
    low, high = min(finite), max(finite)
    first, width, scale = _range(low, high)
    counts = [0] * bins
    for value in finite:
        counts[min(int((value * scale - first) / width * bins), bins - 1)] += 1
    sums = _sum(finite), _sum([value * value for value in finite])
    edges = _edges(first, width, scale, bins)
    return ValueCounts(len(finite), low, high, *sums, nonfinite, edges, tuple(counts))


def _range(low: float, high: float) -> tuple[float, float, float]:
    """Return where the bins begin, their width together, and the factor of both: no difference of values times it overflows fp32."""
    if not high > low:
        below, above = low, low + max(1.0, abs(low) * 2.0**-20)
        low, high = (below, above) if math.isfinite(above) else (low - abs(low) * 2.0**-20, low)
    scale = 1.0 if high - low < 1e38 else 0.25
    return low * scale, high * scale - low * scale, scale


def _sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        return sum(values)


def _edges(first: float, width: float, scale: float, bins: int) -> tuple[float, ...]:
    return tuple((first + width * (i / bins)) / scale for i in range(bins + 1))


def _nothing(nonfinite: int) -> ValueCounts:
    return ValueCounts(0, 0.0, 0.0, 0.0, 0.0, nonfinite, (0.0, 1.0), (0,))
