"""Frozen linear layers whose weights are codes: int8 or int4, read by the kernels of ds-ops.

A base model below adapters, or a reference model: its weights are quantised once, before ZeRO, which shards what is left. Every rank
keeps the codes whole: they are a quarter or an eighth of the weights' bytes, and no step gathers them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_config.errors import PlanError
from ds_engine.model_sections import WeightQuantizationConfig
from ds_engine.plan import Shapes
from ds_engine.transforms.transform import BuildContext, Transform, TransformInput
from ds_ops.formats import INT4, INT8, QuantTensor
from ds_ops.quant import dequantize
from ds_ops.quant_linear import quantize_weight, quantized_linear

__all__ = ["CodedLinear", "QuantizedWeights"]

_FORMATS = {8: INT8, 4: INT4}


@dataclass(frozen=True, slots=True)
class Coded:
    """How one layer is quantised.

    Attributes:
        name: Of the layer.
        bits: 8 or 4.
        group: Inputs of one output that share a scale.
        symmetric: Without a zero point.
    """

    name: str
    bits: int
    group: int
    symmetric: bool


class CodedLinear(nn.Module):
    """y = x W^T + b with a frozen W of codes; the gradient reaches x and b."""

    codes: Tensor

    def __init__(self, layer: nn.Linear, how: Coded) -> None:
        super().__init__()
        quantized = quantize_weight(layer.weight, _FORMATS[how.bits], group=how.group, symmetric=how.symmetric)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._spec, self._dtype = quantized.spec, layer.weight.dtype
        self.register_buffer("codes", quantized.wire)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """The numbers that the codes stand for, made anew at each look."""
        return dequantize(self._coded(), dtype=torch.float32).to(self._dtype)

    def _coded(self) -> QuantTensor:
        return QuantTensor(self.codes, self._spec, self.in_features, (self.out_features, self.in_features), self._dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Linear's name
        """Apply the quantized layer: [..., in_features] to [..., out_features]."""
        return quantized_linear(input, self._coded(), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._spec.format.name}"


class QuantizedWeights(Transform["tuple[Coded, ...]", "list[tuple[nn.Module, str, CodedLinear]]"]):
    """In the plan if `weight_quantization` is there and enabled."""

    name = "quantized weights"

    def decide(self, inputs: TransformInput) -> tuple[Coded, ...] | None:
        section = inputs.config.weight_quantization
        if section is None or not section.enabled:
            return None
        cut = [axis for axis in ("tensor", "pipe") if getattr(inputs.mesh, axis) > 1]
        chosen = [] if cut else _chosen(section, inputs.shapes)
        if not chosen:
            why = (
                f"layers are cut over ranks ({', '.join(cut)})"
                if cut
                else "no frozen matrix has a name that it speaks of"
            )
            raise PlanError(
                f"weight_quantization is enabled, and {why}",
                code="quantize-weights",
                fix="Freeze the layers that are to be quantised (requires_grad_(False)), name them in post_init_quant, or leave it out.",
            )
        return tuple(chosen)

    def plan_rows(self, what: tuple[Coded, ...]) -> Mapping[str, str]:
        kinds = sorted({(one.bits, one.symmetric, one.group) for one in what})
        formats = ", ".join(
            f"int{bits} in groups of {group}{'' if sym else ' with zero points'}" for bits, sym, group in kinds
        )
        return {"quantized weights": f"{len(what)} frozen matrices as {formats}, whole on every rank"}

    def shapes(self, what: tuple[Coded, ...], shapes: Shapes) -> Shapes:
        gone = {f"{one.name}.weight" for one in what}
        return replace(shapes, params=tuple(p for p in shapes.params if p.name not in gone))

    def apply(self, what: tuple[Coded, ...], site: BuildContext) -> list[tuple[nn.Module, str, CodedLinear]]:
        layers = [(one, site.model.get_submodule(one.name)) for one in what]
        other = [one.name for one, layer in layers if type(layer) is not nn.Linear or not _here(layer.weight)]
        linear = [(one, layer) for one, layer in layers if isinstance(layer, nn.Linear) and one.name not in other]
        if not linear:
            raise PlanError(
                f"weight_quantization: {', '.join(other[:5])} are not torch.nn.Linear layers whose weights are here whole",
                code="quantize-weights",
                fix="Name linear layers in post_init_quant, and build the model outside of Init.",
            )
        replaced = []
        for one, layer in linear:
            parent = site.model.get_submodule(one.name.rpartition(".")[0])
            coded = CodedLinear(layer, one)
            setattr(parent, one.name.rpartition(".")[2], coded)
            replaced.append((parent, one.name.rpartition(".")[2], coded))
        return replaced

    def undo(self, applied: list[tuple[nn.Module, str, CodedLinear]]) -> None:
        """Restore the linear layers with the dequantized weights."""
        for parent, name, coded in applied:
            layer = nn.Linear(coded.in_features, coded.out_features, bias=False, device="meta")
            layer.weight = nn.Parameter(coded.weight, requires_grad=False)
            layer.bias = coded.bias
            setattr(parent, name, layer)


def _here(weight: Any) -> bool:
    return type(weight) is nn.Parameter and not weight.is_meta


def _chosen(section: WeightQuantizationConfig, shapes: Shapes) -> list[Coded]:
    """Select the frozen matrices that the section names, or all of them."""
    matrices = []
    for param in shapes.params:
        name, _, kind = param.name.rpartition(".")
        if param.group is not None or kind != "weight" or len(param.shape) != 2:
            continue
        settings = section.of_layer(name, param.shape)
        if settings is not None:
            matrices.append(Coded(name, *settings))
    return matrices
