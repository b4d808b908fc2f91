"""How numbers are quantized, as data: formats of codes, groups, the layout of one buffer, the order of a swizzle.

Words. A *code* is a small integer that stands for one element. A *group* is a run of elements of one row that share
parameters: a scale, and a zero point if asymmetric. A *row* is quantized on its own: groups start anew with every row,
so that a row can be sent, received or read alone. The *wire* is one uint8 buffer that holds codes and parameters of all
rows: nothing else travels.

Formulas, all in fp32 (x a group's elements, c their codes, r rounding):

- integers of b bits, symmetric: scale = max|x| / (2^(b-1) - 1); c = r(x / scale); x' = c * scale.
- integers, asymmetric: lo = min(x, 0), hi = max(x, 0); scale = (hi - lo) / (2^b - 1); zero = round(-lo / scale);
  c = r(x / scale) + zero; x' = (c - zero) * scale.
- floats: scale = max|x| / (largest value of the format); c = the format's nearest value to x / scale, subnormals included.

Division by the scale is a multiplication by its rounded inverse; a scale is at least 2^-126. Codes are clamped to the
format's range. Exact zero stays exact zero in every format, with stochastic rounding too. A group that holds an infinity
or a NaN comes back as NaN throughout, so that an overflow is seen in the result.
Sources: OCP 8-bit and MX formats (e4m3fn, e5m2, e3m2, e2m3, e2m1); ZeRO++ (Wang et al. 2023) for groups and swizzle.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_config.errors import KernelError

__all__ = [
    "FP4_E2M1",
    "FP6_E2M3",
    "FP6_E3M2",
    "FP8_E4M3",
    "FP8_E5M2",
    "INT4",
    "INT8",
    "Draw",
    "Format",
    "QuantSpec",
    "QuantTensor",
    "Rounding",
    "Swizzle",
    "WireLayout",
]


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of code. Integers have mantissa -1; floats a sign bit, bits - 1 - mantissa exponent bits, and a bias.

    max_code: the code of the largest value: 127, 7, or below the codes that fp8 keeps for infinity and NaN.
    maximum: the value of `max_code` at scale 1.
    """

    name: str
    bits: int
    mantissa: int
    bias: int
    max_code: int
    maximum: float

    @property
    def is_float(self) -> bool:
        return self.mantissa >= 0


INT8 = Format("int8", 8, -1, 0, 127, 127.0)
INT4 = Format("int4", 4, -1, 0, 7, 7.0)
FP8_E4M3 = Format("fp8_e4m3", 8, 3, 7, 0x7E, 448.0)
FP8_E5M2 = Format("fp8_e5m2", 8, 2, 15, 0x7B, 57344.0)
FP6_E3M2 = Format("fp6_e3m2", 6, 2, 3, 0x1F, 28.0)
FP6_E2M3 = Format("fp6_e2m3", 6, 3, 1, 0x1F, 7.5)
FP4_E2M1 = Format("fp4_e2m1", 4, 1, 1, 0x7, 6.0)


