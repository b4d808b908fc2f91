"""The norm of a model's gradient where one model is cut along more axes than the one ZeRO uses.

Words: with tensor or pipeline parallelism a process has a *part* of the model. The norm is that of all parts together; what
every part has a copy of (a LayerNorm between tensor-parallel layers) counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import ds_comm as comm
from ds_zero.unit import Unit

__all__ = ["NormScope", "square_of"]


@dataclass(frozen=True, slots=True)
class NormScope:
    """Over which ranks a gradient's norm is taken, besides those that share one part of the model.

    Attributes:
        group: The ranks that hold the other parts. A step that one of them must skip is skipped by all.
        replicated: Names of parameters of which every part has a copy, with the same gradient.
    """

    group: comm.Group
    replicated: frozenset[str] = frozenset()

    def total(self, square: float) -> float:
        """The sum of squares of all parts. Collective over `group`."""
        everyone = torch.tensor([square], dtype=torch.float64)
        comm.all_reduce(everyone, group=self.group, unit="norm")
        return everyone.item()


def square_of(units: Sequence[Unit], scope: NormScope | None) -> float:
    """This rank's share of the sum of squares of reduced gradients. Reads each gradient once, unless the pass that
    summed it over the ranks has told."""
    total = 0.0
    for unit in units:
        gradients = unit.gradients
        if gradients.sums is None:
            continue
        if scope is None or scope.replicated.isdisjoint(unit.spec.shapes):
            told = gradients.square
            total += sum(map(_square, gradients.sums)) if told is None else told
            continue
        for piece in unit.owned:
            copies = scope.group.size if piece.name in scope.replicated else 1
            grad = gradients.view(piece.start, piece.stop)
            total += 0.0 if grad is None else _square(grad) / copies
    return total


def _square(grad: Tensor) -> float:
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(grad, dtype=wide)) ** 2
