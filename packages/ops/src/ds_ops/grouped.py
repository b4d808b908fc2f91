"""Products of groups of rows, each with its own matrix: what experts compute. With gradients of any order.

Words: rows are sorted by group; `ends[g]` is where the rows of group g end, so that group g is rows ends[g-1]..ends[g]-1.
`ends` stays on the device of the rows, and there nothing reads it on the host. Rows past the last end belong to no group:
their products are zeros and they add to no gradient, so a buffer may be larger than what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ds_ops._call as _call
import ds_ops._torch as _torch
from ds_ops.product_choice import GROUPED_MM_MAJORS
from ds_ops.registry import Backend, Op, Unavailable, absent_backend, choose, reference_backend, register

__all__ = ["group_bounds", "grouped_matmul", "grouped_outer", "why_host_is_told"]


def grouped_matmul(
    x: Tensor,
    weights: Tensor,
    ends: Tensor,
    *,
    transpose: bool = False,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Compute y[rows of g] = x[rows of g] @ weights[g] (+ bias[g]) for every group g (Gale et al. 2022).

    Args:
        x: floats [T, K], rows sorted by group.
        weights: [E, K, N], or [E, N, K] with transpose (as in torch.nn.Linear); dtype of x, any strides.
        ends: int32 or int64 [E], ascending, the last one at most T; same device.
        bias: [E, N], dtype of x.
        out: [T, N], dtype of x: written instead of a new tensor. Without autograd only.
        accumulate: add to `out` (rows past the last end are unchanged).
    Returns: [T, N]; zeros past the last end.

    Raises:
        KernelError: "kernel-argument" if shapes, dtypes or devices do not fit, if `ends` on the CPU does not split x,
        or if
            `out` is given where a gradient is needed.
    Cost: one product per group that has rows, each written into its part of one result; a group without rows costs
        nothing. The gradient of x is another such product, that of weights one `grouped_outer`; the second use of a
        transposed weight moves no memory. On CUDA one launch where torch has it (bf16, compute capability 9 and 10);
        else `ends` is read on the host (`why_host_is_told`).
    """
    job = _GroupedProduct(transpose, accumulate)
    _require(x, weights, ends, bias, job)
    if out is not None:
        _require_out(out, [x.shape[0], weights.shape[1 if transpose else 2]], x, (x, weights, bias), "x's dtype")
    elif accumulate:
        raise _call.refuse("accumulate=True without a tensor to add to.", "Pass out=.")
    if out is not None:
        y: Tensor = choose(_MATMUL, x.device.type, x.dtype).backend.run(x, weights, ends, bias, out, job)
    elif torch.compiler.is_compiling():
        y = torch.ops.ds_ops.grouped_matmul(x, weights, ends, bias, transpose)
    elif torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weights, bias)):
        y = _GroupedMatmul.apply(x, weights, ends, bias, transpose)
    else:
        y = _product(x, weights, ends, bias, transpose)
    return y


