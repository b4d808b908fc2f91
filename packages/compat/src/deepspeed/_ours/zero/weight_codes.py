"""`CUDAQuantizer` of `deepspeed.runtime.zero.partition_parameters`: tensors as int8 codes and a scale for each group, by `ds_ops.quant`."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ds_ops.formats import INT8, QuantSpec
from ds_ops.quant import quantize

_GROUP = 8000
"""The largest group, in elements."""


class _Codes:
    Symmetric = 0

    def quantize(self, values: Tensor, groups: int, num_bits: int, quant_type: int) -> tuple[Tensor, Tensor]:
        del num_bits, quant_type
        coded = quantize(values.reshape(-1), QuantSpec(INT8, values.numel() // groups))
        return coded.codes.view(torch.int8).reshape(values.shape), coded.params.reshape(groups)

    def dequantize(self, codes: Tensor, scale: Tensor, groups: int, num_bits: int, quant_type: int) -> Tensor:
        del num_bits, quant_type
        return (codes.reshape(groups, -1) * scale.reshape(groups, 1)).half().reshape(codes.shape)


class CUDAQuantizer:
    """Codes of fp16 values; `dequantize` gives any dtype."""

    quantizer_cuda_module: Any = _Codes()

    def quantize(self, param: Tensor, groups: int | None = None) -> tuple[Tensor, Tensor]:
        """Return int8 codes in the shape of `param`, and the scale of each group; as few groups of whole eights as fit if `groups` is None."""
        least = -(-param.numel() // _GROUP)
        groups = groups or next(count for count in itertools.count(least) if param.numel() % (8 * count) == 0)
        module = self.quantizer_cuda_module
        codes, scale = module.quantize(param.half(), groups, 8, module.Symmetric)
        return codes, scale

    def dequantize(self, quantized_param: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of codes, in fp16 unless told."""
        module = self.quantizer_cuda_module
        values: Tensor = module.dequantize(quantized_param, scale, scale.numel(), 8, module.Symmetric)
        return values.to(dtype or values.dtype)
