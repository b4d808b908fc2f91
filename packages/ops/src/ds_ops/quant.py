"""Quantize, dequantize and reduce rows of numbers. Formats, groups and the wire: `ds_ops.formats`.

Compressed collectives are made of these: quantize with a row per destination, send the wire, reduce the rows received.
Tensors stay where they are; nothing here communicates.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import ds_ops._call as _call
import ds_ops.cuda_quant as cuda_quant
from ds_config.errors import KernelError
from ds_ops.formats import (
    FP4_E2M1,
    FP6_E2M3,
    FP6_E3M2,
    FP8_E4M3,
    FP8_E5M2,
    INT4,
    INT8,
    Draw,
    Format,
    QuantSpec,
    QuantTensor,
    Rounding,
    Swizzle,
)
from ds_ops.reference import quant as reference
from ds_ops.registry import Op, choose, cpu_backend, cuda_backend, reference_backend, register
from ds_ops.threads import kernel_threads

__all__ = [
    "FP4_E2M1",
    "FP6_E2M3",
    "FP6_E3M2",
    "FP8_E4M3",
    "FP8_E5M2",
    "INT4",
    "INT8",
    "Draw",
    "Format",
    "QuantSpec",
    "QuantTensor",
    "Rounding",
    "Swizzle",
    "dequantize",
    "native_rows",
    "native_spec",
    "quantize",
    "quantize_with_feedback",
    "reduce",
    "reduce_quantized",
]

_INT8_SPEC = QuantSpec()
_NO_DRAW = Draw()


def quantize(
    x: Tensor,
    spec: QuantSpec = _INT8_SPEC,
    *,
    rows: int | Swizzle = 1,
    draw: Draw = _NO_DRAW,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """Quantize to codes c = round(x / scale) of every group, by the formulas and sources of `ds_ops.formats`.

    See ZeRO++, Wang et al. 2023. No gradient flows through it (`ds_ops.fake_quant` has one).

    Args:
        x: contiguous fp32, bf16 or fp16 of any shape, viewed as [rows, numel / rows]. Groups do not cross rows.
        rows: how many, or a `Swizzle`, which also says which wire row each one becomes.
        draw: used with stochastic rounding only.
        out: reuse this; must be of the same spec and size.

    Raises:
        KernelError: "kernel-argument" for another dtype or layout, or if `rows` does not divide the elements.
    Cost: one read of x (each group is read again from the cache), bits/8 + 4/group bytes written an element.
    """
    _call.require("x", x)
    count = rows.rows if isinstance(rows, Swizzle) else rows
    if count < 1 or x.numel() % count:
        raise _call.refuse(
            f"{_call.describe(x)} is not {count} equal rows.", "Pad it, or choose rows that divide its elements."
        )
    cols = x.numel() // count
    if out is None:
        shape = (count, cols) if isinstance(rows, Swizzle) else tuple(x.shape)
        out = QuantTensor.empty(spec, count, cols, like=x, shape=shape)
    _require_rows("out", out, spec, count, cols)
    order = rows.order() if isinstance(rows, Swizzle) else None
    choose(_QUANTIZE, x.device.type, x.dtype).backend.run(out, x.detach().view(count, cols), order, draw)
    return out


def dequantize(
    q: QuantTensor, *, rows: Tensor | None = None, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute x' = (c - zero) * scale in the shape of `q`; with `rows` (int64 [k]) only these rows, [k, cols].

    Formulas and sources: `ds_ops.formats` (OCP 2023, Wang et al. 2023). Products are fp32, rounded once to dtype
    (default: that of
    the quantized tensor).

    Raises:
        KernelError: "kernel-argument" for a bad dtype, `out`, or (on the CPU; a device gives NaN) a row that does not
        exist.
    Cost: bits/8 + 4/group bytes read, one write an element.
    """
    count = q.rows if rows is None else rows.numel()
    if out is None:
        shape = q.shape if rows is None else (count, q.cols)
        out = torch.empty(shape, dtype=dtype or q.dtype, device=q.wire.device)
    _call.require("out", out, numel=count * q.cols, device=q.wire.device)
    if rows is not None:
        _require_index(rows, q)
    choose(_DEQUANTIZE, q.wire.device.type, out.dtype).backend.run(q, rows, out.view(count, q.cols))
    return out


