"""Products with codes: weights of 8 and 4 bits are read as they are, and become numbers in registers.

A step of decoding is bound by reading weights: a product that first writes the numbers to memory moves more bytes than bf16 weights would.
Writing and reading them takes as long as a product of about a thousand rows; beyond that it is the smaller part. `ds_ops.product_choice`
says where this is the better product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_ops.formats import FP4_E2M1, FP8_E4M3, INT4, INT8, QuantTensor
from ds_ops.triton_kernels.triton_support import launch, next_power, shared_memory

__all__ = ["coded_grouped_product", "coded_product", "plan_stages"]

_BLOCK_K = 64
_KINDS = {INT8: 1, INT4: 2, FP8_E4M3: 3, FP4_E2M1: 4}


def _tile(rows: int, size: int) -> tuple[int, int, int]:
    """Return rows and outputs of a program, and its warps; `size` bytes of a number: fp32 has no tensor core, and takes more registers."""
    if rows > 32 and size < 4:
        return (128, 64, 8) if rows > 64 else (64, 32, 8)
    return (32, 32, 8) if rows > 16 else (16, 32, 4)


def plan_stages(tile: tuple[int, int], size: int, zeros: bool, room: int) -> int:
    """Return how many steps of the loop are under way: three, or two where three do not fit into the memory of a block.

    Args:
        tile: Rows and outputs of a program.
        size: Bytes of a number of x.
        zeros: Codes have zero points beside their scales.
        room: Bytes of shared memory that a block may have.
    """
    if torch.version.hip:  # a compute unit has 64 KiB
        return 2
    # Of a step that is not begun yet: x, codes, and a parameter beside each code; of the present one what codes became.
    step = _BLOCK_K * (tile[0] * size + tile[1] * (1 + (8 if zeros else 4)))
    return 3 if 2 * step + _BLOCK_K * tile[1] * size <= room else 2


def coded_product(x: Tensor, weight: QuantTensor) -> Tensor:
    """Compute x @ weight^T, sums in fp32; valid on the current stream.

    Args:
        x: [.., K], bf16, fp16 or fp32. weight: int8, int4, e4m3 or e2m1 codes [N, K], in groups of multiples of 16 or whole rows.
    Returns: [.., N] of x's dtype.
    Cost: one launch; reads the codes and their scales once for every 64 rows, of more rows for every 128.
    """
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    rows, cols = flat.shape
    out = torch.empty(rows, weight.rows, dtype=x.dtype, device=x.device)
    spec, layout = weight.spec, weight.layout
    block_m, block_n, warps = _tile(rows, x.element_size())
    if rows:
        launch(
            _coded,
            (-(-weight.rows // block_n), -(-rows // block_m)),
            flat, weight.wire, weight.wire.view(torch.float32), out,
            rows, weight.rows, cols, layout.row_bytes, layout.params_at // 4, spec.group,
            KIND=_KINDS[spec.format], ZEROS=not spec.symmetric, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=_BLOCK_K,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps,
            num_stages=plan_stages((block_m, block_n), x.element_size(), not spec.symmetric, shared_memory(x.device)),
        )  # fmt: skip
    return out.view(*x.shape[:-1], weight.rows)


def coded_grouped_product(x: Tensor, weights: QuantTensor, ends: Tensor) -> Tensor:
    """Compute x[rows of g] @ weights[g]^T for every group g, sums in fp32; valid on the current stream. The host reads nothing.

    Args:
        x: [T, K], bf16, fp16 or fp32, rows sorted by group. weights: codes [E, N, K], as in `coded_product`.
        ends: int32 or int64 [E], where the rows of each group end.
    Returns: [T, N] of x's dtype; zeros past the last end.
    Cost: one launch; reads the codes of groups that have rows, once for every 16 to 128 of these.
    """
    (rows, cols), (experts, outputs, _) = x.shape, weights.shape
    out = torch.zeros(rows, outputs, dtype=x.dtype, device=x.device)
    spec, layout = weights.spec, weights.layout
    block_m, block_n, warps = _tile(-(-rows // experts), x.element_size())
    if rows:
        launch(
            _coded_groups,
            (-(-outputs // block_n), -(-rows // block_m) + min(rows, experts)),
            x.contiguous(), weights.wire, weights.wire.view(torch.float32), ends, out,
            experts, outputs, cols, layout.row_bytes, layout.params_at // 4, spec.group,
            KIND=_KINDS[spec.format], ZEROS=not spec.symmetric, EXPERTS=next_power(experts),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=_BLOCK_K,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps,
            num_stages=plan_stages((block_m, block_n), x.element_size(), not spec.symmetric, shared_memory(x.device)),
        )  # fmt: skip
    return out


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]  # Triton reads tl.constexpr only
    x_ptr, wire_ptr, params_ptr, m, m_there, n, n_there, cols, row_bytes, params_at, group,
    KIND: tl.constexpr, ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute rows m of x times rows n of the codes, fp32 [BLOCK_M, BLOCK_N]. Kinds of codes: 1 int8, 2 int4, 3 e4m3, 4 e2m1."""
    PARTS: tl.constexpr = 2 if ZEROS else 1
    HALVES: tl.constexpr = KIND == 2 or KIND == 4
    codes_row = wire_ptr + n.to(tl.int64) * row_bytes
    params_row = params_ptr + n.to(tl.int64) * (row_bytes // 4) + params_at
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, cols, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + m[:, None].to(tl.int64) * cols + k[None, :], mask=m_there[:, None] & (k < cols)[None, :], other=0.0
        )
        there = n_there[:, None] & (k < cols)[None, :]
        at = k // 2 if HALVES else k
        code = tl.load(codes_row[:, None] + at[None, :], mask=there, other=0).to(tl.int32)
        if HALVES:
            code = (code >> ((k % 2) * 4)[None, :]) & 15
        if KIND == 2 and not ZEROS:
            code = code - ((code & 8) << 1)
        if KIND == 1 and not ZEROS:
            code = code - ((code & 128) << 1)
        if KIND == 3:
            bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
            number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        elif KIND == 4:
            exponent = (code >> 1) & 3
            quarters = tl.where(exponent == 0, (code & 1) * 2, (2 + (code & 1)) << exponent)
            number = tl.where((code & 8) != 0, -quarters, quarters).to(tl.float32) * 0.25
        else:
            number = code.to(tl.float32)
        params = params_row[:, None] + (k // group * PARTS)[None, :]
        if ZEROS:
            number = number - tl.load(params + 1, mask=there, other=0.0)
        number = number * tl.load(params, mask=there, other=0.0)
        acc += tl.dot(x, tl.trans(number.to(x.dtype)), input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["rows"])  # it changes from step to step
def _coded(  # type: ignore[no-untyped-def]
    x_ptr, wire_ptr, params_ptr, out_ptr, rows, outputs, cols, row_bytes, params_at, group,
    KIND: tl.constexpr, ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of BLOCK_N outputs."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = _multiply(
        x_ptr, wire_ptr, params_ptr, m, m < rows, n, n < outputs, cols, row_bytes, params_at, group,
        KIND, ZEROS, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    place = out_ptr + m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])


