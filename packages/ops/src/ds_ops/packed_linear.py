"""A product with a packed matrix (`packed_weights.pack`) by itself: what the layer loop of `native_decoder` does, as an op."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ds_ops import _call
from ds_ops.packed_weights import UNIT, PackedWeight, ProductInputs
from ds_ops.registry import Op, choose, cpu_backend, reference_backend, register
from ds_ops.threads import kernel_threads

__all__ = ["packed_linear", "unpacked"]


def packed_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """Compute y = x @ W^T + bias, inputs rounded as the packing says, sums in fp32, outputs in their original order.

    Args:
        x: [..., K], fp32, on the CPU. weight: of `packed_weights.pack`, [N, K].
    Returns: fp32 [..., N]; gated halves follow each other as before packing. There is no gradient.

    Raises:
        KernelError: "kernel-argument" if shapes or devices do not fit.
    Cost: every weight read once for each block of rows whose inputs fit the second-level cache; one pass that packs the
    inputs.
        Source: Goto and van de Geijn 2008.
    """
    _call.require(
        "x", x.contiguous() if x.device.type == "cpu" else x, dtypes=(torch.float32,), device=weight.data.device
    )
    if x.dim() < 1 or x.shape[-1] != weight.inner:
        raise _call.refuse(f"x: expected [..., {weight.inner}]; found {_call.describe(x)}.")
    flat = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
    y: Tensor = choose(_LINEAR, x.device.type, x.dtype).backend.run(F.pad(flat, (0, weight.k - weight.inner)), weight)
    return _in_order(y, weight).view(*x.shape[:-1], weight.outputs)


def unpacked(weight: PackedWeight) -> Tensor:
    """Unpack the weight's values, fp32 [n, k], padded and in the order of the packing."""
    units, k = weight.n // UNIT, weight.k
    if weight.kind == 0:
        return weight.data.view(units, k, UNIT).transpose(1, 2).flatten(0, 1)
    if weight.kind == 1:
        return weight.data.view(units, k // 2, UNIT, 2).transpose(1, 2).reshape(weight.n, k).float()
    codes = weight.data
    if weight.kind == 3:
        codes = torch.stack([codes & 15, codes >> 4], -1).view(units, k // 8, UNIT, 4, 2).transpose(-1, -2)
    else:
        codes = codes.view(units, k // 4, UNIT, 4)
    numbers = codes.transpose(1, 2).reshape(units, UNIT, k).float()
    if weight.params is None:
        raise _call.refuse("codes without scales.", "Use what decoder.pack made.")
    scale, zero = (p.transpose(1, 2).repeat_interleave(weight.group, 2)[:, :, :k] for p in weight.params.unbind(2))
    return ((numbers - zero) * scale).flatten(0, 1)


def _in_order(y: Tensor, weight: PackedWeight) -> Tensor:
    """Reorder [rows, n] of packed units to [rows, outputs].

    Gate and value alternate in the packing, and each is padded to whole units.
    """
    if not weight.gated:
        return y[:, : weight.outputs]
    halves = y.view(y.shape[0], weight.n // (2 * UNIT), 2, UNIT).transpose(1, 2).flatten(2)
    return halves[:, :, : weight.outputs // 2].flatten(1)


def _rounded(x: Tensor, weight: PackedWeight) -> Tensor:
    if weight.inputs is ProductInputs.BF16:
        return x.bfloat16().float()
    if weight.inputs is ProductInputs.F32:
        return x
    rounded = []
    for part in x.split(weight.group, -1):
        most = part.abs().amax(-1, keepdim=True)
        scale = torch.where(most > 0, most / 127.0, 1.0)
        rounded.append((part * (1.0 / scale)).round() * scale)
    return torch.cat(rounded, -1)


def _reference(x: Tensor, weight: PackedWeight) -> Tensor:
    y = _rounded(x, weight) @ unpacked(weight).t()
    return y if weight.bias is None else y + weight.bias


def _cpu(x: Tensor, weight: PackedWeight) -> Tensor:
    module, words = _call.native(), np.array(weight.words(), dtype=np.int64)
    wide, y = x.contiguous(), torch.empty(len(x), weight.n, device="cpu")
    scratch = torch.zeros(module.decoder_product_scratch(words.ctypes.data, len(words), len(wide)), device="cpu")
    status = module.decoder_product(
        words.ctypes.data,
        len(words),
        _call.address(wide),
        len(wide),
        _call.address(y),
        _call.address(scratch),
        kernel_threads(),
    )
    _call.finish("packed_linear", status)
    return y


_LINEAR = register(
    Op(
        "packed_linear",
        "products of packed weights",
        (cpu_backend(_cpu, (torch.float32,)), reference_backend(_reference)),
    )
)
