"""Weights of few bits: which matrices, in which format, and what a linear does with them.

A matrix is quantised when it is loaded, one at a time, so that a folder never stands in memory as a whole. Embeddings, norms,
biases and routers keep their format: they are small, or looked up by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_config.errors import PlanError
from ds_ops.formats import FP4_E2M1, FP6_E3M2, FP8_E4M3, INT4, INT8, QuantTensor
from ds_ops.grouped import grouped_matmul
from ds_ops.quant import dequantize
from ds_ops.quant_linear import quantize_weight, quantized_grouped_matmul, quantized_linear
from ds_ops.registry import Backend, Op, choose, reference_backend
from ds_ops.triton_kernels.triton_support import triton_obstacle

__all__ = [
    "QuantizationOptions",
    "Weight",
    "as_quantize",
    "as_read",
    "dequantised",
    "experts_ask_host",
    "grouped_linear",
    "keeps_codes",
    "linear",
    "moved",
    "quantised",
]

Weight = Tensor | QuantTensor
"""A role's weight; a quantised one has the shape, and the dtype of what it was made from."""

_FORMATS = {"int8": INT8, "int4": INT4, "fp8": FP8_E4M3, "fp6": FP6_E3M2}
_KEPT = ("embed.weight", "positions.weight", "router.weight", "kv_up.weight", "shared_gate.weight")


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """How weights are quantised.

    Attributes:
        format: `"int8"`, `"int4"`, `"fp8"` (e4m3) or `"fp6"` (e3m2).
        group: Inputs of one output that share a scale, a multiple of 8; 0: all of them.
        symmetric: Without a zero point; floats always are.
        activations: What a product multiplies codes with: `"float"`, or `"int8"`: each token's inputs are rounded to 8 bits by group
            too, where the native path runs (it is faster for many tokens, and less exact).
    Raises:
        PlanError: "inference-quantize".
    """

    format: Literal["int8", "int4", "fp8", "fp6"] = "int8"
    group: int = 128
    symmetric: bool = True
    activations: Literal["float", "int8"] = "float"

    def __post_init__(self) -> None:
        floats = self.format in ("fp8", "fp6")
        if self.format not in _FORMATS or self.activations not in ("float", "int8"):
            raise _refuse(f"{self}", f"Formats are {', '.join(_FORMATS)}, activations float or int8.")
        if self.group < 0 or self.group % 8:
            raise _refuse(f"groups of {self.group}", "Use a multiple of 8, or 0 for whole rows.")
        if floats and (not self.symmetric or self.activations != "float"):
            raise _refuse(f"{self}", f"{self.format} codes have no zero point and multiply floats.")


def _refuse(description: str, fix: str) -> PlanError:
    return PlanError(f"weights cannot be quantised as {description}", code="inference-quantize", fix=fix)


def as_quantize(requested: QuantizationOptions | str | None) -> QuantizationOptions | None:
    """Return quantization options; a name means that format with groups of 128.

    Raises:
        PlanError: no such format ("inference-quantize").
    """
    if requested is None or isinstance(requested, QuantizationOptions):
        return requested
    if requested not in _FORMATS:
        raise _refuse(repr(requested), f"Use one of {', '.join(_FORMATS)}, or a Quantize.")
    return QuantizationOptions(requested)  # type: ignore[arg-type]


