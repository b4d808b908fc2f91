"""Codes in the layouts of torch's products, and these products. What runs is `ds_ops.product_choice`'s to say; here the work is done.

Packing loses nothing: `PackedCodes.unpacked` gives the same `QuantTensor` back, to the bit. It takes the place of that tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_ops.formats import FP8_E4M3, QuantSpec, QuantTensor
from ds_ops.product_choice import CodeLayout
from ds_ops.quant import dequantize

__all__ = ["PackedCodes", "holds_bf16_params", "pack_codes", "product_of_groups", "product_of_packed", "round_to_fp8"]

_LARGEST = FP8_E4M3.maximum
_PANEL = 1 << 24  # numbers that are made at once


@dataclass(frozen=True, slots=True, eq=False)
class PackedCodes:
    """A quantized weight [N, K] or [E, N, K] as a product of torch reads it, see `CodeLayout`.

    Attributes:
        codes: ROWS: int8 (int8), uint8 (other integers), or e4m3 [rows, K]. TINYGEMM: as torch packs them.
        params: ROWS: fp32 [groups, rows]. TINYGEMM: bf16 [groups, rows, 2], scales, and what is added after (code - 8) * scale.
        spec, cols, shape, dtype: Those of the `QuantTensor`.
        rounded: Products round their inputs to fp8, by row and group.
    """

    codes: Tensor
    params: Tensor
    spec: QuantSpec
    cols: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: CodeLayout
    rounded: bool = False

    @property
    def rows(self) -> int:
        return self.params.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def unpacked(self) -> QuantTensor:
        """Return the codes as they were before they were packed. Cost: a copy; of TINYGEMM, 8 bytes a code meanwhile."""
        whole = QuantTensor.empty(
            self.spec, self.rows, self.cols, like=torch.empty(0, dtype=self.dtype, device=self.device), shape=self.shape
        )
        whole.wire.zero_()
        if self.layout is CodeLayout.ROWS:
            whole.codes.copy_(self.codes.view(torch.uint8))
            whole.params[..., 0] = self.params.t()
            return whole
        scale, added = (part.t().float() for part in self.params.unbind(-1))
        codes = _from_tinygemm(self.codes, self.rows, self.cols)
        whole.codes.copy_(codes if not self.spec.symmetric else codes ^ 0x88)
        whole.params[..., 0] = scale
        if not self.spec.symmetric:
            whole.params[..., 1] = (8 - added / scale).round()
        return whole

    def moved(self, device: torch.device | str) -> PackedCodes:
        """Copy the codes to `device`, which has to be of the same kind for TINYGEMM."""
        return PackedCodes(
            self.codes.to(device), self.params.to(device), self.spec, self.cols, self.shape, self.dtype, self.layout, self.rounded
        )  # fmt: skip


def holds_bf16_params(weight: QuantTensor) -> bool:
    """Whether bf16 holds the scales, and zero points times scales, of 4-bit codes. Reads the device once."""
    added = _added(weight)
    exact = (part == part.bfloat16().float() for part in (weight.params[..., 0], added))
    back = weight.spec.symmetric or bool(((8 - added / weight.params[..., 0]).round() == weight.params[..., -1]).all())
    return back and all(bool(part.all()) for part in exact)


def _added(weight: QuantTensor) -> Tensor:
    """Compute what tinygemm adds to (code - 8) * scale: (8 - zero point) * scale, fp32 [rows, groups]."""
    scale = weight.params[..., 0]
    return torch.zeros_like(scale) if weight.spec.symmetric else (8 - weight.params[..., 1]) * scale


def pack_codes(weight: QuantTensor, layout: CodeLayout, *, rounded: bool = False) -> PackedCodes:
    """Pack the codes into another layout, ROWS for formats of one byte without zero points, TINYGEMM for int4."""
    if layout is CodeLayout.ROWS:
        kind = torch.float8_e4m3fn if weight.spec.format == FP8_E4M3 else torch.int8
        codes = weight.codes.contiguous().view(kind)
        params = weight.params[..., 0].t().contiguous()
    else:
        codes = _to_tinygemm((weight.codes ^ 0x88 if weight.spec.symmetric else weight.codes).contiguous(), weight.cols)
        both = torch.stack([weight.params[..., 0], _added(weight)], -1)
        params = both.transpose(0, 1).bfloat16().contiguous()
    return PackedCodes(codes, params, weight.spec, weight.cols, weight.shape, weight.dtype, layout, rounded)


def _to_tinygemm(codes: Tensor, cols: int) -> Tensor:
    """Pack bytes of 4-bit codes [N, K / 2], the first of two in the low bits, without signs."""
    if codes.device.type == "cuda":
        tiles = next(n for n in (8, 4, 2) if cols % (16 * n) == 0)
        return torch._convert_weight_to_int4pack((codes << 4) | (codes >> 4), tiles)
    wide = torch.stack([codes & 15, codes >> 4], -1).flatten(1).to(torch.int32)
    return torch._convert_weight_to_int4pack_for_cpu(wide, 1)


def _from_tinygemm(packed: Tensor, rows: int, cols: int) -> Tensor:
    """Compute the bytes of 4-bit codes [N, K / 2] that `_to_tinygemm` packed.

    torch has no inverse: the numbers of all places, four bits at a time, are packed like codes, and say where each one went.
    """
    places = torch.arange(rows * cols, device=packed.device).view(rows, cols)
    came_from = torch.zeros(rows * cols, dtype=torch.int64, device=packed.device)
    for shift in range(0, (rows * cols - 1).bit_length(), 4):
        digits = ((places >> shift) & 15).to(torch.uint8)
        came_from |= _nibbles(_to_tinygemm(digits[:, 0::2] | (digits[:, 1::2] << 4), cols)).long() << shift
    codes = torch.empty(rows * cols, dtype=torch.uint8, device=packed.device)
    codes[came_from] = _nibbles(packed)
    codes = codes.view(rows, cols)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _nibbles(packed: Tensor) -> Tensor:
    flat = packed.contiguous().view(torch.uint8).flatten()
    return torch.stack([flat & 15, flat >> 4], -1).flatten()


# ---- products


def round_to_fp8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round rows [M, K] to e4m3 codes with a scale for each group of `group` inputs, or for a row.

    Returns: Codes [M, K], and scales fp32 [M, groups] whose columns are contiguous.
    """
    inputs = x.shape[1]
    groups = -(-inputs // group)
    wide = F.pad(x.float(), (0, groups * group - inputs)) if groups > 1 else x.float()
    parts = wide.view(len(x), groups, wide.shape[1] // groups)
    most = parts.abs().amax(-1)
    scales = torch.where(most > 0, most / _LARGEST, 1.0)
    codes = (parts / scales.unsqueeze(-1)).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return codes.view(len(x), -1).narrow(1, 0, inputs).contiguous(), scales.t().contiguous().t()


def _scaled_by_row(x: Tensor, weight: PackedCodes) -> Tensor:
    codes, scales = round_to_fp8(x, weight.cols)
    scale = scales.contiguous()
    return torch._scaled_mm(codes, weight.codes.t(), scale_a=scale, scale_b=weight.params, out_dtype=x.dtype)


def _scaled_by_block(x: Tensor, weight: PackedCodes) -> Tensor:
    rows = len(x)
    whole = F.pad(x, (0, 0, 0, -rows % 16))  # cuBLAS reads columns of scales in 16 bytes
    codes, scales = round_to_fp8(whole, weight.spec.group)
    y = torch._scaled_mm(codes, weight.codes.t(), scale_a=scales, scale_b=weight.params, out_dtype=x.dtype)
    return y.narrow(0, 0, rows)


def _int4pack(x: Tensor, weight: PackedCodes) -> Tensor:
    multiply = torch._weight_int4pack_mm if x.is_cuda else torch._weight_int4pack_mm_for_cpu
    return multiply(x.contiguous(), weight.codes, weight.spec.group, weight.params)


def _int8pack(x: Tensor, weight: PackedCodes) -> Tensor:
    y = torch._weight_int8pack_mm(
        x.float().contiguous(), weight.codes, weight.params[0]
    )  # its CUDA kernel computes fp32
    return y.to(x.dtype)


def _numbers(x: Tensor, weight: PackedCodes) -> Tensor:
    """Make numbers of codes, some rows at a time, and multiply. Rounded inputs are multiplied in fp32, as products of codes are."""
    wide = _as_rounded(x, weight)
    if weight.layout is CodeLayout.TINYGEMM:
        return (wide @ dequantize(weight.unpacked(), dtype=wide.dtype).t()).to(x.dtype)
    step, parts = max(64, _PANEL // weight.cols), []
    for first in range(0, weight.rows, step):
        codes, params = weight.codes[first : first + step], weight.params[:, first : first + step]
        part = PackedCodes(
            codes, params, weight.spec, weight.cols, (len(codes), weight.cols), weight.dtype, weight.layout
        )
        parts.append(wide @ dequantize(part.unpacked(), dtype=wide.dtype).t())
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).to(x.dtype)


def _as_rounded(x: Tensor, weight: PackedCodes) -> Tensor:
    if not weight.rounded:
        return x
    group = min(weight.spec.group, weight.cols)
    codes, scales = round_to_fp8(x, group)
    return codes.float() * scales.repeat_interleave(group, 1)[:, : weight.cols]


_PRODUCTS: dict[str, Callable[[Tensor, PackedCodes], Tensor]] = {
    "scaled_mm by row": _scaled_by_row,
    "scaled_mm by block": _scaled_by_block,
    "int4pack_mm": _int4pack,
    "int8pack_mm": _int8pack,
    "numbers": _numbers,
}


def product_of_packed(name: str, x: Tensor, weight: PackedCodes) -> Tensor:
    """Compute x @ weight^T by the named entry of `PRODUCTS`, [M, K] to [M, N] of x's dtype; valid on the current stream."""
    return _PRODUCTS[name](x, weight)


def product_of_groups(name: str, x: Tensor, weights: PackedCodes, ends: Tensor) -> Tensor:
    """Multiply rows [T, K] sorted by expert, each group by its matrix of [E, N, K], by the named entry of `EXPERT_PRODUCTS`.

    Returns: [T, N] of x's dtype, zeros past the last end; valid on the current stream.
    """
    experts, outputs, inputs = weights.shape
    if name == "scaled_grouped_mm":
        codes, scales = round_to_fp8(x, inputs)
        matrices = weights.codes.view(experts, outputs, inputs).transpose(1, 2)
        scale_b, offsets = weights.params.view(experts, outputs), ends.to(torch.int32)
        y = torch._scaled_grouped_mm(
            codes, matrices, scales.reshape(-1), scale_b, offs=offsets, out_dtype=x.dtype, use_fast_accum=False
        )
        place = torch.arange(len(x), device=x.device, dtype=torch.int32)
        return y.masked_fill_((place >= offsets[-1])[:, None], 0)  # which hold whatever the memory held
    out, start = x.new_zeros(len(x), outputs), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            rows = slice(expert * outputs, (expert + 1) * outputs)
            one = PackedCodes(
                weights.codes[rows], weights.params[:, rows], weights.spec, inputs, (outputs, inputs), weights.dtype,
                weights.layout, weights.rounded,
            )  # fmt: skip
            out[start:end] = _numbers(x[start:end], one)
        start = end
    return out
