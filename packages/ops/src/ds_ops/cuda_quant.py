"""Chooses and launches the CUDA kernels of `native/cuda/quant.cu`: numbers to codes, and codes to numbers and their sums."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

import ds_ops._call as _call
from ds_ops.cuda_launch import divisor, launch
from ds_ops.formats import (
    FP4_E2M1,
    FP6_E2M3,
    FP6_E3M2,
    FP8_E4M3,
    FP8_E5M2,
    INT4,
    INT8,
    Draw,
    QuantSpec,
    QuantTensor,
    Rounding,
)
from ds_ops.kernel_source import CudaKernel

__all__ = ["KERNELS", "dense", "dense_kernel", "quantize", "quantize_kernel", "requantize"]

_ROWS = "Pqqqqq"
_CODE = "0qiiiifiIIq"
_DENSE = f"{_ROWS}PPqqqfiiIi{_CODE}"
_QUANTIZE = f"{_ROWS}PPqiIi{_CODE}{_ROWS}{_CODE}qf0q"
_KINDS = ("Kind::symmetric", "Kind::asymmetric", "Kind::floating")
_NAMES = ("Dtype::f32", "Dtype::bf16", "Dtype::f16")
_MOST = 1 << 31  # pieces that a 32-bit index counts
_NO_DRAW = Draw()
_ABSENT = (0,) * 6, (0,) * 9


@dataclass(frozen=True, slots=True)
class _Plan:
    """kernel: what runs. piece: elements that one index counts; blocks: of how many `pieces` of all rows."""

    kernel: CudaKernel
    piece: int
    per_block: int


def _kind(spec: QuantSpec) -> int:
    return 2 if spec.format.is_float else 0 if spec.symmetric else 1


def _word(flag: bool) -> str:
    return "true" if flag else "false"


@functools.lru_cache(maxsize=512)
def dense_kernel(spec: QuantSpec, dtype: int, alignment: int, many: bool) -> _Plan | None:
    """Choose the kernel for pieces of 8 codes (16 of 6 bits) at aligned addresses; None if groups do not hold whole pieces."""
    f, piece = spec.format, 16 if spec.format.bits == 6 else 8
    if spec.group % piece or spec.group & (spec.group - 1):
        return None
    align = 8 if f.bits == 8 and alignment >= 8 else 4
    parts = f"{f.bits}, {f.mantissa}, {f.bias}, {_word(not spec.symmetric)}, {_NAMES[dtype]}, {align}, {_word(many)}"
    kernel = CudaKernel("quant.cu", f"dense<{parts}>", "DenseCall", _DENSE, 256, 4)
    return _Plan(kernel, piece, kernel.threads * (2 if many or f.bits == 6 else 4))


@functools.lru_cache(maxsize=512)
def quantize_kernel(spec: QuantSpec, dtype: int, alignment: int) -> _Plan | None:
    """Choose the kernel whose lanes keep 16 numbers (8 of fp32) in registers; None if a group is not so many lanes' numbers."""
    f = spec.format
    count = 8 if dtype == 0 and f.bits != 6 else 16
    lanes = spec.group // count
    if spec.group % count or lanes & (lanes - 1) or not 1 <= lanes <= 128:
        return None
    # What is done once a group takes as long as a dozen elements, so a lane has more than one piece of it; codes of few floats have most.
    wanted = 4 if f.is_float and f.bits < 8 else 2
    held = max(lanes // 32, min(wanted, lanes))
    team = lanes // held
    size = count * f.bits // 8
    align = next(a for a in (16, 8, 4) if size % a == 0 and alignment % a == 0) if f.bits != 6 else 4
    draws = spec.rounding is Rounding.STOCHASTIC
    form = f"{f.bits}, {f.mantissa}, {f.bias}, {f.max_code}, {_word(not spec.symmetric)}, {_word(draws)}"
    instance = f"quantize<{form}, {_NAMES[dtype]}, {team}, {held}, {align}>"
    kernel = CudaKernel("quant.cu", instance, "QuantizeCall", _QUANTIZE, 256, 4 if held < 4 else 2)
    return _Plan(kernel, spec.group, kernel.threads // team * (2 if held == 1 else 1))


def _any(name: str, *kinds: int) -> CudaKernel:
    call, layout = ("DenseCall", _DENSE) if name == "any_dense" else ("QuantizeCall", _QUANTIZE)
    return CudaKernel("quant.cu", f"{name}<{', '.join(_KINDS[k] for k in kinds)}>", call, layout)


def _alignment(*numbers: int) -> int:
    """Return the largest power of two up to 16 that divides all addresses and strides."""
    together = 16
    for n in numbers:
        together |= n
    return together & -together


def _rows(q: QuantTensor) -> tuple[int, ...]:
    return _call.address(q.wire), q.rows, q.cols, q.layout.params_at, q.layout.row_bytes, q.spec.group


def _code(spec: QuantSpec, draw: Draw = _NO_DRAW) -> tuple[float, ...]:
    f = spec.format
    draws = spec.rounding is Rounding.STOCHASTIC
    return f.bits, f.mantissa, f.bias, f.max_code, f.maximum, int(draws), *draw.keys, draw.offset


def dense(q: QuantTensor, rows: Tensor | None, sources: int, factor: float, out: Tensor) -> None:
    """Write factor * the sum over `sources` of dequantized rows to `out` [n, cols], valid on the current stream.

    rows: int64, which rows of one source; None: the first n. A row that does not exist is NaN.
    """
    dtype, count = _call.DTYPES[out.dtype], out.shape[0]
    target = _call.address(out)
    plan = None
    if target % 16 == 0 and _alignment(_call.address(q.wire), q.layout.row_bytes) >= 4:
        plan = dense_kernel(
            q.spec, dtype, _alignment(_call.address(q.wire), q.layout.row_bytes), sources > 1 or factor != 1.0
        )
    if plan is None or q.cols % plan.piece or count * q.cols // plan.piece >= _MOST:
        plan = _Plan(_any("any_dense", _kind(q.spec)), 4, 4 * 256)
    per_row = -(-q.cols // plan.piece)
    pieces = count * per_row
    launch(
        plan.kernel,
        out.device,
        -(-pieces // plan.per_block),
        *_rows(q),
        0 if rows is None else _call.address(rows),
        target,
        count,
        sources,
        pieces,
        factor,
        dtype,
        q.spec.group.bit_length() - 1,
        *divisor(max(min(per_row, _MOST), 1)),
        *_code(q.spec),
    )


def quantize(q: QuantTensor, x: Tensor, order: Tensor | None, draw: Draw) -> None:
    """Fill the wire of `q` from x [rows, cols]; input row r goes to row order[r] (None: r). Valid on the current stream."""
    dtype, source, wire = _call.DTYPES[x.dtype], _call.address(x), _call.address(q.wire)
    layout = q.layout
    lane = 8 if dtype == 0 and q.spec.format.bits != 6 else 16
    plan = None
    padded = layout.params_at * 8 != q.cols * q.spec.format.bits
    if source % 16 == 0 and q.cols % lane == 0 and not padded and max(q.rows * layout.groups, q.cols) < _MOST:
        plan = quantize_kernel(q.spec, dtype, _alignment(wire, layout.row_bytes))
    if plan is None:
        plan = _Plan(_any("any_quantize", _kind(q.spec)), q.spec.group, 256 // 32)
    _launch_quantize(plan, q, draw, (source, order, dtype), (*_ABSENT[0], *_ABSENT[1], 0, 1.0))


def requantize(q: QuantTensor, sources: int, factor: float, out: QuantTensor, draw: Draw) -> None:
    """Fill the wire of `out` with the quantized sum over `sources` of the rows of `q`, valid on the current stream."""
    plan = _Plan(_any("requantize", _kind(out.spec), _kind(q.spec)), out.spec.group, 256 // 32)
    _launch_quantize(plan, out, draw, (0, None, 0), (*_rows(q), *_code(q.spec), sources, factor))


def _launch_quantize(
    plan: _Plan, q: QuantTensor, draw: Draw, source: tuple[int, Tensor | None, int], summed: tuple[float, ...]
) -> None:
    x, order, dtype = source
    groups = q.rows * q.layout.groups
    launch(
        plan.kernel,
        q.wire.device,
        -(-groups // plan.per_block),
        *_rows(q),
        0 if order is None else _call.address(order),
        x,
        groups,
        dtype,
        *divisor(max(min(q.layout.groups, _MOST), 1)),
        *_code(q.spec, draw),
        *summed,
    )


def _table() -> tuple[CudaKernel, ...]:
    """List what is worth making ahead of time: every format with groups of 128 and 256 of bf16 and fp32, and the general kernels."""
    formats = (INT8, INT4, FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, FP4_E2M1)
    specs = [QuantSpec(f, group) for f in formats for group in (128, 256)]
    specs += [QuantSpec(f, group, symmetric=False) for f in (INT8, INT4) for group in (128, 256)]
    plans = [dense_kernel(s, d, 16, many) for s in specs for d in (0, 1) for many in (False, True)]
    plans += [quantize_kernel(s, d, 16) for s in specs for d in (0, 1)]
    kinds = range(3)
    general = [_any(name, k) for name in ("any_dense", "any_quantize") for k in kinds]
    general += [_any("requantize", k, other) for k in kinds for other in kinds]
    return tuple(dict.fromkeys([p.kernel for p in plans if p is not None] + general))


KERNELS = _table()
