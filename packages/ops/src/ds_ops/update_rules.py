"""Elementwise optimizer rules as data: the rule, its coefficients, and what else the one pass over memory does.

A rule's coefficients are pure functions of the hyperparameters and the step number, computed in double precision once
per step. `native/include/ds/update.h` lists what each position means; `ds_ops/reference/update.py` defines the formulas.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

__all__ = [
    "SECOND_MOMENT",
    "AdamHyper",
    "StepKernel",
    "UpdateRule",
    "UpdateSpec",
    "UpdateTensors",
    "adagrad_coefficients",
    "adam_coefficients",
    "adam_undo_coefficients",
    "dither_of",
    "lamb_coefficients",
    "lion_coefficients",
    "sgd_coefficients",
    "sgd_plain_coefficients",
]


StepKernel = Literal["best", "fused", "foreach", "loop"]
"""How a step runs: the best kernel here, one pass or an error, torch's operations for lists, one tensor after the other in plain torch."""


class UpdateRule(enum.IntEnum):
    """The arithmetic of one element. Numbers are shared with native/include/ds/update.h, which has all but AMSGRAD."""

    ADAM = 0
    LION = 1
    ADAGRAD = 2
    SGD = 3
    SGD_PLAIN = 4
    ADAM_UNDO = 5
    LAMB_MOMENTS = 6
    LAMB_APPLY = 7
    AMSGRAD = 8


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """What one update does to every element.

    grad_scale: multiplies each gradient before use: unscaling, clipping, averaging and `maximize` in one factor. A tensor
        (fp32, of one element, where the gradients are) is used without being read on the host.
    zero_grad: write zeros into the gradients in the same pass.
    dither: in [-1/2, 1/2): where states are bf16 or fp16, the second moment (Adagrad's sum) is stored as
        round(x + dither * spacing(x)). See `dither_of`; 0 rounds to nearest.
    """

    rule: UpdateRule
    coefficients: tuple[float, ...]
    grad_scale: float | Tensor = 1.0
    zero_grad: bool = False
    dither: float = 0.0


SECOND_MOMENT: Mapping[UpdateRule, int] = {
    UpdateRule.ADAM: 1,
    UpdateRule.AMSGRAD: 1,
    UpdateRule.LAMB_MOMENTS: 1,
    UpdateRule.ADAGRAD: 0,
}
"""The state that is dithered, by rule."""


def dither_of(step: int) -> float:
    """The dither of step t >= 1: multiples of the golden ratio, which fill an interval as evenly as numbers can, without its start.

    A running mean v + (1-b2)(g^2 - v) stays where it is once its change is below half the spacing of what it is stored in. With a
    dither it is rounded up as often as the change asks for, whatever the change, and without random numbers: every element of
    a step has the same one, so results do not depend on how tensors are cut.
    """
    return math.fmod(step * 0.6180339887498949, 1.0) - 0.5


@dataclass(frozen=True, slots=True)
class UpdateTensors:
    """The tensors of one update: index i of every list belongs together and has one length.

    params, grads: fp32, bf16 or fp16, each list of one dtype. states: one list per state of the rule, all of one dtype.
    copies: empty, or tensors that receive the new parameters in their own dtype.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: tuple[Sequence[Tensor], ...] = ()
    copies: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """Hyperparameters of the Adam family. `decoupled`: AdamW (Loshchilov and Hutter 2019), else L2 in the gradient."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool = True
    bias_correction: bool = True


def adam_coefficients(h: AdamHyper, step: int) -> tuple[float, ...]:
    """Return (decay, l2, 1-b1, b2, 1-b2, lr/(1-b1^t), sqrt(1-b2^t), eps) for step t >= 1."""
    b1, b2 = h.betas
    decay = 1 - h.lr * h.weight_decay if h.decoupled else 1.0
    l2 = 0.0 if h.decoupled else h.weight_decay
    c1, c2 = (1 - b1**step, 1 - b2**step) if h.bias_correction else (1.0, 1.0)
    return (decay, l2, 1 - b1, b2, 1 - b2, h.lr / c1, math.sqrt(c2), h.eps)


def adam_undo_coefficients(h: AdamHyper, step: int) -> tuple[float, ...]:
    """Return the coefficients of step t and their inverses, which undo AdamW's step t."""
    c = adam_coefficients(h, step)
    b1, b2 = h.betas
    return (*c, 1 / b1 if b1 else 0.0, 1 / b2 if b2 else 0.0, 1 / c[0])


def lamb_coefficients(h: AdamHyper, step: int, *, eps_inside_sqrt: bool = False) -> tuple[float, ...]:
    """Return (wd, 0, 1-b1, b2, 1-b2, 1/(1-b1^t), sqrt(1-b2^t), eps, lr, 0, 1/(1-b2^t)).

    With `eps_inside_sqrt`, eps takes the place of the second zero, and a zero the place of eps.
    """
    b1, b2 = h.betas
    c1, c2 = (1 - b1**step, 1 - b2**step) if h.bias_correction else (1.0, 1.0)
    outside, inside = (0.0, h.eps) if eps_inside_sqrt else (h.eps, 0.0)
    return (h.weight_decay, 0.0, 1 - b1, b2, 1 - b2, 1 / c1, math.sqrt(c2), outside, h.lr, inside, 1 / c2)


def lion_coefficients(lr: float, betas: tuple[float, float], weight_decay: float) -> tuple[float, ...]:
    """Return Lion's coefficients (decay, b1, 1-b1, b2, 1-b2, lr)."""
    b1, b2 = betas
    return (1 - lr * weight_decay, b1, 1 - b1, b2, 1 - b2, lr)


def adagrad_coefficients(lr: float, eps: float, weight_decay: float) -> tuple[float, ...]:
    """Return Adagrad's coefficients (l2, lr, eps); `lr` is already decayed for the step."""
    return (weight_decay, lr, eps)


def sgd_coefficients(lr: float, momentum: float, dampening: float, weight_decay: float) -> tuple[float, ...]:
    """Return SGD's coefficients (decay, l2, momentum, 1-dampening, nesterov=0, lr).

    For Nesterov, replace position 4 by 1.
    """
    return (1.0, weight_decay, momentum, 1 - dampening, 0.0, lr)


def sgd_plain_coefficients(lr: float, weight_decay: float) -> tuple[float, ...]:
    """Return the coefficients (decay, l2, lr) of SGD without momentum."""
    return (1.0, weight_decay, lr)
