"""Rows picked by number: copied, or summed with weights. What `moe_routing` and expert parallelism move. None of it has a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_ops.registry import Op, choose, cpu_backend, reference_backend, register
from ds_ops.threads import kernel_threads

__all__ = ["gather_rows", "gather_sum", "row_products", "weighed"]

_MOVED = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def gather_rows(x: Tensor, index: Tensor, *, per: int = 1) -> Tensor:
    """Gather rows: out[i] = x[index[i] // per].

    Args:
        x: [N, n] of any dtype. index: int64 [R], each in 0..N * per - 1, on the same device.
    Returns: [R, n].

    Raises:
        KernelError: "kernel-argument" for other shapes and dtypes, and on the CPU for a row that does not exist.
    Cost: one read and one write of the selected rows. Source: Gale et al. 2022.
    """
    if x.dim() != 2 or index.dim() != 1 or index.dtype is not torch.int64 or index.device != x.device or per < 1:
        raise _call.refuse(
            f"x: expected [rows, n]; found {_call.describe(x)}. index: int64 [R] beside it; found {_call.describe(index)}. per: {per}."
        )
    out: Tensor = choose(_GATHER, x.device.type, x.dtype).backend.run(x, index, per)
    return out


def gather_sum(rows: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute out[t] = the sum over c of weights[t, c] * rows[index[t, c]].

    The sum is in at least fp32, rounded to rows' dtype.

    Args:
        rows: floats [N, n]. index: int64 [T, k], each in 0..N - 1. weights: floats [T, k]; None: ones. All on one
        device.
    Returns: [T, n].

    Raises:
        KernelError: "kernel-argument" for other shapes and dtypes, and on the CPU for a row that does not exist.
    Cost: on the CPU one read of each selected row and one write of the sums; elsewhere one read and write of
    each choice's rows, with temporaries of [T, n].
    Source: the combine of Gale et al. 2022.
    """
    fits = weights is None or (weights.shape == index.shape and weights.device == rows.device)
    if rows.dim() != 2 or index.dim() != 2 or index.dtype is not torch.int64 or index.device != rows.device or not fits:
        raise _call.refuse(
            f"rows: expected floats [N, n]; found {_call.describe(rows)}. index: int64 [T, k] beside it; found {_call.describe(index)}."
            f" weights: as index; found {None if weights is None else _call.describe(weights)}."
        )
    each = None if weights is None else weights.detach()
    out: Tensor = choose(_SUM, rows.device.type, rows.dtype).backend.run(rows.detach(), index, each)
    return out


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """Compute the scalar product [r] of each row of a and b [r, n], in at least fp32."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.bmm(a.to(wide)[:, None], b.to(wide)[..., None]).view(-1)


def weighed(rows: Tensor, weights: Tensor) -> Tensor:
    """Multiply rows [r, n] by weights [r], in at least fp32, in rows' dtype; in place where rows are as wide."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    factors = weights.to(wide)[:, None]
    return rows.mul_(factors) if rows.dtype is wide else (rows.to(wide) * factors).to(rows.dtype)


def _native_gather(x: Tensor, index: Tensor, per: int) -> Tensor:
    x, index = (
        _call.require("x", x.contiguous(), dtypes=_MOVED),
        _call.require("index", index.contiguous(), dtypes=(torch.int64,)),
    )
    out = x.new_empty(index.shape[0], x.shape[1])
    status = _call.native().gather_rows(
        _call.address(out), _call.address(x), x.shape[0], x.shape[1] * x.element_size(), _call.address(index), index.shape[0], per,
        kernel_threads(),
    )  # fmt: skip
    _finish("gather_rows", status, x, per)
    return out


def _native_sum(rows: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    rows, index = (
        _call.require("rows", rows.contiguous()),
        _call.require("index", index.contiguous(), dtypes=(torch.int64,)),
    )
    each = None if weights is None else weights.float().contiguous()
    out = rows.new_empty(index.shape[0], rows.shape[1])
    status = _call.native().sum_rows(
        _call.address(out), _call.address(rows), _call.DTYPES[rows.dtype], *rows.shape, _call.address(index),
        0 if each is None else _call.address(each), *index.shape, kernel_threads(),
    )  # fmt: skip
    _finish("gather_sum", status, rows, 1)
    return out


def _finish(op: str, status: int, x: Tensor, per: int) -> None:
    if status == 1:  # everything else was looked at
        raise _call.refuse(f"{op}: a number leads outside of the {x.shape[0]} rows (of {per} numbers each).")
    _call.finish(op, status)


def _reference_gather(x: Tensor, index: Tensor, per: int) -> Tensor:
    return x.index_select(0, index if per == 1 else torch.div(index, per, rounding_mode="floor"))


def _reference_sum(rows: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    # Choice by choice: all at once would be [T, k, n] in fp32, four times what goes in and out.
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = rows.new_zeros(index.shape[0], rows.shape[1], dtype=wide)
    factors = None if weights is None else weights.to(wide)
    for choice in range(index.shape[1]):
        picked = rows.index_select(0, index[:, choice])
        if factors is None:
            total.add_(picked)
        else:
            total.addcmul_(picked.to(wide), factors[:, choice, None])
    return total.to(rows.dtype)


_GATHER = register(
    Op(
        "gather_rows",
        "rows by number",
        (cpu_backend(_native_gather, _MOVED), reference_backend(_reference_gather, moves=True)),
    )
)
_SUM = register(
    Op("gather_sum", "weighted sums of rows by number", (cpu_backend(_native_sum), reference_backend(_reference_sum)))
)
