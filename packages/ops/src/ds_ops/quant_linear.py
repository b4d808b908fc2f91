"""Products with quantized weights, for inference: codes are read once, and become numbers in registers or in the cache.

Words: a weight [N, K], or [E, N, K] of E experts, is a `QuantTensor` whose wire has one row an output, in groups along K.
Any format of `formats` will do; int8 and int4 are the usual ones. For few tokens the native kernel multiplies codes as it
reads them (a step of decoding reads bits / 8 bytes a weight); for many, a panel of weights at a time is made numbers in the
dtype of x, and BLAS multiplies. Only x has a gradient: a base of quantized weights below adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_ops.formats import FP4_E2M1, FP6_E2M3, FP6_E3M2, FP8_E4M3, FP8_E5M2, INT4, INT8, Format, QuantSpec, QuantTensor
from ds_ops.grouped import group_bounds
from ds_ops.quant import dequantize, native_rows, native_spec, quantize
from ds_ops.registry import Op, choose, cpu_backend, reference_backend, register
from ds_ops.threads import kernel_threads

__all__ = ["quantize_weight", "quantized_grouped_matmul", "quantized_linear"]

FEW_TOKENS = 16
"""Up to here the native kernel is faster than to make numbers of codes for BLAS (docs/benchmarks/ops.md)."""
_PANEL = 1 << 20  # numbers of a panel: 4 MiB of fp32, so that its product is no small one, and its memory is used again


def quantize_weight(weight: Tensor, kind: Format = INT8, *, group: int = 128, symmetric: bool = True) -> QuantTensor:
    """`quantize` of a weight [N, K] or [E, N, K], fp32, bf16 or fp16, one row an output, nearest rounding.

    Raises:
        KernelError: "quant-spec" for a group that is not whole bytes; "kernel-argument" for other shapes.
    """
    if weight.dim() not in (2, 3):
        raise _call.refuse(f"weight: expected [N, K] or [E, N, K]; found {_call.describe(weight)}.")
    rows = weight.shape[:-1].numel()
    if not rows:
        return QuantTensor.empty(
            QuantSpec(kind, group, symmetric), 0, weight.shape[-1], like=weight, shape=weight.shape
        )
    return quantize(weight.detach().contiguous(), QuantSpec(kind, group, symmetric), rows=rows)


def quantized_linear(x: Tensor, weight: QuantTensor, bias: Tensor | None = None) -> Tensor:
    """Compute y = x @ dequantize(weight)^T + bias, sums in fp32, rounded once to the dtype of x.

    Args:
        x: [..., K], fp32, bf16 or fp16. weight: of `quantize_weight`, [N, K]. bias: [N] floats.
    Returns: [..., N]. The gradient reaches x and bias.

    Raises:
        KernelError: "kernel-argument" if shapes or devices do not fit.
    Cost: up to 16 tokens bits/8 + 4/group bytes a weight, for each 8 of them; beyond, that and one product. Source: the
        formats' (OCP 2023); the order of work is that of any matrix-vector product.
    """
    if len(weight.shape) != 2:
        raise _call.refuse(f"weight: expected [N, K]; found {list(weight.shape)}.")
    _require(x, weight)
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y = _multiplied(flat, weight, None).view(*x.shape[:-1], weight.shape[0])
    if bias is None:
        return y
    if bias.shape != y.shape[-1:] or bias.device != x.device or not bias.is_floating_point():
        raise _call.refuse(f"bias: expected floats [{y.shape[-1]}]; found {_call.describe(bias)}.")
    return y + bias.to(y.dtype)


def quantized_grouped_matmul(x: Tensor, weights: QuantTensor, ends: Tensor) -> Tensor:
    """Compute y[rows of g] = x[rows of g] @ dequantize(weights)[g]^T for every group g.

    This is `grouped_matmul` with transpose.

    Args:
        x: [T, K], rows sorted by group, fp32, bf16 or fp16. weights: of `quantize_weight`, [E, N, K].
        ends: int32 or int64 [E], as in `grouped_matmul`.
    Returns: [T, N]; zeros past the last end. The gradient reaches x.

    Raises:
        KernelError: "kernel-argument" as `grouped_matmul`.
    Cost: that of `quantized_linear` for each group that has rows, into one result; weights of the others are not read.
        `ends` is read on the host, on a device too.
    """
    if len(weights.shape) != 3 or x.dim() != 2 or ends.shape != weights.shape[:1]:
        raise _call.refuse(
            f"x {_call.describe(x)}, weights {list(weights.shape)}, ends {_call.describe(ends)} do not fit."
        )
    _require(x, weights)
    if ends.dtype not in (torch.int32, torch.int64) or ends.device != x.device:
        raise _call.refuse(f"ends: expected int32 or int64 on {x.device}; found {_call.describe(ends)}.")
    return _multiplied(x, weights, ends)


def _require(x: Tensor, weight: QuantTensor) -> None:
    if x.dim() < 1 or x.shape[-1] != weight.cols or x.dtype not in _call.DTYPES or x.device != weight.wire.device:
        raise _call.refuse(
            f"x: expected fp32, bf16 or fp16 [..., {weight.cols}] on {weight.wire.device}; found {_call.describe(x)}."
        )


def _part(weight: QuantTensor, first: int, rows: int) -> QuantTensor:
    """Return rows [first, first + rows) of the wire as a separate weight. Copies nothing."""
    return QuantTensor(weight.wire[first : first + rows], weight.spec, weight.cols, (rows, weight.cols), weight.dtype)


def _multiplied(x: Tensor, weight: QuantTensor, ends: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling():
        spec = weight.spec
        args = (weight.wire, ends, weight.cols, spec.format.name, spec.group, spec.symmetric)
        y: Tensor = torch.ops.ds_ops.quantized_matmul(x, *args)
    elif torch.is_grad_enabled() and x.requires_grad:
        y = _QuantizedMatmul.apply(x, weight, ends)
    else:
        y = _forward(x, weight, ends)
    return y


def _groups(rows: int, weight: QuantTensor, ends: Tensor | None) -> Iterator[tuple[slice, QuantTensor]]:
    """Yield the rows of each non-empty group, and its weight [N, K]."""
    if ends is None:
        yield slice(0, rows), weight
        return
    outputs, start = weight.rows // len(ends), 0
    for expert, end in enumerate(group_bounds(ends, rows)):
        if end > start:
            yield slice(start, end), _part(weight, expert * outputs, outputs)
        start = end


def _forward(x: Tensor, weight: QuantTensor, ends: Tensor | None) -> Tensor:
    if ends is None:
        return _product(x, weight)
    out = x.new_zeros(x.shape[0], weight.rows // len(ends))
    for rows, part in _groups(x.shape[0], weight, ends):
        out[rows] = _product(x[rows], part)
    return out


def _gradient(dy: Tensor, weight: QuantTensor, ends: Tensor | None) -> Tensor:
    """Compute dx = dy @ dequantize(weight), a panel of weights at a time."""
    dx = dy.new_zeros(dy.shape[0], weight.cols)
    for rows, part in _groups(dy.shape[0], weight, ends):
        for panel in _panels(part):
            dx[rows].addmm_(
                dy[rows, panel], dequantize(_part(part, panel.start, panel.stop - panel.start), dtype=dy.dtype)
            )
    return dx


def _panels(weight: QuantTensor) -> Iterator[slice]:
    """Yield the ranges of outputs that are dequantized at once.

    Dequantizing all outputs would take as much memory as quantizing saved.
    """
    step = max(64, _PANEL // max(weight.cols, 1))
    for first in range(0, weight.rows, step):
        yield slice(first, min(first + step, weight.rows))


def _product(x: Tensor, weight: QuantTensor) -> Tensor:
    y: Tensor = choose(_LINEAR, x.device.type, x.dtype).backend.run(x, weight)
    return y


def _reference_linear(x: Tensor, weight: QuantTensor) -> Tensor:
    return x @ dequantize(weight, dtype=x.dtype).t()


def _cpu_linear(x: Tensor, weight: QuantTensor) -> Tensor:
    tokens, outputs = x.shape[0], weight.rows
    if tokens > FEW_TOKENS:
        return _by_panels(x, weight)
    wide = x.detach().float().contiguous()
    y = torch.empty(tokens, outputs, device="cpu")
    status = _call.native().quant_linear(
        native_spec(weight.spec),
        native_rows(weight),
        0,
        outputs,
        _call.address(wide),
        tokens,
        _call.address(y),
        outputs,
        kernel_threads(),
    )
    _call.finish("quantized_linear", status)
    return y.to(x.dtype)


def _by_panels(x: Tensor, weight: QuantTensor) -> Tensor:
    # Outputs are rows of the product: a panel's rows lie together, and BLAS writes them in place.
    inputs, y = x.detach().t().contiguous(), x.new_empty(weight.rows, x.shape[0])
    for panel in _panels(weight):
        numbers = dequantize(_part(weight, panel.start, panel.stop - panel.start), dtype=x.dtype)
        torch.mm(numbers, inputs, out=y[panel])
    return y.t().contiguous()


class _QuantizedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantTensor, ends: Tensor | None) -> Tensor:
        ctx.weight, ctx.ends = weight, ends
        return _forward(x, weight, ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _gradient(grads[0], ctx.weight, ctx.ends), None, None


# ---- for a compiler ------------------------------------------------------------------------------------------------------

_FORMATS = {f.name: f for f in (INT8, INT4, FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, FP4_E2M1)}


def _weight(wire: Tensor, cols: int, kind: str, group: int, symmetric: bool) -> QuantTensor:
    return QuantTensor(wire, QuantSpec(_FORMATS[kind], group, symmetric), cols, (wire.shape[0], cols), torch.float32)


@torch.library.custom_op("ds_ops::quantized_matmul", mutates_args=())
def _node(x: Tensor, wire: Tensor, ends: Tensor | None, cols: int, kind: str, group: int, symmetric: bool) -> Tensor:
    return _forward(x, _weight(wire, cols, kind, group, symmetric), ends).contiguous()


@torch.library.custom_op("ds_ops::quantized_matmul_grad", mutates_args=())
def _grad_node(
    dy: Tensor, wire: Tensor, ends: Tensor | None, cols: int, kind: str, group: int, symmetric: bool
) -> Tensor:
    return _gradient(dy, _weight(wire, cols, kind, group, symmetric), ends)


@_node.register_fake
def _(x: Tensor, wire: Tensor, ends: Tensor | None, cols: int, kind: str, group: int, symmetric: bool) -> Tensor:
    return x.new_empty(x.shape[0], wire.shape[0] // (1 if ends is None else ends.shape[0]))


@_grad_node.register_fake
def _(dy: Tensor, wire: Tensor, ends: Tensor | None, cols: int, kind: str, group: int, symmetric: bool) -> Tensor:
    return dy.new_empty(dy.shape[0], cols)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, wire, ends, *ctx.rest = inputs
    ctx.save_for_backward(wire, ends)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    wire, ends = ctx.saved_tensors
    return (_grad_node(dy, wire, ends, *ctx.rest), *(None,) * 6)


_node.register_autograd(_backward, setup_context=_setup)

_LINEAR = register(
    Op(
        "quantized_linear",
        "products with quantized weights",
        (cpu_backend(_cpu_linear), reference_backend(_reference_linear)),
    )
)
