"""Codes of 8 bits with an exponent of their own, in blocks: how the moments of an 8-bit optimizer are stored.

The map is that of Dettmers 2015 ("8-Bit Approximations for Parallelism in Deep Learning") as Dettmers et al. 2022 ("8-bit Optimizers via
Block-wise Quantization") use it: seven decades below 1, of which the k-th has 2^k values (signed: with both signs), spaced evenly,
and 0 and 1. A block is 256 elements of the flattened tensor; its values are divided by the largest magnitude in it. Same bytes as
bitsandbytes and torchao.

A running mean v + (1 - b2)(g^2 - v) with b2 = 0.999 moves by less than the spacing of the map, and would stay where it is: its rounding
is dithered (`ds_ops.update_rules.dither_of`), by moving the borders between codes. And no positive number of an unsigned map becomes 0:
a first moment would be divided by epsilon.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import ds_ops._call as _call

__all__ = ["BLOCK", "dequantize_dynamic", "dynamic_map", "quantize_dynamic"]

BLOCK = 256
_DECADES = 7
_CELLS = 1 << 16


@functools.cache
def dynamic_map(signed: bool, device: torch.device = torch.device("cpu")) -> Tensor:  # noqa: B008  # a constant
    """Return the values of the 256 codes, ascending: fp32 [256]."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1, device="cpu")
        means = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)).tolist()
        values += means
        values += [-x for x in means] if signed else []
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu").to(device)


def quantize_dynamic(x: Tensor, *, signed: bool, dither: float = 0.0) -> tuple[Tensor, Tensor]:
    """Quantize to the code nearest to x / max|x| of each block of 256.

    Args:
        x: [n] fp32; the last block may be shorter. Not negative, unless `signed`.
        dither: in [-1/2, 1/2); borders between codes are moved by this share of their distance.
    Returns: uint8 [n] and the largest magnitudes, fp32 [ceil(n / 256)]; valid on the current stream.
    Cost: about 10 passes of torch operations over x.
    """
    _call.require("x", x, dtypes=(torch.float32,))
    blocks = _blocks(x)
    largest = blocks.abs().amax(1)
    scaled = (blocks / largest.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).flatten()[: x.numel()]
    floors, borders = _tables(signed, dither, x.device)
    cells = (scaled.view(torch.int32) >> 16) & (_CELLS - 1)
    floor = floors.index_select(0, cells)
    return (floor + (scaled > borders.index_select(0, floor))).to(torch.uint8), largest


def dequantize_dynamic(codes: Tensor, largest: Tensor, *, signed: bool) -> Tensor:
    """Compute fp32 [n] from the codes uint8 [n] and largest magnitudes of `quantize_dynamic`."""
    values = dynamic_map(signed, codes.device).index_select(0, codes.int())
    blocks = _blocks(values)
    return (blocks * largest.unsqueeze(1)).flatten()[: codes.numel()]


def _blocks(x: Tensor) -> Tensor:
    short = -x.numel() % BLOCK
    return (torch.nn.functional.pad(x, (0, short)) if short else x).view(-1, BLOCK)


@functools.lru_cache(maxsize=8)  # a dithered table serves one step
def _tables(signed: bool, dither: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of borders below each fp32 that has its low 16 bits clear or set, int32 [65536], and the borders, fp32 [256].

    Between two fp32 with the same upper 16 bits there is one border at most, so a table and one comparison find the code.
    """
    values = dynamic_map(signed)
    borders = values[:-1] + (values[1:] - values[:-1]) * (0.5 - dither)
    if not signed:
        borders[0] = 0.0
    order, lowest = _cells()
    first = torch.searchsorted(lowest, borders, right=True)  # the first cell that lies above each border
    floors = torch.empty(_CELLS, dtype=torch.int32, device="cpu")
    floors[order] = torch.bincount(first, minlength=_CELLS + 1)[:_CELLS].cumsum(0).to(torch.int32)
    borders = torch.cat([borders, torch.tensor([torch.inf], device="cpu")])
    return floors.to(device), borders.to(device)


@functools.cache
def _cells() -> tuple[Tensor, Tensor]:
    """Return the upper halves of all fp32 in ascending order of value, int64 [65536], and the least fp32 of each, NaN as infinities."""
    half = _CELLS // 2
    order = torch.cat([torch.arange(_CELLS - 1, half - 1, -1, device="cpu"), torch.arange(half, device="cpu")])
    bits = (order << 16) + torch.where(order >= half, 0xFFFF, 0)
    signed_bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    lowest = signed_bits.view(torch.float32)
    infinity = torch.where(order >= half, -torch.inf, torch.inf)
    return order, torch.where(lowest.isnan(), infinity, lowest)
