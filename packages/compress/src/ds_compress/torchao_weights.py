"""Codes as torchao's tensors and back: models quantised here run in torchao's loops, and its models are exported by our formats.

torchao's weight = (qdata - zero_point) * scale with signed integers; a code here is unsigned: both are moved by 2^(bits - 1).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_compress.posttraining import QuantizedWeight, QuantScheme
from ds_compress.quantised import is_quantised
from ds_config.errors import UnsupportedError

__all__ = ["codes_of_torchao", "to_torchao"]


def to_torchao(model: nn.Module, codes: Mapping[str, QuantizedWeight]) -> nn.Module:
    """Replace weights of linear layers by torchao's `IntxUnpackedToInt8Tensor` of the same codes. In place; returns the model.

    `torch.save(model.state_dict())`, `torch.compile` and torchao's own code take them; scales have the weight's dtype.

    Args:
        codes: Of `round_to_nearest`, `gptq` or `codes_of_training`, by layer.
    Raises:
        UnsupportedError: torchao is not installed ("compress-extra"), or a layer is not linear ("compress-torchao").
    """
    tensor_class = _torchao().IntxUnpackedToInt8Tensor
    for name, one in codes.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear) or one.shape is not None:
            raise UnsupportedError(
                f"{name} is a {type(module).__name__}; torchao's tensors of integers are weights of linear layers",
                code="compress-torchao",
                fix="Leave its codes out, or write them with export_compressed_tensors.",
            )
        dtype, half = module.weight.dtype, 1 << (one.scheme.bits - 1)
        weight = tensor_class(
            (one.codes.to(torch.int16) - half).to(torch.int8),
            one.scales.to(dtype),
            (one.zeros.to(torch.int16) - half).to(torch.int8),
            target_dtype=getattr(torch, f"int{one.scheme.bits}"),
            block_size=(1, one.codes.shape[1] // one.scales.shape[1]),
            dtype=dtype,
            activation_quantization=None,
        )
        module.weight = nn.Parameter(weight.to(module.weight.device), requires_grad=False)
    return model


def codes_of_torchao(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the codes of weights that torchao quantised to integers, by layer; for `export_compressed_tensors` and others.

    Raises:
        UnsupportedError: a weight is of another class of torchao's, such as floats or packed for a device ("compress-torchao").
    """
    return {
        name: _codes(name, module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_quantised(module.weight)
    }


def _codes(name: str, weight: Any) -> QuantizedWeight:
    kind = type(weight).__name__
    scale: Any = getattr(weight, "scale", None)
    if kind not in ("IntxUnpackedToInt8Tensor", "Int8Tensor") or scale is None or weight.qdata.dim() != 2:
        raise UnsupportedError(
            f"{name}.weight is a {type(weight).__module__}.{kind}, whose codes are no integers of rows",
            code="compress-torchao",
            fix="Quantise with IntxWeightOnlyConfig or Int8WeightOnlyConfig; or set the weight to weight.dequantize() and quantise it here.",
        )
    bits = 8 if kind == "Int8Tensor" else int(str(weight.target_dtype).removeprefix("torch.int"))
    rows, columns = weight.qdata.shape
    half = 1 << (bits - 1)
    scales = _by_row(scale, rows).float()
    zero_point = weight.zero_point
    offsets = torch.zeros_like(scales) if zero_point is None else _by_row(zero_point, rows).float()
    if bool((offsets != offsets.round()).any()):
        raise UnsupportedError(
            f"{name}.weight has zero points that are no integers",
            code="compress-torchao",
            fix="Quantise with integer zero points (MappingType.SYMMETRIC or ASYMMETRIC).",
        )
    symmetric = not bool(offsets.any())
    groups = scales.shape[1]
    scheme = QuantScheme(bits, -1 if groups == 1 else columns // groups, symmetric)
    codes = (weight.qdata.to(torch.int16) + half).to(torch.uint8)
    return QuantizedWeight(scheme, codes, scales, (offsets + half).to(torch.uint8))


def _by_row(values: Tensor, rows: int) -> Tensor:
    """Scales of rows and groups, [rows, groups], also where torchao has one for the tensor."""
    return values.reshape(1, 1).expand(rows, 1) if values.numel() == 1 else values.reshape(rows, -1)


_TALKATIVE = ("torchao", "torchao.kernel.intmm", "torch.utils._pytree")


@contextmanager
def _silent_import() -> Iterator[None]:
    """Hold back what torchao says while it is imported: kernels for other devices and versions that it looks for and does not load."""
    before = {name: logging.getLogger(name).level for name in _TALKATIVE}
    try:
        for name in before:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _torchao() -> Any:
    try:
        with _silent_import():
            return importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise UnsupportedError(
            f"to_torchao needs the package torchao, which is not installed ({error})",
            code="compress-extra",
            fix="Install it with: pip install 'ds-compress[torchao]'",
        ) from error
