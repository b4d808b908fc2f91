"""Distillation on what the student itself wrote: a divergence between two distributions over the vocabulary, token by token.

Agarwal et al., arXiv:2306.13649 (generalized knowledge distillation): with M = (1 - beta) S + beta T,
JSD = beta KL(T || M) + (1 - beta) KL(S || M); at the ends, beta = 0 is KL(T || S) and beta = 1 is KL(S || T).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_config.errors import PlanError

__all__ = ["Divergence", "generalized_divergence"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """A divergence over the tokens that count; the parts are what ranks add up.

    Attributes:
        total: Its sum, a scalar with a gradient.
        count: Tokens, int64.
    """

    total: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """Of a token; 0 where none counts."""
        return self.total / self.count.clamp_min(1)


def generalized_divergence(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    top_k: int | None = None,
    clip: float | None = None,
) -> Divergence:
    """Compute the divergence of the student from the teacher, in the dtype of the logits.

    Args:
        student, teacher: Logits [batch, tokens, vocabulary].
        mask: [batch, tokens]: which tokens count.
        beta: In [0, 1]; see the module.
        temperature: Logits are divided by it.
        top_k: Both distributions are those over the teacher's likeliest entries only.
        clip: Largest contribution of one entry of the vocabulary.
    Raises:
        PlanError: shapes that do not fit, or a number out of range ("compress-distill").
    """
    _check(student, teacher, mask, beta, temperature, top_k, clip)
    if top_k is not None:
        likely = teacher.topk(top_k, -1).indices
        student, teacher = student.gather(-1, likely), teacher.gather(-1, likely)
    student_log_probs, wanted = (torch.log_softmax(logits / temperature, -1) for logits in (student, teacher))
    if beta == 0:
        parts = wanted.exp() * (wanted - student_log_probs)
    elif beta == 1:
        parts = student_log_probs.exp() * (student_log_probs - wanted)
    else:
        mixed = torch.logaddexp(student_log_probs + math.log1p(-beta), wanted + math.log(beta))
        parts = torch.lerp(student_log_probs.exp() * (student_log_probs - mixed), wanted.exp() * (wanted - mixed), beta)
    if clip is not None:
        parts = parts.clamp_max(clip)
    counted = mask.to(parts.dtype)
    return Divergence((parts.sum(-1) * counted).sum(), mask.bool().sum())


def _check(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    beta: float,
    temperature: float,
    top_k: int | None,
    clip: float | None,
) -> None:
    shapes = f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)}, mask {tuple(mask.shape)}"
    wrong = None
    if student.shape != teacher.shape or student.dim() != 3:
        wrong = f"student_logits and teacher_logits must have matching 3-D shapes: {shapes}"
    elif mask.shape != student.shape[:2]:
        wrong = f"the mask's shape must match batch and tokens of the logits: {shapes}"
    elif not 0 <= beta <= 1:
        wrong = f"beta must be in [0, 1], it is {beta}"
    elif not 0 < temperature < math.inf:
        wrong = f"temperature must be positive, it is {temperature}"
    elif top_k is not None and not 0 < top_k <= student.shape[-1]:
        wrong = f"top_k must be in 1 to {student.shape[-1]}, the vocabulary, it is {top_k}"
    elif clip is not None and not clip >= 0:
        wrong = f"the clip must be non-negative, it is {clip}"
    if wrong is not None:
        raise PlanError(wrong, code="compress-distill", fix="See ds_compress.generalized_divergence.")