def reduce(
    q: QuantTensor,
    sources: int,
    *,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Sum over sources: out[r] = factor * sum over k of row k * (rows / sources) + r, [rows / sources, cols].

    Added in fp32 in the order of the sources (qgZ: Wang et al. 2023). The mean over ranks is factor = 1 / ranks.

    Raises:
        KernelError: "kernel-argument" if `sources` does not divide the rows, or for a bad `out`.
    Cost: sources * (bits/8 + 4/group) bytes read, one write an element.
    """
    count = _rows_after(q, sources)
    if out is None:
        out = torch.empty(count, q.cols, dtype=dtype, device=q.wire.device)
    _call.require("out", out, numel=count * q.cols, device=q.wire.device)
    backend = choose(_REDUCE, q.wire.device.type, out.dtype).backend
    backend.run(q, sources, factor, out.view(count, q.cols))
    return out


def reduce_quantized(
    q: QuantTensor,
    sources: int,
    *,
    factor: float = 1.0,
    spec: QuantSpec | None = None,
    draw: Draw = _NO_DRAW,
) -> QuantTensor:
    """quantize(reduce(q, sources, factor=factor)), in one pass (qgZ: Wang et al. 2023).

    Args:
        q: codes of [rows, cols]. spec: how the sum is quantized; default: as before. draw: as in `quantize`.
    Returns: codes of [rows / sources, cols], of the dtype of q.

    Raises:
        KernelError: "kernel-argument" if `sources` does not divide the rows; "quant-spec" if the new group is no multiple
            of the old one.
    Cost: (sources + 1) * (bits/8 + 4/group) bytes an element of the sum; the sum itself stays in the cache.
    """
    count, spec = _rows_after(q, sources), spec or q.spec
    if spec.group % q.spec.group:
        raise KernelError(
            f"a sum in groups of {spec.group} of rows in groups of {q.spec.group}: each new group must be whole old ones.",
            code="quant-spec",
            fix=f"Use a multiple of {q.spec.group}.",
        )
    out = QuantTensor.empty(spec, count, q.cols, like=q.wire)
    out = replace(out, dtype=q.dtype)
    choose(_REDUCE_QUANTIZED, q.wire.device.type, q.dtype).backend.run(q, sources, factor, out, draw)
    return out


def quantize_with_feedback(
    x: Tensor, error: Tensor, spec: QuantSpec, *, decay: float = 0.0, rows: int = 1
) -> QuantTensor:
    """Quantize x + error, and leave in `error` what was lost, to be added the next time (LoCo, Xie et al. 2024).

    error: like x, starts as zeros, changed in place: error = decay * error + (1 - decay) * (x + error - its quantized value).
    """
    _call.require("error", error, dtypes=(x.dtype,), numel=x.numel(), device=x.device)
    wanted = x.detach() + error.view_as(x)
    q = quantize(wanted, spec, rows=rows)
    error.mul_(decay).add_((wanted - dequantize(q)).view_as(error), alpha=1 - decay)
    return q


def _require_rows(name: str, q: QuantTensor, spec: QuantSpec, rows: int, cols: int) -> None:
    if (q.spec, q.rows, q.cols) != (spec, rows, cols):
        raise _call.refuse(
            f"{name}: expected {rows} rows of {cols} as {spec}; found {q.rows} rows of {q.cols} as {q.spec}.",
            "Allocate it with QuantTensor.empty(...).",
        )


def _require_index(rows: Tensor, q: QuantTensor) -> None:
    _call.require("rows", rows, dtypes=(torch.int64,), device=q.wire.device)
    if rows.device.type != "cpu" or not rows.numel():  # asking a device would wait for it
        return
    least, most = int(rows.numpy().min()), int(rows.numpy().max())
    if least < 0 or most >= q.rows:
        raise _call.refuse(f"rows: {least}..{most} is outside 0..{q.rows - 1}.", "Pass rows that exist.")


def _rows_after(q: QuantTensor, sources: int) -> int:
    if sources < 1 or q.rows % sources:
        raise _call.refuse(
            f"{q.rows} rows are not from {sources} sources.", "Pass a number of sources that divides the rows."
        )
    return q.rows // sources


# ---- native ----------------------------------------------------------------------------------------------------------


def native_spec(spec: QuantSpec, draw: Draw = _NO_DRAW) -> tuple[float, ...]:
    """Return the kernel arguments that describe a format, in the order of native/include/ds/quant_arguments.h."""
    f = spec.format
    stochastic = spec.rounding is Rounding.STOCHASTIC
    format_part = (f.bits, f.mantissa, f.bias, f.max_code, f.maximum)
    return (*format_part, spec.symmetric, stochastic, *draw.keys, draw.offset, spec.group)


def native_rows(q: QuantTensor) -> tuple[int, ...]:
    """Return the kernel arguments that locate the rows of a wire."""
    return (_call.address(q.wire), q.rows, q.cols, q.layout.params_at, q.layout.row_bytes)


def _cpu_quantize(q: QuantTensor, x: Tensor, order: list[int] | None, draw: Draw) -> None:
    places = reference.places(tuple(order or ()), x.device)
    status = _call.native().quantize(
        native_spec(q.spec, draw),
        native_rows(q),
        _call.address(places) if order else 0,
        _call.address(x),
        _call.DTYPES[x.dtype],
        kernel_threads(),
    )
    _call.finish("quantize", status)


def _cpu_dequantize(q: QuantTensor, rows: Tensor | None, out: Tensor) -> None:
    status = _call.native().dequantize(
        native_spec(q.spec),
        native_rows(q),
        _call.address(rows) if rows is not None else 0,
        out.shape[0],
        _call.address(out),
        _call.DTYPES[out.dtype],
        kernel_threads(),
    )
    _call.finish("dequantize", status)
    _call.mark_written([out])


def _cpu_reduce(q: QuantTensor, sources: int, factor: float, out: Tensor) -> None:
    status = _call.native().reduce(
        native_spec(q.spec),
        native_rows(q),
        sources,
        factor,
        _call.address(out),
        _call.DTYPES[out.dtype],
        kernel_threads(),
    )
    _call.finish("reduce", status)
    _call.mark_written([out])


def _cpu_reduce_quantized(q: QuantTensor, sources: int, factor: float, out: QuantTensor, draw: Draw) -> None:
    threads = kernel_threads()
    scratch = torch.empty(threads, out.spec.group, device="cpu")
    status = _call.native().reduce_quantized(
        native_spec(q.spec),
        native_rows(q),
        sources,
        factor,
        native_spec(out.spec, draw),
        native_rows(out),
        _call.address(scratch),
        threads,
    )
    _call.finish("reduce_quantized", status)


# ---- CUDA: on the current stream ---------------------------------------------------------------------------------------


def _cuda_quantize(q: QuantTensor, x: Tensor, order: list[int] | None, draw: Draw) -> None:
    cuda_quant.quantize(q, x, reference.places(tuple(order), x.device) if order else None, draw)


def _cuda_dequantize(q: QuantTensor, rows: Tensor | None, out: Tensor) -> None:
    cuda_quant.dense(q, rows, 1, 1.0, out)
    _call.mark_written([out])


def _cuda_reduce(q: QuantTensor, sources: int, factor: float, out: Tensor) -> None:
    cuda_quant.dense(q, None, sources, factor, out)
    _call.mark_written([out])


_QUANTIZE = register(
    Op(
        "quantize",
        "groups to codes",
        (cuda_backend(_cuda_quantize), cpu_backend(_cpu_quantize), reference_backend(reference.quantize)),
    )
)
_DEQUANTIZE = register(
    Op(
        "dequantize",
        "codes to numbers",
        (cuda_backend(_cuda_dequantize), cpu_backend(_cpu_dequantize), reference_backend(reference.dequantize)),
    )
)
_REDUCE = register(
    Op(
        "reduce",
        "sum of quantized sources",
        (cuda_backend(_cuda_reduce), cpu_backend(_cpu_reduce), reference_backend(reference.reduce)),
    )
)
_REDUCE_QUANTIZED = register(
    Op(
        "reduce_quantized",
        "sum of quantized sources, quantized again",
        (
            cuda_backend(cuda_quant.requantize),
            cpu_backend(_cpu_reduce_quantized),
            reference_backend(reference.reduce_quantized),
        ),
    )
)
