"""Weights that are quantised already: tensors of classes of their own, as torchao makes them.

They are read (reports, exports) by the values they stand for. They cannot be compressed: they have neither groups of elements nor gradients.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ds_compress._torch import parts_of
from ds_config.errors import UnsupportedError

__all__ = ["bytes_of", "is_quantised", "refuse_quantised", "values_of"]


def is_quantised(tensor: Tensor) -> bool:
    """Whether a tensor is of a class of its own that can be dequantised."""
    return callable(getattr(type(tensor), "dequantize", None)) and parts_of(tensor)[0] is not tensor


def values_of(tensor: Tensor) -> Tensor:
    """Dequantize a quantized tensor; a plain tensor is returned unchanged."""
    if not is_quantised(tensor):
        return tensor
    values: Tensor = tensor.dequantize()
    return values


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes that a tensor, quantized or plain, takes in memory."""
    return sum(part.nbytes for part in parts_of(tensor)) if is_quantised(tensor) else tensor.nbytes


def refuse_quantised(name: str, module: Any) -> None:
    """Raise if the weight of a layer is quantised already, or is computed from other parameters.

    Raises:
        UnsupportedError: it is ("compress-quantised", "compress-parametrized").
    """
    weight = module.weight
    if "weight" not in module._parameters:
        raise UnsupportedError(
            f"{name}.weight is computed from other parameters (weight_norm, spectral_norm, torch.nn.utils.prune), and compression reads a parameter",
            code="compress-parametrized",
            fix="Remove the parametrization first (torch.nn.utils.parametrize.remove_parametrizations, prune.remove), or leave the layer out by its name.",
        )
    if isinstance(weight, Tensor) and is_quantised(weight):
        raise UnsupportedError(
            f"{name}.weight is a {type(weight).__module__}.{type(weight).__name__}, which is quantised already",
            code="compress-quantised",
            fix="Compress the model before torchao quantises it; or set the weight to weight.dequantize() first.",
        )