def grouped_outer(x: Tensor, y: Tensor, ends: Tensor, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
    """Compute out[g] = x[rows of g]^T @ y[rows of g] for every group g: the gradient of weights (Gale et al. 2022).

    Args:
        x: floats [T, K]; y: [T, N], same dtype and device. ends: as in `grouped_matmul`.
        out: [E, K, N], dtype of x or fp32: written instead of a new tensor; e.g. an fp32 gradient. Without autograd.
        accumulate: add to `out`.
    Returns: [E, K, N]; zeros for a group without rows.

    Raises:
        KernelError: "kernel-argument" as `grouped_matmul`.
    Cost: one product per group that has rows, into one tensor; fp32 `out` of 16-bit rows converts both once.
    """
    if x.dim() != 2 or y.dim() != 2 or x.shape[0] != y.shape[0] or not _alike(x, y) or not x.is_floating_point():
        raise _call.refuse(f"x [T, K] {_call.describe(x)} and y [T, N] {_call.describe(y)} do not fit.")
    _require_ends(ends, x)
    if out is not None:
        _require_out(out, [ends.shape[0], x.shape[1], y.shape[1]], x, (x, y), "x's dtype or fp32")
        result: Tensor = choose(_OUTER, x.device.type, x.dtype).backend.run(x, y, ends, out, accumulate)
    elif accumulate:
        raise _call.refuse("accumulate=True without a tensor to add to.", "Pass out=.")
    elif torch.compiler.is_compiling():
        result = torch.ops.ds_ops.grouped_outer(x, y, ends)
    elif torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
        result = _GroupedOuter.apply(x, y, ends)
    else:
        result = _outer(x, y, ends)
    return result


def why_host_is_told(weights: Tensor) -> str:
    """Return why `grouped_matmul` with [E, N, K] reads `ends` on the host, so that no CUDA graph holds it; empty where it does not."""
    chosen = choose(_MATMUL, weights.device.type, weights.dtype)
    if chosen.backend.name != "torch":
        return dict(chosen.rejected).get("torch", "")
    if torch.version.hip:
        return "torch for ROCm has a kernel for some devices only"
    odd = any(n % (16 // weights.element_size()) for n in weights.shape[1:])
    return f"torch's kernel moves 16 bytes at a time, and experts are {list(weights.shape[1:])}" if odd else ""


# ---- refusals --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GroupedProduct:
    """weights are [E, N, K]; the product is added to what is there."""

    transpose: bool = False
    accumulate: bool = False


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.device == b.device


def _require(x: Tensor, weights: Tensor, ends: Tensor, bias: Tensor | None, job: _GroupedProduct) -> None:
    fits = x.dim() == 2 and weights.dim() == 3 and weights.shape[2 if job.transpose else 1] == x.shape[1]
    if not fits or not _alike(x, weights) or not x.is_floating_point():
        layout = "[E, N, K]" if job.transpose else "[E, K, N]"
        raise _call.refuse(f"x [T, K] {_call.describe(x)} and weights {layout} {_call.describe(weights)} do not fit.")
    if bias is not None:
        wanted = [weights.shape[0], weights.shape[1 if job.transpose else 2]]
        if list(bias.shape) != wanted or not _alike(bias, x):
            raise _call.refuse(f"bias: expected {wanted} {x.dtype} on {x.device}; found {_call.describe(bias)}.")
    if ends.shape != weights.shape[:1]:
        raise _call.refuse(f"ends: expected [{weights.shape[0]}], one a group; found {_call.describe(ends)}.")
    _require_ends(ends, x)


def _require_ends(ends: Tensor, x: Tensor) -> None:
    if ends.dim() != 1 or ends.dtype not in (torch.int32, torch.int64) or ends.device != x.device or ends.is_meta:
        raise _call.refuse(f"ends: expected int32 or int64 [E] on {x.device}; found {_call.describe(ends)}.")


def _require_out(out: Tensor, shape: list[int], x: Tensor, inputs: tuple[Tensor | None, ...], kinds: str) -> None:
    allowed = (x.dtype, torch.float32) if "fp32" in kinds else (x.dtype,)
    if list(out.shape) != shape or out.device != x.device or out.dtype not in allowed:
        raise _call.refuse(f"out: expected {shape} of {kinds} on {x.device}; found {_call.describe(out)}.")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*inputs, out)):
        raise _call.refuse(
            "out= was given where autograd records: it cannot see that write.", "Call under torch.no_grad()."
        )


def group_bounds(ends: Tensor, rows: int) -> list[int]:
    """`ends` as numbers, checked. On the CPU that is a look into memory; on a device it waits."""
    bounds: list[int] = ends.detach().numpy().tolist() if ends.device.type == "cpu" else ends.tolist()
    if bounds and (bounds[-1] > rows or any(b < a for a, b in zip([0, *bounds], bounds, strict=False))):
        raise _call.refuse(f"ends {bounds} do not cut {rows} rows.", "Pass the cumulative sum of the groups' sizes.")
    return bounds


# ---- gradients -------------------------------------------------------------------------------------------------------


def _product(x: Tensor, weights: Tensor, ends: Tensor, bias: Tensor | None, transpose: bool) -> Tensor:
    y: Tensor = choose(_MATMUL, x.device.type, x.dtype).backend.run(
        x, weights, ends, bias, None, _GroupedProduct(transpose)
    )
    return y


def _outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    result: Tensor = choose(_OUTER, x.device.type, x.dtype).backend.run(x, y, ends, None, False)
    return result


Gradients = tuple[Tensor | None, ...]
Backward = Callable[..., Gradients]


def _matmul_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, ends, bias, transpose = inputs
    ctx.save_for_backward(x, weights, ends)
    ctx.transpose, ctx.wants = transpose, bias is not None


def _matmul_backward(matmul: Callable[..., Tensor], outer: Callable[..., Tensor]) -> Backward:
    """Build the backward from both products: as functions, or as nodes of a graph."""

    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x, weights, ends = ctx.saved_tensors
        need_x, need_w, _, need_bias, _ = ctx.needs_input_grad
        dx = matmul(dy, weights, ends, None, not ctx.transpose) if need_x else None
        pair = (dy, x) if ctx.transpose else (x, dy)
        dw = outer(*pair, ends) if need_w else None
        # Sums of each group's rows as a product with ones: fp32 inside, no atomic additions, no host.
        sums = outer(dy.new_ones(dy.shape[0], 8), dy, ends)[:, 0] if need_bias and ctx.wants else None
        return dx, dw, None, sums, None

    return backward


def _outer_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _outer_backward(matmul: Callable[..., Tensor]) -> Backward:
    def backward(ctx: Any, d: Tensor) -> Gradients:
        x, y, ends = ctx.saved_tensors
        dx = matmul(y, d, ends, None, True) if ctx.needs_input_grad[0] else None
        return dx, matmul(x, d, ends, None, False) if ctx.needs_input_grad[1] else None, None

    return backward


def _plain_matmul(x: Tensor, weights: Tensor, ends: Tensor, bias: Tensor | None, transpose: bool) -> Tensor:
    return grouped_matmul(x, weights, ends, transpose=transpose, bias=bias)


class _GroupedMatmul(torch.autograd.Function):
    """Run eagerly what does the same as the custom op below, at a tenth of its cost a call."""

    @staticmethod
    def forward(x: Tensor, weights: Tensor, ends: Tensor, bias: Tensor | None, transpose: bool) -> Tensor:
        return _product(x, weights, ends, bias, transpose)

    setup_context = staticmethod(_matmul_setup)
    backward = staticmethod(_matmul_backward(_plain_matmul, grouped_outer))


class _GroupedOuter(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
        return _outer(x, y, ends)

    setup_context = staticmethod(_outer_setup)
    backward = staticmethod(_outer_backward(_plain_matmul))


# ---- for a compiler: one node of a graph, with shapes and gradients ------------------------------------------------------


@torch.library.custom_op("ds_ops::grouped_matmul", mutates_args=())
def _matmul_node(x: Tensor, weights: Tensor, ends: Tensor, bias: Tensor | None, transpose: bool) -> Tensor:
    return _product(x, weights, ends, bias, transpose)


@torch.library.custom_op("ds_ops::grouped_outer", mutates_args=())
def _outer_node(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return _outer(x, y, ends)


@_matmul_node.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor, bias: Tensor | None, transpose: bool) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[1 if transpose else 2])


@_outer_node.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


_matmul_node.register_autograd(_matmul_backward(_matmul_node, _outer_node), setup_context=_matmul_setup)
_outer_node.register_autograd(_outer_backward(_matmul_node), setup_context=_outer_setup)


# ---- backends --------------------------------------------------------------------------------------------------------


def _parts(t: Tensor, bounds: list[int]) -> tuple[Tensor, ...]:
    """Split the rows by group, and last the rows of no group, with one call whatever the number of groups."""
    sizes = [b - a for a, b in zip([0, *bounds], bounds, strict=False)]
    return t.split([*sizes, t.shape[0] - sum(sizes)])


def _loop_matmul(
    x: Tensor, weights: Tensor, ends: Tensor, bias: Tensor | None, out: Tensor | None, job: _GroupedProduct
) -> Tensor:
    out = x.new_empty(x.shape[0], weights.shape[1 if job.transpose else 2]) if out is None else out
    bounds = group_bounds(ends, x.shape[0])
    matrices = (weights.transpose(1, 2) if job.transpose else weights).unbind(0)
    *outs, rest = _parts(out, bounds)
    rows = _parts(x, bounds)[:-1]
    biases = bias.unbind(0) if bias is not None else (None,) * len(outs)
    for a, w, b, y in zip(rows, matrices, biases, outs, strict=True):
        if not len(a):
            continue
        if job.accumulate:
            y.addmm_(a, w)
            if b is not None:
                y += b
        elif b is not None:
            torch.addmm(b, a, w, out=y)
        else:
            torch.mm(a, w, out=y)
    if not job.accumulate:
        rest.zero_()
    return out


def _loop_outer(x: Tensor, y: Tensor, ends: Tensor, out: Tensor | None, accumulate: bool) -> Tensor:
    out = x.new_empty(ends.shape[0], x.shape[1], y.shape[1]) if out is None else out
    bounds = group_bounds(ends, x.shape[0])
    wide = (x.to(out.dtype), y.to(out.dtype))
    left, right = (_parts(t, bounds)[:-1] for t in wide)
    for a, b, target in zip(left, right, out.unbind(0), strict=True):
        if accumulate:
            target.addmm_(a.t(), b)
        elif len(a):
            torch.mm(a.t(), b, out=target)
        else:
            target.zero_()
    return out


def _torch_matmul(
    x: Tensor, weights: Tensor, ends: Tensor, bias: Tensor | None, out: Tensor | None, job: _GroupedProduct
) -> Tensor:
    matrices = weights.transpose(1, 2) if job.transpose else weights
    if not _aligned(x, matrices):
        return _loop_matmul(x, weights, ends, bias, out, job)
    offsets = ends.to(torch.int32)
    y = _torch.grouped_mm(x, matrices, offs=offsets)
    place = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    if bias is not None:
        group = torch.searchsorted(offsets, place, right=True).clamp_(max=len(ends) - 1)
        y = y.add_(bias[group])
    # What the kernel leaves past the last end is whatever the memory held.
    y = y.masked_fill_((place >= offsets[-1])[:, None], 0)
    return _given(y, out, job.accumulate)


def _torch_outer(x: Tensor, y: Tensor, ends: Tensor, out: Tensor | None, accumulate: bool) -> Tensor:
    if not _aligned(x, y):
        return _loop_outer(x, y, ends, out, accumulate)
    product = _torch.grouped_mm(x.t(), y, offs=ends.to(torch.int32))
    # A group without rows is a product of nothing, which the kernel may skip.
    product = product.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
    return _given(product, out, accumulate)


def _given(product: Tensor, out: Tensor | None, accumulate: bool) -> Tensor:
    if out is None:
        return product
    return out.add_(product) if accumulate else out.copy_(product)


def _aligned(*tensors: Tensor) -> bool:
    """Return whether torch's kernel, which moves 16 bytes at a time, can read the tensors.

    One stride of each matrix is 1; the other strides are multiples of 16 bytes.
    """
    for t in tensors:
        unit = 16 // t.element_size()
        strides = t.stride()
        if not t.numel() or 1 not in strides[-2:] or t.data_ptr() % 16:
            return False
        if any(s % unit for s in strides if s != 1):
            return False
    return True


def _no_grouped_mm(device_type: str, dtype: torch.dtype) -> str:
    """Return why torch's kernel does not run there; an empty string if usable.

    On the CPU torch's kernel is a loop, no faster than the reference's.
    """
    if device_type != "cuda":
        return Unavailable("torch has a kernel for CUDA only", elsewhere=True)
    if dtype is not torch.bfloat16:
        return Unavailable(f"torch's kernel does not take {dtype}", fix="convert to torch.bfloat16")
    # Elsewhere torch has none either: it reads the groups on the host, and makes a product of each, as the reference does.
    if torch.version.hip is None and torch.cuda.get_device_capability()[0] not in GROUPED_MM_MAJORS:
        return Unavailable("torch has a kernel for compute capability 9 and 10")
    return ""


_WHY = "not written: BLAS does each product"
_MATMUL = register(
    Op(
        "grouped_matmul",
        "one product per group of rows",
        (
            absent_backend("cpu", _WHY),
            Backend("torch", _torch_matmul, _no_grouped_mm),
            reference_backend(_loop_matmul),
        ),
    )
)
_OUTER = register(
    Op(
        "grouped_outer",
        "the gradient of each group's matrix",
        (absent_backend("cpu", _WHY), Backend("torch", _torch_outer, _no_grouped_mm), reference_backend(_loop_outer)),
    )
)
