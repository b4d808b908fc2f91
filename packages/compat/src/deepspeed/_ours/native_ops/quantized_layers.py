"""`deepspeed.inference.quantization`: layers of a model that only answers, whose weights are int4 or int8 codes (ZeRO-Inference).

Groups of `group_size` numbers along `group_dim` share a scale and a least value: code = round((number - least) * scale), of 2^bits values.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed._ours.base.raising import refused
from deepspeed._ours.zero.zero_api import GatheredParameters

Codes = tuple[Tensor, Tensor, Tensor]


class _Format:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.bits = dict(config), config["num_bits"]
        self.dim, self.group = config["group_dim"], config["group_size"]
        if self.bits not in (4, 8) or config["symmetric"]:
            raise refused("group-codes", self.bits, config["symmetric"])

    def _grouped(self, tensor: Tensor) -> Tensor:
        if tensor.shape[self.dim] % self.group:
            raise refused("group-size", self.group, self.dim, tuple(tensor.shape))
        return tensor.unflatten(self.dim, (-1, self.group))


class Quantizer(_Format):
    """Makes codes of numbers."""

    def quantize(self, tensor: Tensor) -> Codes:
        """Return uint8 codes, two in a byte along the last dim if they are of 4 bits; and each group's scale and least value, in the dtype of `tensor`."""
        groups, levels = self._grouped(tensor).float(), 2**self.bits - 1
        least, most = (reduce(groups, self.dim + 1, keepdim=True) for reduce in (torch.amin, torch.amax))
        scale = torch.where(most > least, levels / (most - least), 1.0).to(tensor.dtype)
        least = least.to(tensor.dtype)
        codes = ((groups - least) * scale).round().clamp(0, levels).to(torch.uint8)
        codes = codes.flatten(self.dim, self.dim + 1)
        return codes if self.bits == 8 else codes[..., ::2] << 4 | codes[..., 1::2], scale, least


class DeQuantizer(_Format):
    """Makes numbers of `dtype` of codes."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config)
        self.dtype = dtype

    def dequantize(self, tensor: Tensor, quant_scale: Tensor, quant_min: Tensor) -> Tensor:
        """Return what `Quantizer.quantize` was given, within half a step."""
        codes = tensor if self.bits == 8 else torch.stack((tensor >> 4, tensor & 15), -1).flatten(-2)
        groups = self._grouped(codes).to(self.dtype) / quant_scale + quant_min
        return groups.flatten(self.dim, self.dim + 1).to(self.dtype)


class _Coded(nn.Module):
    """A frozen layer; `weight` is made anew at each look."""

    codes: Tensor
    scale: Tensor
    least: Tensor

    def _take(self, config: Mapping[str, Any], layer: nn.Module, known: dict[int, Codes]) -> None:
        weight: Any = layer.weight
        if id(weight) not in known:  # tied ones share codes
            with GatheredParameters(weight) if hasattr(weight, "ds_id") else nullcontext():
                known[id(weight)] = Quantizer(config).quantize(weight.detach())
        self._reader = DeQuantizer(config, weight.dtype)
        for name, tensor in zip(("codes", "scale", "least"), known[id(weight)], strict=True):
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Tensor:
        """The numbers that the codes stand for."""
        return self._reader.dequantize(self.codes, self.scale, self.least)


class QuantizedLinear(_Coded):
    """`pre_quant_layer` with codes."""

    def __init__(
        self, config: Mapping[str, Any], pre_quant_layer: nn.Linear, known: dict[int, Codes] | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = pre_quant_layer.in_features, pre_quant_layer.out_features
        self._take(config, pre_quant_layer, {} if known is None else known)
        self.bias = pre_quant_layer.bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Linear's name
        return F.linear(input, self.weight, self.bias)


class QuantizedEmbedding(_Coded):
    """`pre_quant_layer` with codes."""

    def __init__(
        self, config: Mapping[str, Any], pre_quant_layer: nn.Embedding, known: dict[int, Codes] | None = None
    ) -> None:
        super().__init__()
        self.padding_idx = pre_quant_layer.padding_idx
        self._take(config, pre_quant_layer, {} if known is None else known)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Embedding's name
        return F.embedding(input, self.weight, self.padding_idx)


QUANTIZATION_LAYER_MAPPINGS: Mapping[type[nn.Module], Any] = {
    nn.Linear: QuantizedLinear,
    nn.Embedding: QuantizedEmbedding,
}


def quantize_layers(model: nn.Module, ds_config: Mapping[str, Any]) -> nn.Module:
    """Replace the layers that `weight_quantization.post_init_quant` names by parts of their names. Collective where `zero.Init` has cut them.

    Raises:
        ConfigError: the section is not there, or two of its names are parts of one layer's ("compat-argument").
    """
    section = ds_config.get("weight_quantization", {}).get("post_init_quant")
    if section is None:
        raise refused("no-post-init-quant")
    return _replaced(model, section)


def _replaced(model: nn.Module, section: Mapping[str, Mapping[str, Any]]) -> nn.Module:
    known: dict[int, Codes] = {}
    kept: list[nn.Module] = []  # so that no other weight gets the id of one that is gone
    for name, layer in list(model.named_modules()):
        keys = [key for key in section if key in name] if type(layer) in QUANTIZATION_LAYER_MAPPINGS else []
        if len(keys) > 1:
            raise refused("quantized-twice", name, keys)
        if keys:
            parent, _, child = name.rpartition(".")
            made = QUANTIZATION_LAYER_MAPPINGS[type(layer)](section[keys[0]], layer, known)
            setattr(model.get_submodule(parent), child, made)
            kept.append(layer)
    return model


def is_quantized(model: nn.Module, initial: Mapping[str, Any] | None) -> bool:
    """Whether layers of `model` have codes; all get them first if `quantized_initialization` is `initial`."""
    if initial is not None:
        _replaced(model, {"": initial})
    return any(isinstance(module, _Coded) for module in model.modules())
