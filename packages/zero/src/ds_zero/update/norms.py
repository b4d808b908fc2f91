"""This rank's share of the norm of a model's gradient: an element that several ranks hold counts once over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_zero.runtime.unit import Unit

__all__ = ["square_of", "weight_of"]


def weight_of(unit: Unit, divisor: int) -> float:
    """What the sum of a unit's gradients is multiplied by, besides what all are: 1 where its family's divisor is `divisor`."""
    return divisor / unit.seat.family.divisor


def square_of(units: Sequence[Unit], divisor: int) -> float:
    """This rank's share of the sum of squares of the reduced gradients, times `divisor` squared: that of the dense family.

    Reads each gradient once, unless the pass that summed it over the ranks has told.
    """
    total = 0.0
    for unit in units:
        gradients = unit.gradients
        if gradients.sums is None:
            continue
        told = gradients.square
        square = sum(map(_square, gradients.sums)) if told is None else told
        total += square * weight_of(unit, divisor) ** 2 / unit.seat.counts
    return total


def _square(grad: Tensor) -> float:
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(grad, dtype=wide)) ** 2
