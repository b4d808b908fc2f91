"""Small statistics over timings. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["trimmed_mean"]


def trimmed_mean(values: Sequence[float], fraction: float = 0.1) -> float:
    """Compute the mean without the `fraction` smallest and the `fraction` largest values.

    Both counts are rounded down. Timings have a long tail (a page fault, another job): in a plain mean, one slow value
    of
    ten would dominate.

    Raises:
        ValueError: no values, or a fraction that leaves none (not in [0, 0.5)).
    """
    if not values:
        raise ValueError("the mean of no values was asked for")
    if not 0 <= fraction < 0.5:
        raise ValueError(f"fraction {fraction} is not in [0, 0.5)")
    cut = int(len(values) * fraction)
    trimmed = sorted(values)[cut : len(values) - cut]
    return sum(trimmed) / len(trimmed)
