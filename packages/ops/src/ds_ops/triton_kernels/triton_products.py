"""Products with codes: weights of 8 and 4 bits are read as they are, and become numbers in registers.

A step of decoding is bound by reading weights: a product that first writes the numbers to memory moves more bytes than bf16 weights would.
Writing and reading them takes as long as a product of about a thousand rows; beyond that it is the smaller part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_ops.formats import FP8_E4M3, INT4, INT8, QuantTensor
from ds_ops.triton_kernels.triton_support import launch

__all__ = ["coded_product", "fits"]

_ROWS = 1024
_BLOCK_K = 64


def _tile(rows: int) -> tuple[int, int, int]:
    """Return rows and outputs of a program, and its warps."""
    if rows > 64:
        return 128, 64, 8
    return (64, 32, 8) if rows > 32 else (32, 32, 8) if rows > 16 else (16, 32, 4)


def fits(weight: QuantTensor, rows: int) -> bool:
    """Whether `coded_product` takes the codes, and is the better way for so many rows."""
    group, kind = weight.spec.group, weight.spec.format
    whole = group % 16 == 0 or group >= weight.cols
    return kind in (INT8, INT4, FP8_E4M3) and whole and len(weight.shape) == 2 and rows <= _ROWS


def coded_product(x: Tensor, weight: QuantTensor) -> Tensor:
    """Compute x @ weight^T, sums in fp32; valid on the current stream.

    Args:
        x: [.., K], bf16, fp16 or fp32. weight: int8, int4 or e4m3 codes [N, K], see `fits`.
    Returns: [.., N] of x's dtype.
    Cost: one launch; reads the codes and their scales once for every 64 rows, of more rows for every 128.
    """
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    rows, cols = flat.shape
    out = torch.empty(rows, weight.rows, dtype=x.dtype, device=x.device)
    kinds = {INT8: 1, INT4: 2, FP8_E4M3: 3}
    spec, layout = weight.spec, weight.layout
    block_m, block_n, warps = _tile(rows)
    if rows:
        launch(
            _coded,
            (-(-weight.rows // block_n), -(-rows // block_m)),
            flat, weight.wire, weight.wire.view(torch.float32), out,
            rows, weight.rows, cols, layout.row_bytes, layout.params_at // 4, spec.group,
            KIND=kinds[spec.format], ZEROS=not spec.symmetric, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=_BLOCK_K,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=3,
        )  # fmt: skip
    return out.view(*x.shape[:-1], weight.rows)


@triton.jit
def _coded(  # type: ignore[no-untyped-def]  # Triton reads tl.constexpr only
    x_ptr, wire_ptr, params_ptr, out_ptr, rows, outputs, cols, row_bytes, params_at, group,
    KIND: tl.constexpr, ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of BLOCK_N outputs. Kinds of codes: 1 int8, 2 int4, 3 e4m3."""
    PARTS: tl.constexpr = 2 if ZEROS else 1
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    codes_row = wire_ptr + n.to(tl.int64) * row_bytes
    params_row = params_ptr + n.to(tl.int64) * (row_bytes // 4) + params_at
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, cols, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + m[:, None].to(tl.int64) * cols + k[None, :],
            mask=(m < rows)[:, None] & (k < cols)[None, :],
            other=0.0,
        )
        there = (n < outputs)[:, None] & (k < cols)[None, :]
        at = k // 2 if KIND == 2 else k
        code = tl.load(codes_row[:, None] + at[None, :], mask=there, other=0).to(tl.int32)
        if KIND == 2:
            code = (code >> ((k % 2) * 4)[None, :]) & 15
            if not ZEROS:
                code = code - ((code & 8) << 1)
        if KIND == 1 and not ZEROS:
            code = code - ((code & 128) << 1)
        if KIND == 3:
            bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
            number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        else:
            number = code.to(tl.float32)
        params = params_row[:, None] + (k // group * PARTS)[None, :]
        if ZEROS:
            number = number - tl.load(params + 1, mask=there, other=0.0)
        number = number * tl.load(params, mask=there, other=0.0)
        acc += tl.dot(x, tl.trans(number.to(x.dtype)), input_precision=PRECISION)
    place = out_ptr + m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])
