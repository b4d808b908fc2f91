"""Floating-point quantization of weights behind the calls that DeepSpeed's `FP_Quantize` users know.

Differences, on purpose: exact zero stays zero, subnormals exist, values outside the format are impossible (the scale is
taken from the group's largest), rounding is to nearest even or properly stochastic, and the result is a `QuantTensor`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_config.errors import UnsupportedError
from ds_ops.formats import (
    FP4_E2M1,
    FP6_E2M3,
    FP6_E3M2,
    FP8_E4M3,
    FP8_E5M2,
    Draw,
    Format,
    QuantSpec,
    QuantTensor,
    Rounding,
)
from ds_ops.quant import dequantize, quantize

__all__ = ["FPQuantizer", "float_format"]

_FORMATS = {(f.bits, f.mantissa): f for f in (FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, FP4_E2M1)}


def float_format(bits: int, mantissa_bits: int) -> Format:
    """Return the float format with `bits` bits in all and `mantissa_bits` in the significand.

    Raises:
        UnsupportedError: "quant-format" for a combination that does not exist here.
    """
    if (bits, mantissa_bits) not in _FORMATS:
        known = ", ".join(f"({b}, {m})" for b, m in _FORMATS)
        raise UnsupportedError(
            f"no float format of {bits} bits with {mantissa_bits} mantissa bits; (bits, mantissa): {known}.",
            code="quant-format",
            fix="Use one of these, or int8/int4 codes (ds_ops.quant).",
        )
    return _FORMATS[bits, mantissa_bits]


class FPQuantizer:
    """Quantizes weights [out, ...] to fp8, fp6 or fp4; every row on its own, in groups of `group_size` elements."""

    def __init__(self, group_size: int = 512) -> None:
        self.group_size = group_size

    def quantize(
        self, x: Tensor, q_bits: int = 8, q_mantissa_bits: int = 3, *, stochastic_mode: bool = False, seed: int = 0
    ) -> QuantTensor:
        """Quantize x (contiguous fp32, bf16, fp16) by rows, its first dimension; fewer than two dims are a single row.

        Raises:
            UnsupportedError: "quant-format". KernelError: "kernel-argument".
        """
        rounding = Rounding.STOCHASTIC if stochastic_mode else Rounding.NEAREST
        spec = QuantSpec(float_format(q_bits, q_mantissa_bits), self.group_size, rounding=rounding)
        return quantize(x, spec, rows=x.shape[0] if x.dim() > 1 else 1, draw=Draw(seed))

    def dequantize(self, q: QuantTensor, *, fp_out: Tensor | None = None) -> Tensor:
        """Dequantize to the shape and dtype of the quantized tensor, or into `fp_out`."""
        return dequantize(q, out=fp_out)

    def selective_dequantize(self, q: QuantTensor, indexes: Tensor) -> Tensor:
        """Dequantize only the rows `indexes` (int64 [k]) to [k, ...]. Reads only their codes."""
        return dequantize(q, rows=indexes).view(indexes.numel(), *q.shape[1:])

    def get_scales(self, q: QuantTensor) -> Tensor:
        """Return the scales of the codes, fp32 [rows, groups]. A view."""
        return q.params[..., 0]

    def to_float8(self, q: QuantTensor) -> Tensor:
        """Return the codes of an fp8 tensor in torch's dtype, [rows, cols], unscaled, for scaled matrix products."""
        dtypes = {FP8_E4M3: torch.float8_e4m3fn, FP8_E5M2: torch.float8_e5m2}
        if q.spec.format not in dtypes:
            raise UnsupportedError(
                f"torch has no dtype for {q.spec.format.name} codes.",
                code="quant-format",
                fix="Quantize to 8 bits, or dequantize.",
            )
        return q.codes.contiguous().view(dtypes[q.spec.format])
