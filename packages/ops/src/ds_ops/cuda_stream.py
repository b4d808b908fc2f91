"""Chooses and launches the CUDA kernels of `native/cuda/stream.cu`: sum of squares, conversion, fill, comparison."""

from __future__ import annotations

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_ops.cuda_launch import launch
from ds_ops.kernel_source import CudaKernel

__all__ = ["KERNELS", "convert", "differs_from_cast", "fill", "sum_squares"]

_SUMS = 1024  # partial sums; fixed, so that the sum does not depend on the device
_CHUNK = 8192
_SQUARES = CudaKernel("stream.cu", "sum_squares", "SumSquaresCall", "PPqqi0q")
_CONVERT = CudaKernel("stream.cu", "convert<false>", "ConvertCall", "PPqiif0q")
_FILL = CudaKernel("stream.cu", "convert<true>", "ConvertCall", "PPqiif0q")
_COMPARE = CudaKernel("stream.cu", "compare_cast", "CompareCall", "PPPqii0q")
KERNELS = (_SQUARES, _CONVERT, _FILL, _COMPARE)


def sum_squares(x: Tensor) -> Tensor:
    """Sum x^2 in fp64: one element, valid on the current stream. x: contiguous fp32, bf16 or fp16."""
    _call.require("x", x)
    quads = -(-x.numel() // 4)
    blocks = min(-(-quads // _SQUARES.threads), _SUMS)
    partials = torch.empty(blocks, dtype=torch.float64, device=x.device)
    stride = 4 * _SQUARES.threads * _SUMS  # more than all elements where fewer blocks run
    launch(
        _SQUARES, x.device, blocks, _call.address(x), _call.address(partials), x.numel(), stride, _call.DTYPES[x.dtype]
    )
    return partials.sum()


def convert(out: Tensor, x: Tensor, scale: float) -> Tensor:
    """Write cast(x * scale) into `out`, valid on the current stream."""
    dtypes = _call.DTYPES[out.dtype], _call.DTYPES[x.dtype]
    blocks = -(-x.numel() // _CHUNK)
    launch(_CONVERT, out.device, blocks, _call.address(out), _call.address(x), x.numel(), *dtypes, scale)
    return out


def fill(out: Tensor, value: float) -> Tensor:
    """Write `value` into every element of `out`, valid on the current stream."""
    dtype = _call.DTYPES[out.dtype]
    launch(_FILL, out.device, -(-out.numel() // _CHUNK), _call.address(out), 0, out.numel(), dtype, dtype, value)
    return out


def differs_from_cast(out: Tensor, x: Tensor) -> Tensor:
    """Tell whether some element of `out` is not cast(x): bool of one element, valid on the current stream."""
    differs = torch.zeros((), dtype=torch.bool, device=out.device)
    addresses = _call.address(out), _call.address(x), _call.address(differs)
    dtypes = _call.DTYPES[out.dtype], _call.DTYPES[x.dtype]
    launch(_COMPARE, out.device, -(-out.numel() // _CHUNK), *addresses, out.numel(), *dtypes)
    return differs