def quantised(role: str, weight: Tensor, how: QuantizationOptions) -> Weight:
    """Quantize a role's matrix [N, K] or experts [E, N, K] if products read the role; else return the weight."""
    if weight.dim() < 2 or role.endswith(_KEPT) or not role.endswith(("weight", ".up", ".down")):
        return weight.contiguous()
    group = how.group or -(-weight.shape[-1] // 8) * 8
    return quantize_weight(weight.contiguous(), _FORMATS[how.format], group=group, symmetric=how.symmetric)


def as_read(role: str, weight: Weight) -> Weight:
    """Return a folder's codes unchanged where matrix products read the role; else the dequantized values."""
    if isinstance(weight, QuantTensor) and not role.endswith(_KEPT):
        return weight
    return dequantised(weight)


def keeps_codes(weight: QuantTensor, device: torch.device | str | None) -> bool:
    """Whether a folder's codes stay codes: on a device all of them, on the CPU those that its products are made for."""
    on_cpu = (weight.wire.device if device is None else torch.device(device)).type == "cpu"
    return not on_cpu or (not weight.spec.format.is_float and len(weight.shape) == 2)


def moved(weight: Weight, device: torch.device | str | None) -> Weight:
    """Copy a weight to `device`, codes as codes; None: where it is."""
    if device is None:
        return weight
    if isinstance(weight, Tensor):
        return weight.to(device)
    return QuantTensor(weight.wire.to(device), weight.spec, weight.cols, weight.shape, weight.dtype)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight^T + bias, [.., K] to [.., N]."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    y: Tensor = choose(_PRODUCT, x.device.type, x.dtype).backend.run(x, weight, bias)
    return y


def _product_triton(x: Tensor, weight: QuantTensor, bias: Tensor | None) -> Tensor:
    from ds_ops.triton_kernels import triton_products

    if not triton_products.fits(weight, x.shape[:-1].numel()):  # many rows: numbers once, then a product of numbers
        return quantized_linear(x, weight, bias)
    y = triton_products.coded_product(x, weight)
    return y if bias is None else y + bias.to(y.dtype)


_PRODUCT = Op(
    "coded_product",
    "x @ codes^T, codes read as they are",
    (Backend("triton", _product_triton, triton_obstacle), reference_backend(quantized_linear)),
)


def grouped_linear(x: Tensor, weights: Weight, ends: Tensor) -> Tensor:
    """Multiply rows sorted by expert [T, K], each group by its own matrix of [E, N, K]; `ends` int64 [E]."""
    if isinstance(weights, Tensor):
        return grouped_matmul(x, weights, ends, transpose=True)
    y: Tensor = choose(_GROUPED_PRODUCT, x.device.type, x.dtype).backend.run(x, weights, ends)
    return y


def _grouped_product_triton(x: Tensor, weights: QuantTensor, ends: Tensor) -> Tensor:
    from ds_ops.triton_kernels import triton_products

    if not triton_products.fits_grouped(weights):
        return quantized_grouped_matmul(x, weights, ends)
    return triton_products.coded_grouped_product(x, weights, ends)


_GROUPED_PRODUCT = Op(
    "coded_grouped_product",
    "x @ codes^T of each group of rows, codes read as they are",
    (Backend("triton", _grouped_product_triton, triton_obstacle), reference_backend(quantized_grouped_matmul)),
)


def experts_ask_host(weights: Weight, device: torch.device, dtype: torch.dtype) -> str:
    """Return why the host is told how many rows each expert has, before `grouped_linear` of [E, N, K]; empty where it is not."""
    if isinstance(weights, Tensor):  # torch's product of groups takes bf16 in rows of 16 bytes
        free = weights.dtype == torch.bfloat16 and not any(n % 8 for n in weights.shape[1:])
        return "" if free else f"experts of {weights.dtype}, {list(weights.shape[1:])}"
    group = weights.spec.group
    whole = weights.spec.format in (*_FORMATS.values(), FP4_E2M1) and (group % 16 == 0 or group >= weights.cols)
    free = whole and choose(_GROUPED_PRODUCT, device.type, dtype).backend.name == "triton"
    return "" if free and weights.spec.format is not FP6_E3M2 else f"experts of {weights.spec.format.name}"


def dequantised(weight: Weight) -> Tensor:
    """Return the weight's values, dequantized from codes if needed."""
    if isinstance(weight, Tensor):
        return weight
    return dequantize(weight, dtype=torch.float32).to(weight.dtype)
