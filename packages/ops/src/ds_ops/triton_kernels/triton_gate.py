"""act(gate) * up of a gated feed-forward part (Shazeer 2020), in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_ops.triton_kernels.kernel_arguments import GATES
from ds_ops.triton_kernels.triton_support import launch

__all__ = ["gated_product"]

_BLOCK = 1024


def gated_product(both: Tensor, activation: str) -> Tensor:
    """Compute act(both[:, :n]) * both[:, n:], each factor rounded to the dtype as two kernels would; valid on the current stream.

    Args:
        both: [T, 2 n], bf16, fp16 or fp32, contiguous. activation: one of `GATES`.
    Returns: [T, n].
    Cost: one launch; reads and writes each number once.
    """
    rows, n = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, n, dtype=both.dtype, device=both.device)
    if rows:
        launch(_gated, (rows, -(-n // _BLOCK)), both, out, n, KIND=GATES[activation], BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _gated(both_ptr, out_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads tl.constexpr only
    """Compute a piece of one row. Kinds: 0 SiLU, 1 GELU, 2 GELU by tanh, 3 ReLU."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    gate = tl.load(both_ptr + row * 2 * n + at, mask=there, other=0.0)
    up = tl.load(both_ptr + row * 2 * n + n + at, mask=there, other=0.0)
    x = gate.to(tl.float32)
    if KIND == 0:
        x = x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * inner))
    else:
        x = tl.maximum(x, 0.0)
    y = x.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * n + at, y.to(gate.dtype), mask=there)
