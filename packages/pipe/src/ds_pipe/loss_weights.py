"""Weights of microbatches: the mean of a step's loss over tokens, where microbatches have unlike numbers of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_config.errors import PlanError

__all__ = ["LossWeights", "check_weights", "count_tokens", "weighted"]

LossWeights = Sequence[float] | Callable[[Any], float | Tensor]
"""Of each microbatch of a step, or a function of a microbatch's labels, such as `count_tokens`."""


def count_tokens(labels: Any, ignore_index: int = -100) -> int:
    """Count the labels that a cross entropy averages over: those that are not `ignore_index`.

    Args:
        labels: A tensor of token ids, of any shape, or a dict with `labels`.
    """
    tensor: Tensor = labels["labels"] if isinstance(labels, Mapping) else labels
    return int((tensor != ignore_index).sum())


def check_weights(weights: Sequence[Any], count: int) -> Tensor:
    """Return the weights of a step's microbatches, float64 [count].

    Raises:
        PlanError: another number of them, or one that is negative or not finite ("pipe-weights").
    """
    found = torch.tensor([float(w) for w in weights], dtype=torch.float64, device="cpu")
    if len(found) != count or not bool((found.isfinite() & (found >= 0)).all()):
        raise PlanError(
            f"{count} microbatches have the weights {found.tolist()[:8]}",
            code="pipe-weights",
            fix="Give one finite weight of at least 0 for each microbatch, or a function of its labels.",
        )
    return found


def weighted(loss: Tensor, share: float) -> Tensor:
    """Return share * loss; a microbatch that counts nothing adds nothing, whatever its loss (the mean over no token is NaN)."""
    return loss * share if share else torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0) * 0.0
