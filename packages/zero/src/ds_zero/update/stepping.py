"""One factor on every gradient, in the pass that reads them anyway: many optimizers multiply while they update.

The factor is the average over ranks, the loss scale and the clipping coefficient in one. ds-ops' optimizers take it as an argument;
torch's fused ones divide by the attribute `grad_scale`, as torch.amp.GradScaler uses it. With all others the gradients are
multiplied first: one read and one write more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ds_ops.optim import Fusion, OpsOptimizer

__all__ = ["step_with"]

_FUSED = (Adam, AdamW, SGD, Adagrad)
_LARGEST = 1e30  # its inverse is a normal fp32, too


def step_with(optimizer: Optimizer, grads: Sequence[Tensor], factor: float) -> None:
    """`optimizer.step()` with every gradient multiplied by `factor`.

    Args:
        grads: The memory of all gradients, each element once; it may be changed.
    """
    if factor == 1.0:
        optimizer.step()
    elif isinstance(optimizer, OpsOptimizer):
        optimizer.step(fusion=Fusion(grad_scale=factor))
    elif _divides(optimizer, grads) and 1 / _LARGEST < factor < _LARGEST:
        _step_divided(optimizer, 1.0 / factor)
    else:
        for grad in grads:
            grad.mul_(factor)
        optimizer.step()


def _divides(optimizer: Optimizer, grads: Sequence[Tensor]) -> bool:
    # The divisor is an fp32, which is not enough for wider gradients. A subclass may do something else in its step.
    fused = type(optimizer) in _FUSED and all(group.get("fused") for group in optimizer.param_groups)
    return fused and all(grad.dtype.itemsize <= 4 for grad in grads)


def _step_divided(optimizer: Optimizer, divisor: float) -> None:
    told: Any = optimizer  # both attributes exist during a step only
    told.grad_scale = torch.tensor(divisor, dtype=torch.float32)
    told.found_inf = torch.zeros((), dtype=torch.float32)
    try:
        optimizer.step()
    finally:
        del told.grad_scale, told.found_inf
