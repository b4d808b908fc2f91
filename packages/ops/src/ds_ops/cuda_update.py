"""Chooses and launches the CUDA kernels of `native/cuda/update.cu`: one launch steps a whole list of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_ops.cuda_launch import launch
from ds_ops.kernel_source import CudaKernel
from ds_ops.update_rules import UpdateRule, UpdateSpec

__all__ = ["CHUNK", "KERNELS", "launch_update", "num_chunks"]

CHUNK = 8192
"""Elements of one tensor that a block updates."""

_LAYOUT = "PqPPP12ffiiiiii0q"
_RULES = {
    UpdateRule.ADAM: "update<Adam>",
    UpdateRule.LION: "update<Lion>",
    UpdateRule.ADAGRAD: "update<Adagrad>",
    UpdateRule.SGD: "update<Sgd>",
    UpdateRule.SGD_PLAIN: "update<SgdPlain>",
    UpdateRule.ADAM_UNDO: "update<AdamUndo>",
    UpdateRule.LAMB_MOMENTS: "lamb_moments",
    UpdateRule.LAMB_APPLY: "update<LambApply>",
}
_KERNELS = {rule: CudaKernel("update.cu", instance, "UpdateCall", _LAYOUT, 256, 3) for rule, instance in _RULES.items()}
KERNELS = tuple(_KERNELS.values())
_SECOND = {UpdateRule.ADAM: 1, UpdateRule.LAMB_MOMENTS: 1, UpdateRule.ADAGRAD: 0}  # the state that is dithered


def num_chunks(lengths: list[int]) -> list[int]:
    """Return how many blocks update each tensor."""
    return [-(-n // CHUNK) for n in lengths]


def launch_update(
    spec: UpdateSpec, table: _call.Columns, rows: Tensor, chunks: int, extra: tuple[Tensor | None, Tensor | None]
) -> None:
    """Queue the update on the current stream.

    Args:
        rows: int64 [7, count] on the device, of `_call.device_table`. chunks: of all tensors.
        extra: LAMB's ratios fp32 [count], and the place of its partial sums, fp64 [chunks, 2].
    """
    ratio, partials = extra
    scale = spec.grad_scale
    kinds = [table.dtypes >> 8 * i & 0xFF for i in range(4)]
    dithers = spec.dither if kinds[2] else 0.0
    numbers = (*spec.coefficients, *(0.0,) * (11 - len(spec.coefficients)), dithers)
    launch(
        _KERNELS[spec.rule],
        rows.device,
        chunks,
        _call.address(rows),
        table.count,
        _call.address(scale) if isinstance(scale, Tensor) else 0,
        0 if ratio is None else _call.address(ratio),
        0 if partials is None else _call.address(partials),
        *numbers,
        1.0 if isinstance(scale, Tensor) else scale,
        *kinds,
        _SECOND.get(spec.rule, -1) if dithers else -1,
        int(spec.zero_grad),
    )


def partial_sums(chunks: int, device: torch.device) -> Tensor:
    """Allocate the partial sums of `lamb_moments`, fp64 [chunks, 2]."""
    return torch.empty(chunks, 2, dtype=torch.float64, device=device)
