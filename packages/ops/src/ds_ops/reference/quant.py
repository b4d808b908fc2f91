"""Groupwise quantization in plain torch: the definition of `ds_ops.formats` in executable form.

Every function takes [rows, cols] fp32 tensors and works on all groups at once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ds_ops.formats import Draw, Format, QuantSpec, QuantTensor, Rounding

__all__ = ["decode", "dequantize", "encode", "pack", "quantize", "reduce", "reduce_quantized", "uniform", "unpack"]

_SMALLEST_SCALE = 2.0**-126
_MASK = 0xFFFFFFFF


@functools.lru_cache(maxsize=64)
def places(order: tuple[int, ...], device: torch.device) -> Tensor:
    """Copy an order of rows to the device, int64, and cache the tensor: a step uses few orders repeatedly."""
    return torch.tensor(order, dtype=torch.int64, device=device)


def quantize(q: QuantTensor, x: Tensor, order: list[int] | None, draw: Draw) -> None:
    """Fill the wire of `q` from x [rows, cols] of any float dtype; input row r goes to row order[r]."""
    rows, spec = q.rows, q.spec
    grouped = _in_groups(x.detach().float(), spec)
    scale, zero, inverse = _parameters(grouped, spec)
    noise = None
    if spec.rounding is Rounding.STOCHASTIC:
        index = torch.arange(rows * q.cols, device=x.device).view(rows, q.cols) + draw.offset
        noise = _in_groups(uniform(index, draw), spec)
    codes = encode(grouped * inverse, spec, noise)
    if not spec.symmetric:
        codes = (codes + zero.long()).clamp(0, 2**spec.format.bits - 1)
    codes = torch.where(scale.isnan(), torch.zeros_like(codes), codes)
    codes = codes.flatten(1)[:, : q.cols]
    params = scale if spec.symmetric else torch.cat((scale, zero), dim=-1)
    place = places(tuple(order), x.device) if order is not None else torch.arange(rows, device=x.device)
    q.wire.zero_()
    q.codes[place] = pack(codes, spec.format.bits)
    q.params[place] = params


def dequantize(q: QuantTensor, rows: Tensor | None, out: Tensor) -> None:
    """Write the values of the given rows (all: None) to out [rows, cols], rounded to its dtype."""
    wire = q.wire if rows is None else q.wire[rows]
    out.copy_(_values(QuantTensor(wire, q.spec, q.cols, (wire.shape[0], q.cols))))


def reduce(q: QuantTensor, sources: int, factor: float, out: Tensor) -> None:
    """Compute out [rows / sources, cols] = factor * sum over sources, added in fp32 in their order."""
    first, *others = _values(q).view(sources, q.rows // sources, q.cols)
    for part in others:
        first = first + part
    out.copy_(first if factor == 1.0 else first * factor)


def reduce_quantized(q: QuantTensor, sources: int, factor: float, out: QuantTensor, draw: Draw) -> None:
    """Reduce the sources as `reduce` does, and quantize the sum again."""
    dense = torch.empty(out.rows, out.cols, device=q.wire.device)
    reduce(q, sources, factor, dense)
    quantize(out, dense, None, draw)


def _in_groups(x: Tensor, spec: QuantSpec) -> Tensor:
    """View [rows, cols] as [rows, groups, group], with zeros that fill the last group.

    The zeros change neither range nor codes.
    """
    rows, cols = x.shape
    groups = -(-cols // spec.group)
    return torch.nn.functional.pad(x, (0, groups * spec.group - cols)).view(rows, groups, spec.group)


def _parameters(grouped: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, zero point and inverse of the scale, each [rows, groups, 1]. The scale of a group not finite is NaN."""
    magnitude = grouped.abs().amax(-1, keepdim=True)
    if spec.symmetric:
        scale = magnitude / spec.format.maximum
        zero = torch.zeros_like(scale)
    else:
        levels = float(2**spec.format.bits - 1)
        scale = (
            grouped.amax(-1, keepdim=True).clamp(min=0) / levels - grouped.amin(-1, keepdim=True).clamp(max=0) / levels
        )
        zero = torch.zeros_like(scale)
    scale = scale.clamp(min=_SMALLEST_SCALE)
    inverse = 1 / scale
    if not spec.symmetric:
        zero = torch.round(-grouped.amin(-1, keepdim=True).clamp(max=0) * inverse) + 0.0  # no negative zero
    broken = ~torch.isfinite(magnitude)
    scale = torch.where(broken, torch.full_like(scale, torch.nan), scale)
    return (
        scale,
        torch.where(broken, torch.zeros_like(zero), zero),
        torch.where(broken, torch.zeros_like(inverse), inverse),
    )


