"""Passes over flat memory: norms, conversions, comparisons, copies, fill.

Each function takes contiguous tensors; costs are bytes moved per element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import ds_ops._call as _call
import ds_ops.cuda_stream as cuda_stream
from ds_config.errors import KernelError
from ds_ops.registry import Backend, Op, choose, cpu_backend, cuda_backend, reference_backend, register, torch_backend
from ds_ops.threads import kernel_threads

__all__ = [
    "clip_scale",
    "convert",
    "copy_ranges",
    "differs_from_cast",
    "fill",
    "grad_norm",
    "norms_of",
    "norms_of_ranges",
    "sum_squares",
    "total_squares",
]

_WITHOUT_FP64 = ("mps",)
_ROW = 4096
_Ranges = Sequence[tuple[Tensor, Sequence[tuple[int, int, int]]]]


def sum_squares(x: Tensor) -> float:
    """Sum of x^2 in fp64, in blocks (Higham 1993). The same bits on any number of threads and any instruction set.

    Args:
        x: any shape, contiguous; fp32, bf16, fp16 (others through torch).
    Cost: one read.
    """
    return float(_squares(x))


def total_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of x^2 over all elements of all tensors: fp64 of one element, where they are. Nothing waits for the device.

    A device without fp64 (mps) is waited for: the sum is on the host.

    tensors: at least one, all on one device, otherwise as in `sum_squares`. Cost: one read.
    """
    if not tensors:
        raise KernelError(
            "total_squares: no tensors.", code="kernel-argument", fix="Pass at least one: it says where the sum is."
        )
    sums = [_squares(t) for t in tensors]
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Measure tensors: [n, 2] fp64, of each the sum of x^2 and the largest |x|, where they are. NaN where an element is.

    Nothing waits for the device, as in `total_squares`. Sums in blocks: Higham 1993.

    tensors: at least one, of one dtype on one device, otherwise as in `sum_squares`; complex ones are taken as pairs. Cost: one read on a CPU, two on a device.
    """
    if not tensors:
        raise KernelError(
            "norms_of: no tensors.", code="kernel-argument", fix="Pass at least one: it says where norms are."
        )
    like = tensors[0]
    for x in tensors:
        if x.dtype != like.dtype or x.device != like.device:
            raise KernelError(
                f"norms_of: expected tensors of one dtype on one device, found {_call.describe(like)} and {_call.describe(x)}.",
                code="kernel-argument",
                fix="Measure them in calls of their own.",
            )
    real = [torch.view_as_real(x.detach()) if x.is_complex() else x for x in tensors]
    result: Tensor = _chosen(real[0]).run(real)
    return result


def _chosen(like: Tensor) -> Backend:
    return choose(_NORMS, like.device.type, like.dtype).backend


def norms_of_ranges(sources: Sequence[tuple[Tensor, Sequence[tuple[int, int]]]]) -> Tensor:
    """Measure elements [start, stop) of flat tensors: what `norms_of` returns of those parts, without a view of each.

    Args:
        sources: Tensors as `norms_of` takes, 1-D, each with its ranges; at least one range in all.
    Cost: that of `norms_of`; on a CPU a tenth of a microsecond a range besides, where a view costs two.
    """
    like = sources[0][0] if sources else None
    plain = like is not None and all(x.dtype is like.dtype and x.device == like.device for x, _ in sources)
    if like is None or not plain or like.is_complex() or _chosen(like).run is not _cpu_norms:
        return norms_of([x[start:stop] for x, ranges in sources for start, stop in ranges])
    size, at, numels = like.element_size(), list[int](), list[int]()
    for x, ranges in sources:
        first, length = _call.address(_call.require("x", x, dtypes=(like.dtype,))), x.numel()
        for start, stop in ranges:
            if not 0 <= start <= stop <= length:
                raise _call.refuse(f"norms_of_ranges: elements {start} to {stop} of {length}.", "Pass ranges inside.")
            at.append(first + start * size)
            numels.append(stop - start)
    return _measure(at, like.dtype, numels) if at else norms_of([])


def clip_scale(squares: Tensor, max_norm: float, *, scale: float = 1.0) -> Tensor:
    """scale * min(1, max_norm / (scale * sqrt(squares) + 1e-6)): fp32 of one element, on the device of `squares`.

    What an optimizer's `FusedOps(grad_scale=)` takes to clip gradients by their norm (Pascanu et al. 2013), in one pass.

    Args:
        squares: of `total_squares`, over all ranks that hold a part. scale: what gradients are multiplied with anyway.
    """
    norm = squares.detach().sqrt() * scale
    return ((max_norm / (norm + 1e-6)).clamp(max=1.0) * scale).float()


def _squares(x: Tensor) -> Tensor:
    result: Tensor = choose(_SUM_SQUARES, x.device.type, x.dtype).backend.run(x)
    return result


def grad_norm(tensors: Sequence[Tensor]) -> float:
    """Compute the 2-norm of all elements of all tensors; not finite exactly if some element, or the sum, is not."""
    return math.sqrt(math.fsum(sum_squares(t) for t in tensors)) if tensors else 0.0


def convert(out: Tensor, x: Tensor, *, scale: float = 1.0) -> Tensor:
    """Convert out[i] = cast(x[i] * scale), product in fp32, rounded to nearest even (IEEE 754-2019). Returns `out`.

    Args:
        out: as many elements as `x`; any of fp32, bf16, fp16. May be `x` itself; any other overlap is refused.
    Cost: one read, one write; large results bypass the cache.
    """
    if out.numel() != x.numel() or out.device != x.device:
        raise KernelError(
            f"convert: expected equal lengths on one device, found {_call.describe(out)} and {_call.describe(x)}.",
            code="kernel-argument",
            fix="Allocate `out` with torch.empty_like(x, dtype=...).",
        )
    odd = out.dtype if out.dtype not in _call.DTYPES else x.dtype
    return choose(_CONVERT, x.device.type, odd).backend.run(out, x, scale)


def differs_from_cast(out: Tensor, x: Tensor) -> Tensor:
    """Tell whether some out[i] != cast(x[i]), rounded to nearest even: bool of one element, where they are. Nothing waits for the device.

    NaN differs from everything, zeros of both signs are equal.

    Args:
        out: as many elements as `x`, on its device; fp32, bf16, fp16, as `x` (others through torch).
    Cost: one read of both where a kernel is compiled. Elsewhere `x` is cast first: an element of bf16 beside one of fp32 moves 12 bytes
    instead of 6.
    """
    if out.numel() != x.numel() or out.device != x.device:
        raise KernelError(
            f"differs_from_cast: expected equal lengths on one device, found {_call.describe(out)} and {_call.describe(x)}.",
            code="kernel-argument",
            fix="Pass a tensor and the one that it was cast from.",
        )
    odd = out.dtype if out.dtype not in _call.DTYPES else x.dtype
    result: Tensor = choose(_DIFFERS, x.device.type, odd).backend.run(out, x)
    return result


def copy_ranges(out: Tensor, sources: _Ranges) -> Tensor:
    """Copy out[at : at + n] = x[start : start + n] of flattened tensors, for each (start, at, n) of each source x. Returns `out`.

    Args:
        out: contiguous; fp32, bf16, fp16, fp64 (others through torch).
        sources: Tensors with their ranges: contiguous, of out's dtype and device, disjoint from `out`; no two ranges write the same element.
    Cost: one read, one write: large ranges are next read by another core, so they bypass the cache.
    """
    return choose(_COPY_RANGES, out.device.type, out.dtype).backend.run(out, sources)


def fill(out: Tensor, value: float) -> Tensor:
    """Fill out[i] = value for any shape, rounded to out's dtype (IEEE 754-2019). Returns `out`. Cost: one write."""
    return choose(_FILL, out.device.type, out.dtype).backend.run(out, value)


