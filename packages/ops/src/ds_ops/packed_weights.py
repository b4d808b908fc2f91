"""Weights as the native products read them: units of 32 outputs, in the order of the loop that multiplies them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_ops import _call
from ds_ops.formats import INT4, INT8, QuantTensor
from ds_ops.host_arena import zeros_huge

__all__ = ["UNIT", "PackedWeight", "ProductInputs", "address", "pack"]

UNIT = 32
_KINDS = {torch.float32: 0, torch.bfloat16: 1}


class ProductInputs(enum.IntEnum):
    """What weights are multiplied with: fp32 inputs; codes, with inputs rounded to 8 bits by row and group; bf16, with bf16."""

    F32 = 0
    INT8 = 1
    BF16 = 2


def address(t: Tensor | None) -> int:
    """Return the address of the first element; 0 for None."""
    return 0 if t is None else _call.address(t)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix as the native products read it. Made by `pack`.

    Attributes:
        data: The weights, in units of 32 outputs.
        params: fp32 [units, groups, 2, 32], scales and zero points; None: floats.
        bias: fp32 [n].
        outputs, inner: That were packed, [outputs, inner]; n is a multiple of 32, k of 8.
        gated: Units of the two halves alternate.
    """

    data: Tensor
    params: Tensor | None
    bias: Tensor | None
    outputs: int
    n: int
    k: int
    group: int
    kind: int
    inputs: ProductInputs
    inner: int
    gated: bool

    def words(self) -> tuple[int, ...]:
        """Return the fields of the native struct `Matrix`."""
        return (
            address(self.data),
            address(self.params),
            address(self.bias),
            self.n,
            self.k,
            self.group,
            self.kind,
            int(self.inputs),
        )


def pack(
    weight: Tensor | QuantTensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    inputs: ProductInputs = ProductInputs.F32,
) -> PackedWeight:
    """Pack a matrix.

    Args:
        weight: [N, K], fp32, bf16, or int8 or int4 codes with groups that are multiples of 8.
        gated: Its halves are gate and value: their units alternate.
        inputs: INT8 for codes, BF16 for bf16, F32 for all.
    Raises:
        KernelError: "kernel-argument" for other weights.
    Cost: two copies of the matrix in passing; the result has its size, padded to whole units and inputs in eights, in huge pages
        where there are some.
    """
    if isinstance(weight, Tensor):
        kind, group, params = _KINDS.get(weight.dtype, -1), weight.shape[-1], None
        allowed: tuple[ProductInputs, ...] = (
            (ProductInputs.F32, ProductInputs.BF16) if kind == 1 else (ProductInputs.F32,)
        )
    else:
        kind = {INT8: 2, INT4: 3}.get(weight.spec.format, -1)
        group, allowed = weight.spec.group, (ProductInputs.F32, ProductInputs.INT8)
        params = None if kind < 0 else _units(_params(weight), gated)
    if kind < 0 or len(weight.shape) != 2 or inputs not in allowed or (kind >= 2 and group % 8):
        raise _call.refuse(
            f"a weight {list(weight.shape)} of {weight.dtype if isinstance(weight, Tensor) else weight.spec} and {inputs!r}"
            " inputs cannot be packed.",
            "Give [N, K] of fp32, bf16, or int8 or int4 codes in groups of a multiple of 8.",
        )
    home = weight.device if isinstance(weight, Tensor) else weight.wire.device
    if home.type != "cpu":
        raise _call.refuse(f"a weight on {home} cannot be packed.", "Pack on the CPU: the layer loop runs there.")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.device != home or not bias.is_floating_point()):
        raise _call.refuse(f"bias: expected [{weight.shape[0]}] beside the weight; found {_call.describe(bias)}.")
    numbers = weight if isinstance(weight, Tensor) else _codes(weight)
    rows = _units(F.pad(numbers.detach(), (0, -numbers.shape[1] % 8)), gated)
    units, _, k = rows.shape
    if kind == 0:
        data = rows.permute(0, 2, 1)
    elif kind == 1:
        data = rows.view(units, UNIT, k // 2, 2).permute(0, 2, 1, 3)
    elif kind == 2:
        data = rows.view(units, UNIT, k // 4, 4).permute(0, 2, 1, 3)
    else:
        pairs = rows.view(units, UNIT, k // 8, 2, 4)
        data = (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).permute(0, 2, 1, 3)
    if params is not None:
        params = params.permute(0, 2, 3, 1).contiguous()
    wide = None if bias is None else _units(bias.detach().float()[:, None], gated).flatten().contiguous()
    outputs = weight.shape[0]
    (room,) = zeros_huge([data.numel()], data.dtype)  # small pages cost a tenth of the bandwidth of one row
    room.view(data.shape).copy_(data)
    return PackedWeight(
        room, params, wide, outputs, units * UNIT, k, max(group, 8), kind, inputs, weight.shape[1], gated
    )


def _units(rows: Tensor, gated: bool) -> Tensor:
    """Pack [N, ...] into [units, 32, ...], padded with zeros; units of the two halves alternate if gated."""
    parts = rows.chunk(2) if gated else (rows,)
    padded = [torch.cat([p, p.new_zeros(-p.shape[0] % UNIT, *p.shape[1:])]) for p in parts]
    cut = [p.view(-1, UNIT, *p.shape[1:]) for p in padded]
    return torch.stack(cut, 1).flatten(0, 1) if gated else cut[0]


def _codes(weight: QuantTensor) -> Tensor:
    """Return the codes as unsigned uint8 [N, K]."""
    codes = weight.codes
    if weight.spec.format == INT4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)[:, : weight.cols]
    if weight.spec.symmetric:
        half = 8 if weight.spec.format == INT4 else 128
        codes = codes ^ half
    return codes


def _params(weight: QuantTensor) -> Tensor:
    """Return the scale and the zero point of each group, fp32 [N, groups, 2]."""
    params = weight.params
    if weight.spec.symmetric:
        half = 8.0 if weight.spec.format == INT4 else 128.0
        params = torch.cat([params, torch.full_like(params, half)], -1)
    return params