class Rounding(enum.Enum):
    """NEAREST rounds halves to even. STOCHASTIC rounds up with the probability of the remainder: right on average."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """How a tensor is quantized.

    group: elements that share parameters; the last group of a row may be shorter. group * bits is whole bytes.

    Raises:
        KernelError: "quant-spec".
    """

    format: Format = INT8
    group: int = 256
    symmetric: bool = True
    rounding: Rounding = Rounding.NEAREST

    def __post_init__(self) -> None:
        bits = self.format.bits
        if self.group < 1 or self.group * bits % 8:
            step = 8 // math.gcd(8, bits)
            raise _refuse(
                f"group {self.group} of {self.format.name} is not a whole number of bytes.",
                f"Use a positive multiple of {step}.",
            )
        if self.format.is_float and not self.symmetric:
            raise _refuse(f"{self.format.name} codes have a sign and no zero point.", "Use symmetric=True.")

    @property
    def num_params(self) -> int:
        """fp32 numbers per group: the scale, and the zero point if asymmetric."""
        return 1 if self.symmetric else 2

    def layout(self, cols: int) -> WireLayout:
        """Return the offsets of the codes and parameters in a row of `cols` elements."""
        groups = -(-cols // self.group)
        code_bytes = -(-cols * self.format.bits // 8)
        params_at = -(-code_bytes // 4) * 4
        return WireLayout(cols, groups, code_bytes, params_at, params_at + 4 * groups * self.num_params)


@dataclass(frozen=True, slots=True)
class WireLayout:
    """One row of the wire: [code_bytes of packed codes, padding to 4, fp32 parameters [groups, 1 or 2]].

    Codes are packed from the lowest bits of the first byte on; 6-bit codes cross bytes.
    """

    cols: int
    groups: int
    code_bytes: int
    params_at: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Draw:
    """The random numbers of stochastic rounding: element i of the input uses number `offset + i` of sequence `seed`.

    They depend on nothing else, so a shard that gives its place in the whole as `offset` rounds as the whole does.
    """

    seed: int = 0
    offset: int = 0

    @property
    def keys(self) -> tuple[int, int]:
        """Two 32-bit keys from the seed, by the splitmix64 finalizer (Steele et al. 2014)."""
        mask = (1 << 64) - 1
        z = (self.seed + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        return z & 0xFFFFFFFF, z >> 32


@dataclass(frozen=True, slots=True)
class Swizzle:
    """The order of rows for ZeRO++'s hierarchical all-to-all (qgZ) over `nodes` of `local` ranks each.

    The input is one partition per rank (rank = node * local + index), each cut into `slices` rows, partition-major. The
    wire has, for each slice, the rows of all ranks with index 0 in order of node, then index 1, and so on:
    wire row = slice * nodes * local + index * nodes + node. Within one slice the first all-to-all, inside the node, sends
    equal contiguous parts (`nodes` rows to every local index); after the reduction over local ranks the second one, across
    nodes, does too (one row to every node).
    """

    nodes: int
    local: int
    slices: int = 1

    def __post_init__(self) -> None:
        if min(self.nodes, self.local, self.slices) < 1:
            raise _refuse(f"{self} has a size below 1.", "Give positive numbers of nodes, ranks a node and slices.")

    @property
    def rows(self) -> int:
        return self.nodes * self.local * self.slices

    def order(self) -> list[int]:
        """Return the wire row of each input row."""
        world = self.nodes * self.local
        return [
            piece * world + index * self.nodes + node
            for node in range(self.nodes)
            for index in range(self.local)
            for piece in range(self.slices)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """Quantized rows, all in one buffer.

    Args:
        wire: uint8 [rows, layout.row_bytes], contiguous: what a collective sends. Every row stands alone.
        spec: how the rows were quantized.
        cols: elements of one row.
        shape: of the tensor that `dequantize` returns; its numel is rows * cols.
        dtype: of the tensor that `dequantize` returns by default.

    Raises:
        KernelError: "quant-wire" if the wire has another dtype, size or layout.
    """

    wire: Tensor
    spec: QuantSpec
    cols: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: WireLayout = field(init=False)

    def __post_init__(self) -> None:
        layout = self.spec.layout(self.cols)
        object.__setattr__(self, "layout", layout)
        w = self.wire
        shaped = w.dim() == 2 and w.shape[1] == layout.row_bytes and w.is_contiguous()
        if not shaped or w.dtype is not torch.uint8 or w.storage_offset() % 4:
            raise KernelError(
                f"the wire of {self.spec.format.name} rows of {self.cols} elements in groups of {self.spec.group} is uint8"
                f" [rows, {layout.row_bytes}], contiguous, at a multiple of 4 bytes; found {list(w.shape)} {w.dtype},"
                f" strides {tuple(w.stride())}, offset {w.storage_offset()}.",
                code="quant-wire",
                fix="Allocate it with QuantTensor.empty(...), and use the same spec at both ends.",
            )
        if math.prod(self.shape) != self.rows * self.cols:
            raise KernelError(
                f"shape {self.shape} has not the {self.rows} x {self.cols} elements of the wire.",
                code="quant-wire",
                fix="Pass the shape of the tensor that was quantized.",
            )

    @classmethod
    def empty(
        cls, spec: QuantSpec, rows: int, cols: int, *, like: Tensor, shape: Sequence[int] | None = None
    ) -> QuantTensor:
        """Allocate uninitialised rows on the device of `like`, which also gives the dtype to dequantize to."""
        wire = torch.empty(rows, spec.layout(cols).row_bytes, dtype=torch.uint8, device=like.device)
        return cls(wire, spec, cols, tuple(shape) if shape is not None else (rows, cols), like.dtype)

    @property
    def rows(self) -> int:
        return self.wire.shape[0]

    @property
    def codes(self) -> Tensor:
        """uint8 [rows, code_bytes]: a view."""
        return self.wire[:, : self.layout.code_bytes]

    @property
    def params(self) -> Tensor:
        """fp32 [rows, groups, 1 or 2]: a view; the scale first."""
        if self.layout.groups == 0:
            return torch.empty(self.rows, 0, self.spec.num_params, device=self.wire.device)
        flat = self.wire[:, self.layout.params_at :].view(torch.float32)
        return flat.view(self.rows, self.layout.groups, self.spec.num_params)

    @property
    def nbytes(self) -> int:
        return self.wire.numel()


def _refuse(message: str, fix: str) -> KernelError:
    return KernelError(message, code="quant-spec", fix=fix)