def _cpu_sum_squares(x: Tensor) -> Tensor:
    return _cpu_norms([x])[0, 0]


def _cpu_norms(tensors: Sequence[Tensor]) -> Tensor:
    dtype = tensors[0].dtype
    for x in tensors:
        _call.require("x", x, dtypes=(dtype,))
    return _measure([_call.address(x) for x in tensors], dtype, [x.numel() for x in tensors])


def _measure(at: Sequence[int], dtype: torch.dtype, numels: Sequence[int]) -> Tensor:
    """Measure what lies at checked addresses, whose tensors the caller keeps alive."""
    norms, partials = norms_and_partials(numels)
    status = _call.native().measure_ranges(
        at, _call.DTYPES[dtype], numels, _call.address(norms), _call.address(partials), kernel_threads()
    )
    _call.finish("norms_of", status)
    return norms


def norms_and_partials(numels: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Allocate the norms of tensors of such lengths, [n, 2] fp64, and what a kernel needs for those of the blocks of the longest."""
    blocks = -(-max(numels) // _call.native().norm_block)
    return torch.empty(len(numels), 2, dtype=torch.float64, device="cpu"), torch.empty(
        blocks, 2, dtype=torch.float64, device="cpu"
    )


def _check_convert(out: Tensor, x: Tensor) -> None:
    _call.require("out", out)
    _call.require("x", x, device=out.device)
    if _call.address(out) != _call.address(x) or out.dtype != x.dtype:
        _call.require_disjoint(out=out, x=x)


def _cpu_convert(out: Tensor, x: Tensor, scale: float) -> Tensor:
    _check_convert(out, x)
    status = _call.native().convert(
        _call.address(out),
        _call.DTYPES[out.dtype],
        _call.address(x),
        _call.DTYPES[x.dtype],
        x.numel(),
        scale,
        kernel_threads(),
    )
    _call.finish("convert", status)
    _call.mark_written([out])
    return out


def _cuda_convert(out: Tensor, x: Tensor, scale: float) -> Tensor:
    _check_convert(out, x)
    cuda_stream.convert(out, x, scale)
    _call.mark_written([out])
    return out


def _cuda_differs(out: Tensor, x: Tensor) -> Tensor:
    _call.require("out", out)
    _call.require("x", x, device=out.device)
    return cuda_stream.differs_from_cast(out, x)


def _cpu_copy_ranges(out: Tensor, sources: _Ranges) -> Tensor:
    to, of, nbytes = _check_ranges(out, sources)
    _call.finish("copy_ranges", _call.native().copy_ranges(to, of, nbytes, kernel_threads()))
    _call.mark_written([out])
    return out


def _check_ranges(out: Tensor, sources: _Ranges) -> tuple[list[int], list[int], list[int]]:
    """Check the ranges and return the target address, source address and bytes of each."""
    numel, size, dtypes, device = out.numel(), out.element_size(), (out.dtype,), out.device
    begin = _call.address(_call.require("out", out, dtypes=dtypes))
    to, of, nbytes = list[int](), list[int](), list[int]()
    for x, ranges in sources:
        if x.dtype is not dtypes[0] or not x.is_contiguous() or x.device != device or not x.data_ptr():
            _call.require("sources", x, dtypes=dtypes, device=device)
        first, length = x.data_ptr(), x.numel()
        for start, at, n in ranges:
            if not (0 <= start <= length - n and 0 <= at <= numel - n):
                raise _call.refuse(
                    f"copy_ranges: elements {start} to {start + n} of {length}, to {at} of {numel}.",
                    "Pass ranges inside of the tensors.",
                )
            to.append(begin + at * size)
            of.append(first + start * size)
            nbytes.append(n * size)
        if begin - length * size < first < begin + numel * size and any(n for _, _, n in ranges):
            _call.require_disjoint(out=out, sources=x)
    return to, of, nbytes


def _reference_copy_ranges(out: Tensor, sources: _Ranges) -> Tensor:
    _check_ranges(out, sources)
    with torch.no_grad():
        for x, ranges in sources:
            for start, at, n in ranges:
                out.view(-1)[at : at + n].copy_(x.view(-1)[start : start + n])
    return out


def _cpu_fill(out: Tensor, value: float) -> Tensor:
    _call.require("out", out)
    status = _call.native().fill(_call.address(out), _call.DTYPES[out.dtype], out.numel(), value, kernel_threads())
    _call.finish("fill", status)
    _call.mark_written([out])
    return out


def _cuda_fill(out: Tensor, value: float) -> Tensor:
    _call.require("out", out)
    cuda_stream.fill(out, value)
    _call.mark_written([out])
    return out


def _device_norms(tensors: Sequence[Tensor]) -> Tensor:
    squares = torch.stack([_squares(x) for x in tensors]).view(-1)
    filled = [x.detach() if x.numel() else x.new_zeros(1) for x in tensors]  # of no elements there is no maximum
    peaks = torch.stack(torch._foreach_norm(filled, math.inf))
    return torch.stack((squares, peaks.to(squares.device).double()), 1)


def _reference_norms(tensors: Sequence[Tensor]) -> Tensor:
    # torch's norm of infinite order takes five times as long on a CPU.
    squares = torch.stack([_squares(x) for x in tensors]).view(-1)
    filled = [x.detach() if x.numel() else x.new_zeros(1) for x in tensors]
    peaks = [torch.stack(torch.aminmax(x)).abs().amax() for x in filled]
    return torch.stack((squares, torch.stack(peaks).to(squares.device).double()), 1)


def _torch_sum_squares(x: Tensor) -> Tensor:
    if x.device.type in _WITHOUT_FP64:
        return _narrow_sum_squares(x)
    # No copy of x in fp64: each element is widened where it is added.
    return torch.linalg.vector_norm(x.detach(), dtype=torch.float64).square()


def _narrow_sum_squares(x: Tensor) -> Tensor:
    """By rows that are short enough for fp32; their sums are added in fp64 on the host."""
    flat = x.detach().view(-1)
    even = flat.numel() // _ROW * _ROW
    rows = flat[:even].view(-1, _ROW), flat[even:].view(1, -1)
    norms = torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in rows])
    return norms.cpu().double().square().sum()


def _reference_sum_squares(x: Tensor) -> Tensor:
    return x.detach().double().square().sum()


def _reference_convert(out: Tensor, x: Tensor, scale: float) -> Tensor:
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return out.copy_((wide * scale if scale != 1.0 else wide).view_as(out))


def _reference_differs(out: Tensor, x: Tensor) -> Tensor:
    return (out.detach() != x.detach().view_as(out).to(out.dtype)).any()


def _reference_fill(out: Tensor, value: float) -> Tensor:
    return out.fill_(value)


_SUM_SQUARES = register(
    Op(
        "sum_squares",
        "deterministic sum of squares",
        (
            cuda_backend(cuda_stream.sum_squares),
            cpu_backend(_cpu_sum_squares),
            torch_backend(_torch_sum_squares),
            reference_backend(_reference_sum_squares),
        ),
    )
)
_NORMS = register(
    Op(
        "norms_of",
        "sums of squares and largest magnitudes",
        (
            cuda_backend(_device_norms),
            cpu_backend(_cpu_norms),
            torch_backend(_device_norms),
            reference_backend(_reference_norms),
        ),
    )
)
_CONVERT = register(
    Op(
        "convert",
        "scaled dtype conversion",
        (cuda_backend(_cuda_convert), cpu_backend(_cpu_convert), reference_backend(_reference_convert)),
    )
)
_DIFFERS = register(
    Op(
        "differs_from_cast",
        "comparison with a dtype conversion",
        (cuda_backend(_cuda_differs), reference_backend(_reference_differs)),
    )
)
_COPY_RANGES = register(
    Op(
        "copy_ranges",
        "copies of ranges, past the cache",
        (
            cpu_backend(_cpu_copy_ranges, (*_call.DTYPES, torch.float64)),
            reference_backend(_reference_copy_ranges, moves=True),
        ),
    )
)
_FILL = register(
    Op(
        "fill",
        "set to one value",
        (cuda_backend(_cuda_fill), cpu_backend(_cpu_fill), reference_backend(_reference_fill)),
    )
)