def uniform(index: Tensor, draw: Draw) -> Tensor:
    """Draw fp32 in (-1/2, 1/2), odd multiples of 2^-25, from int64 indices.

    Uses the 32-bit mixing function "lowbias32" with a key before and a key between its multiplications.
    """
    first, second = draw.keys
    low, high = index & _MASK, (index >> 32) & _MASK
    x = low ^ first
    x = ((x ^ (x >> 16)) * 0x7FEB352D + second + high * 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    signed = (x ^ (x >> 16)).int() >> 8
    return (signed.float() + 0.5) * 2.0**-24


def encode(y: Tensor, spec: QuantSpec, noise: Tensor | None) -> Tensor:
    """Encode scaled values as int64 codes.

    Codes of asymmetric integers lack the zero point, which the caller adds.
    """
    if spec.format.is_float:
        return _float_codes(y, spec.format, noise)
    whole = _rounded(y, noise)
    if not spec.symmetric:
        return whole
    return whole.clamp(-spec.format.max_code, spec.format.max_code) & (2**spec.format.bits - 1)


def _rounded(y: Tensor, noise: Tensor | None) -> Tensor:
    whole = torch.round(y if noise is None else y + noise)
    return torch.nan_to_num(whole).long()


def _float_codes(y: Tensor, f: Format, noise: Tensor | None) -> Tensor:
    """Encode floats: round |y| in units of the format's spacing at |y|.

    With subnormals and carries, codes then just count upwards.
    """
    bits = y.contiguous().view(torch.int32).long()
    magnitude = bits & 0x7FFFFFFF
    lowest = 128 - f.bias
    exponent = (magnitude >> 23).clamp(min=lowest, max=254)
    units = y.abs() * _power_of_two(127 + f.mantissa - exponent)
    codes = _rounded(units, noise) + ((exponent - lowest) << f.mantissa)
    return codes.clamp(max=f.max_code) | (((bits >> 31) & 1) << (f.bits - 1))


def _power_of_two(exponent: Tensor) -> Tensor:
    """Compute fp32 2^exponent for int64 exponents in [-126, 127], exactly.

    Torch's pow and ldexp may be one ulp off.
    """
    return ((exponent + 127) << 23).int().view(torch.float32)


def decode(codes: Tensor, spec: QuantSpec, zero: Tensor) -> Tensor:
    """Decode codes into fp32 values at scale 1."""
    f = spec.format
    if f.is_float:
        magnitude = codes & (2 ** (f.bits - 1) - 1)
        fraction, exponent = magnitude & (2**f.mantissa - 1), magnitude >> f.mantissa
        significand = torch.where(exponent > 0, fraction + 2**f.mantissa, fraction).float()
        value = significand * _power_of_two(exponent.clamp(min=1) - f.bias - f.mantissa)
        return torch.where(codes >> (f.bits - 1) > 0, -value, value)
    if spec.symmetric:
        return torch.where(codes >= 2 ** (f.bits - 1), codes - 2**f.bits, codes).float()
    return codes.float() - zero


def _values(q: QuantTensor) -> Tensor:
    """Dequantize to fp32 [rows, cols]."""
    codes = unpack(q.codes, q.spec.format.bits, q.cols)
    params = q.params.repeat_interleave(q.spec.group, dim=1)[:, : q.cols]
    zero = torch.zeros_like(params[..., 0]) if q.spec.symmetric else params[..., 1]
    return decode(codes, q.spec, zero) * params[..., 0]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack [rows, n] codes into uint8 [rows, ceil(n * bits / 8)]: a stream of bits, the first element lowest."""
    rows, n = codes.shape
    run, run_bytes = {4: (2, 1), 6: (4, 3), 8: (1, 1)}[bits]
    padded = torch.nn.functional.pad(codes, (0, -n % run)).view(rows, -(-n // run), run)
    words = sum((padded[..., k] << (bits * k) for k in range(run)), torch.zeros_like(padded[..., 0]))
    spread = torch.stack([(words >> (8 * b)) & 0xFF for b in range(run_bytes)], dim=-1)
    return spread.flatten(1)[:, : -(-n * bits // 8)].to(torch.uint8)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """Unpack the int64 codes [rows, n] that `pack` packed."""
    rows = packed.shape[0]
    run, run_bytes = {4: (2, 1), 6: (4, 3), 8: (1, 1)}[bits]
    runs = -(-packed.shape[1] // run_bytes)
    padded = torch.nn.functional.pad(packed.long(), (0, -packed.shape[1] % run_bytes)).view(rows, runs, run_bytes)
    words = sum((padded[..., b] << (8 * b) for b in range(run_bytes)), torch.zeros_like(padded[..., 0]))
    spread = torch.stack([(words >> (bits * k)) & (2**bits - 1) for k in range(run)], dim=-1)
    return spread.flatten(1)[:, :n]
