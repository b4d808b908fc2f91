"""Kernels beside a copy of as many bytes and beside plain torch: what `quant` measures on processors and `gpu` on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ds_ops.norms import add_rms_norm, rms_norm


@dataclass(frozen=True, slots=True)
class Case:
    """One piece of work. nbytes: what it must read and write at least. peer: the same in plain torch, or None."""

    name: str
    nbytes: float
    ours: Callable[[], object]
    peer: Callable[[], object] | None = None


def norm_cases(x: Tensor, title: str) -> list[Case]:
    """RMS norm of rows, of a sum of rows, and backwards."""
    residual, weight = torch.randn_like(x), torch.ones_like(x[0])

    def torch_norm(a: Tensor, w: Tensor) -> Tensor:
        return functional.rms_norm(a, (w.numel(),), w, 1e-6)

    def torch_sum_norm() -> tuple[Tensor, Tensor]:
        total = x + residual
        return torch_norm(total, weight), total

    def backward(norm: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        made = norm(a, w)
        return lambda: torch.autograd.grad(made, (a, w), residual, retain_graph=True)

    n = x.nbytes
    return [
        Case(f"RMS norm {title}", 2 * n, lambda: rms_norm(x, weight), lambda: torch_norm(x, weight)),
        Case(f"RMS norm of a sum {title}", 4 * n, lambda: add_rms_norm(x, residual, weight), torch_sum_norm),
        Case(f"RMS norm backward {title}", 3 * n, backward(rms_norm), backward(torch_norm)),
    ]
