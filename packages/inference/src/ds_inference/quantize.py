"""Weights of few bits: which matrices, in which format, and what a linear does with them.

A matrix is quantised when it is loaded, one at a time, so that a folder never stands in memory as a whole. Embeddings, norms,
biases and routers keep their format: they are small, or looked up by row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_config.errors import PlanError
from ds_config.option_checks import check_options
from ds_inference.packed_codes import (
    PackedCodes,
    holds_bf16_params,
    pack_codes,
    product_of_groups,
    product_of_packed,
)
from ds_ops.formats import FP6_E3M2, FP8_E4M3, INT4, INT8, QuantSpec, QuantTensor
from ds_ops.grouped import grouped_matmul, why_host_is_told
from ds_ops.product_choice import (
    CodeLayout,
    DeviceTraits,
    ProductChoice,
    ProductFacts,
    choose_layout,
    choose_product,
    device_traits,
)
from ds_ops.quant import dequantize
from ds_ops.quant_linear import quantize_weight, quantized_grouped_matmul, quantized_linear
from ds_ops.registry import Backend, Op, Unavailable, choose, reference_backend
from ds_ops.triton_kernels.triton_support import triton_obstacle

__all__ = [
    "QuantizationOptions",
    "Weight",
    "as_quantize",
    "as_read",
    "chosen_product",
    "dequantised",
    "experts_ask_host",
    "grouped_linear",
    "keeps_codes",
    "laid_out",
    "linear",
    "moved",
    "quantised",
]

Weight = Tensor | QuantTensor | PackedCodes
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
            too, where the native path runs (it is faster for many tokens, and less exact). `"fp8"`: they are rounded to e4m3 by row
            (group 0) or by 128 (group 128), on every device, so that `scaled_mm` multiplies codes with codes where torch has it.
    Raises:
        PlanError: "inference-quantize".
    """

    format: Literal["int8", "int4", "fp8", "fp6"] = "int8"
    group: int = 128
    symmetric: bool = True
    activations: Literal["float", "int8", "fp8"] = "float"

    def __post_init__(self) -> None:
        check_options(self)
        floats = self.format in ("fp8", "fp6")
        if self.format not in _FORMATS or self.activations not in ("float", "int8", "fp8"):
            raise _refuse(f"{self}", f"Formats are {', '.join(_FORMATS)}, activations float, int8 or fp8.")
        if self.activations == "fp8" and (self.format != "fp8" or self.group not in (0, 128)):
            raise _refuse(f"{self}", "Activations of fp8 are for fp8 codes in groups of 0 (rows) or 128.")
        if self.group < 0 or self.group % 8:
            raise _refuse(f"groups of {self.group}", "Use a multiple of 8, or 0 for whole rows.")
        if floats and (not self.symmetric or self.activations == "int8"):
            raise _refuse(f"{self}", f"{self.format} codes have no zero point and do not multiply integers.")

    def spec(self, inputs: int) -> QuantSpec:
        """Return how rows of `inputs` elements are quantized."""
        group = self.group or -(-inputs // 8) * 8
        return QuantSpec(_FORMATS[self.format], group, self.symmetric)


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
    spec = how.spec(weight.shape[-1])
    return quantize_weight(weight.contiguous(), spec.format, group=spec.group, symmetric=spec.symmetric)


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
    if isinstance(weight, PackedCodes):
        return weight.moved(device)
    return QuantTensor(weight.wire.to(device), weight.spec, weight.cols, weight.shape, weight.dtype)


# ---- which product


def laid_out(weight: Weight, dtype: torch.dtype, *, rounded: bool = False) -> Weight:
    """Lay codes out as the product reads them that is chosen for their device; the result takes the place of `weight`.

    Args:
        dtype: Of the rows that will be multiplied.
        rounded: Products round these to fp8.
    """
    if not isinstance(weight, QuantTensor):
        return weight
    layout = choose_layout(_facts(weight, dtype, rounded=rounded, bf16_params=True)).layout
    if layout is CodeLayout.TINYGEMM and not holds_bf16_params(weight):
        layout = choose_layout(_facts(weight, dtype, rounded=rounded, bf16_params=False)).layout
    return weight if layout is CodeLayout.WIRE else pack_codes(weight, layout, rounded=rounded)


def chosen_product(weight: QuantTensor | PackedCodes, dtype: torch.dtype, rows: int) -> ProductChoice:
    """Choose the product of `rows` rows of `dtype` with a weight, and say why each better one does not run. Cached; some microseconds."""
    packed = isinstance(weight, PackedCodes)
    layout = weight.layout if isinstance(weight, PackedCodes) else CodeLayout.WIRE
    rounded = isinstance(weight, PackedCodes) and weight.rounded
    return _chosen(_facts(weight, dtype, rounded=rounded, bf16_params=packed), layout, rows)


def _facts(weight: QuantTensor | PackedCodes, dtype: torch.dtype, *, rounded: bool, bf16_params: bool) -> ProductFacts:
    device = weight.codes.device
    choice = choose(_PRODUCT if len(weight.shape) == 2 else _GROUPED_PRODUCT, device.type, dtype)
    why_no_triton = dict(choice.rejected).get("triton", "")
    return _facts_of(
        weight.spec, weight.shape, dtype, (rounded, bf16_params), device, why_no_triton, choice.backend.name != "reference"
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _facts_of(
    spec: QuantSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    params: tuple[bool, bool],
    device: torch.device,
    why_no_triton: str,
    ships: bool,
) -> ProductFacts:
    *experts, outputs, inputs = shape
    traits = device_traits(device, why_no_triton) if ships else DeviceTraits(device.type, triton=why_no_triton)
    return ProductFacts(
        spec.format, spec.group, spec.symmetric, outputs, inputs, experts[0] if experts else 0, dtype, *params, traits
    )


_chosen = functools.lru_cache(maxsize=4096)(choose_product)


def _on_cuda(device_type: str, _dtype: torch.dtype) -> str:
    return "" if device_type == "cuda" else Unavailable("runs on cuda tensors only", elsewhere=True)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight^T + bias, [.., K] to [.., N]."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if isinstance(weight, PackedCodes):
        return _product_packed(x, weight, bias)
    if torch.compiler.is_compiling() or chosen_product(weight, x.dtype, x.shape[:-1].numel()).entry.name != "triton":
        return quantized_linear(x, weight, bias)
    return _product_triton(x, weight, bias)


def _product_packed(x: Tensor, weight: PackedCodes, bias: Tensor | None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    name = chosen_product(weight, x.dtype, len(flat)).entry.name
    y = product_of_packed(name, flat, weight).view(*x.shape[:-1], weight.rows)
    return y if bias is None else y + bias.to(y.dtype)


def _product_triton(x: Tensor, weight: QuantTensor, bias: Tensor | None) -> Tensor:
    from ds_ops.triton_kernels import triton_products

    y = triton_products.coded_product(x, weight)
    return y if bias is None else y + bias.to(y.dtype)


_PRODUCT = Op(
    "coded_product",
    "x @ codes^T, codes read as they are",
    (
        Backend("triton", _product_triton, triton_obstacle),
        Backend("torch", _product_packed, _on_cuda),
        reference_backend(quantized_linear),
    ),
)
"""Whether our kernel and torch's may run at all; `ds_ops.product_choice` chooses among them."""


def grouped_linear(x: Tensor, weights: Weight, ends: Tensor) -> Tensor:
    """Multiply rows sorted by expert [T, K], each group by its own matrix of [E, N, K]; `ends` int64 [E]."""
    if isinstance(weights, Tensor):
        return grouped_matmul(x, weights, ends, transpose=True)
    name = chosen_product(weights, x.dtype, len(x)).entry.name
    if isinstance(weights, PackedCodes):
        return product_of_groups(name, x, weights, ends)
    if name == "triton":
        return _grouped_product_triton(x, weights, ends)
    if name == "grouped_mm":
        return grouped_matmul(x, dequantize(weights, dtype=x.dtype), ends, transpose=True)
    return quantized_grouped_matmul(x, weights, ends)


def _grouped_product_triton(x: Tensor, weights: QuantTensor, ends: Tensor) -> Tensor:
    from ds_ops.triton_kernels import triton_products

    return triton_products.coded_grouped_product(x, weights, ends)


_GROUPED_PRODUCT = Op(
    "coded_grouped_product",
    "x @ codes^T of each group of rows, codes read as they are",
    (
        Backend("triton", _grouped_product_triton, triton_obstacle),
        Backend("torch", product_of_groups, _on_cuda),
        reference_backend(quantized_grouped_matmul),
    ),
)


def experts_ask_host(weights: Weight, dtype: torch.dtype) -> str:
    """Return why the host is told how many rows each expert has, before `grouped_linear` of [E, N, K]; empty where it is not."""
    if isinstance(weights, Tensor):
        return why_host_is_told(weights)
    return f"experts of {weights.spec.format.name}" if chosen_product(weights, dtype, 1).entry.asks_host else ""


def dequantised(weight: Weight) -> Tensor:
    """Return the weight's values, dequantized from codes if needed."""
    if isinstance(weight, Tensor):
        return weight
    codes = weight.unpacked() if isinstance(weight, PackedCodes) else weight
    return dequantize(codes, dtype=torch.float32).to(weight.dtype)
