"""Small statistics over timings. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["trimmed_mean"]


def trimmed_mean(values: Sequence[float], fraction: float = 0.1) -> float:
    """Mean without the `fraction` smallest and the `fraction` largest values (each rounded down to whole values).

    Timings have a long tail (a page fault, another job), which one slow value of ten would otherwise decide.

    Raises:
        ValueError: no values, or a fraction that leaves none (not in [0, 0.5)).
    """
    if not values:
        raise ValueError("the mean of no values was asked for")
    if not 0 <= fraction < 0.5:
        raise ValueError(f"fraction {fraction} is not in [0, 0.5)")
    cut = int(len(values) * fraction)
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)