@triton.jit
def _coded_groups(  # type: ignore[no-untyped-def]
    x_ptr, wire_ptr, params_ptr, ends_ptr, out_ptr, experts, outputs, cols, row_bytes, params_at, group,
    KIND: tl.constexpr, ZEROS: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of one group and BLOCK_N outputs; programs are counted through the groups' tiles of rows."""
    tile, e = tl.program_id(1), tl.arange(0, EXPERTS)
    end = tl.load(ends_ptr + e, mask=e < experts, other=0).to(tl.int32)
    start = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < experts), other=0).to(tl.int32)
    tiles = tl.where(e < experts, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    expert = tl.sum(tl.where(tl.cumsum(tiles, 0) <= tile, 1, 0))
    if expert < experts:
        before = tl.sum(tl.where(e < expert, tiles, 0))
        first, last = tl.sum(tl.where(e == expert, start, 0)), tl.sum(tl.where(e == expert, end, 0))
        m = first + (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = _multiply(
            x_ptr, wire_ptr, params_ptr, m, m < last, expert.to(tl.int64) * outputs + n, n < outputs,
            cols, row_bytes, params_at, group, KIND, ZEROS, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
        place = out_ptr + m[:, None].to(tl.int64) * outputs + n[None, :]
        tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=(m < last)[:, None] & (n < outputs)[None, :])
