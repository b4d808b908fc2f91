"""Which product multiplies with a quantized weight on a device, and in which layout its codes lie: a table, and facts that it is asked with.

A product is torch's own where that reads the codes as they are, else our Triton kernel, else one of numbers. An entry says for facts why it
cannot run, or nothing, and for how many rows it is the better one: few rows are bound by reading codes, many by arithmetic. Codes are in
memory once, so that the layout is chosen when the weight is loaded, by the first entry that takes one row; a call then chooses among the
entries of that layout. The order is by reading torch's kernels and ours, and not measured on a device.

| layout | what it is |
|---|---|
| WIRE | the rows of a `QuantTensor`: codes, then parameters |
| ROWS | codes [rows, K] of one byte, contiguous, and scales fp32 [groups, rows] beside them |
| TINYGEMM | what `_convert_weight_to_int4pack` makes of 4-bit codes, and scales and zeros bf16 [groups, N, 2] |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import torch

from ds_ops.formats import FP4_E2M1, FP8_E4M3, INT4, INT8, Format
from ds_ops.registry import Unavailable

__all__ = [
    "EXPERT_PRODUCTS",
    "GROUPED_MM_MAJORS",
    "PRODUCTS",
    "CodeLayout",
    "DeviceTraits",
    "ProductChoice",
    "ProductEntry",
    "ProductFacts",
    "choose_layout",
    "choose_product",
    "device_traits",
]

_SHIPPED = ("_weight_int8pack_mm", "_weight_int4pack_mm", "_scaled_mm", "_scaled_grouped_mm", "_grouped_mm")
_READABLE = (INT8, INT4, FP8_E4M3, FP4_E2M1)
_TINYGEMM_GROUPS = (32, 64, 128, 256)
_BLOCK = 128
_MANY = 1024
"""Rows from which writing numbers once, and multiplying with these, takes no longer than codes that are decoded again for each 128 rows."""
_FEW = 16
"""Rows of a block of torch's int8 kernel, which has one thread for an output."""
GROUPED_MM_MAJORS: Final = (9, 10)
"""Of compute capabilities: for these torch multiplies all groups in one launch; for others it reads on the host where they end."""
_MOST_NUMBERS: Final = 1 << 30
"""Bytes of numbers of all experts of a layer that are made at once."""


class CodeLayout(Enum):
    """Where codes and parameters of a weight lie; see the module."""

    WIRE = auto()
    ROWS = auto()
    TINYGEMM = auto()


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What decides of a device and of this torch.

    Attributes:
        kind: Type of the device.
        capability: Compute capability; (0, 0) where there is none.
        hip: AMD's.
        cuda: Version of CUDA that torch was built with.
        shipped: Products of torch that have a kernel for the device.
        triton: Why our Triton products do not run there; empty: they do.
    """

    kind: str
    capability: tuple[int, int] = (0, 0)
    hip: bool = False
    cuda: tuple[int, int] = (0, 0)
    shipped: frozenset[str] = frozenset()
    triton: str = ""


@dataclass(frozen=True, slots=True)
class ProductFacts:
    """What is multiplied with, where.

    Attributes:
        format, group, symmetric: Of the codes, see `QuantSpec`.
        outputs, inputs: N and K, of each expert.
        experts: How many matrices there are; 0: one, for all rows.
        dtype: Of x.
        rounded: x is rounded to fp8, too, by row or by groups of it.
        bf16_params: Scales, and zero points times scales, are numbers of bf16, so that nothing is lost where they are kept as such.
    """

    format: Format
    group: int
    symmetric: bool
    outputs: int
    inputs: int
    experts: int
    dtype: torch.dtype
    rounded: bool
    bf16_params: bool
    device: DeviceTraits = field(default_factory=lambda: DeviceTraits("cpu"))

    @property
    def by_row(self) -> bool:
        """Whether a row of the weight has one scale."""
        return self.group >= self.inputs


@dataclass(frozen=True, slots=True)
class ProductEntry:
    """A product.

    Attributes:
        name: Of torch's function, or of ours.
        layouts: Of codes that it reads.
        most_rows: It is the better one up to so many rows of x, of experts up to so many for each; None: for any number.
        asks_host: The host is told how many rows each expert has.
        obstacle: Why it does not run, an `Unavailable`; empty: it does.
    """

    name: str
    layouts: tuple[CodeLayout, ...]
    obstacle: Callable[[ProductFacts], str]
    most_rows: int | None = None
    asks_host: bool = False


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """The entry that runs, the layout of the codes, and why each better entry does not."""

    entry: ProductEntry
    layout: CodeLayout
    rejected: tuple[tuple[str, str], ...]


def choose_layout(facts: ProductFacts) -> ProductChoice:
    """Choose where codes lie: as the first entry reads them that takes one row."""
    return _choose(facts, None, 1)


def choose_product(facts: ProductFacts, layout: CodeLayout, rows: int) -> ProductChoice:
    """Choose the product of `rows` rows with codes in a layout."""
    return _choose(facts, layout, -(-rows // max(1, facts.experts)))


def _choose(facts: ProductFacts, layout: CodeLayout | None, rows: int) -> ProductChoice:
    table = EXPERT_PRODUCTS if facts.experts else PRODUCTS
    rejected: list[tuple[str, str]] = []
    for entry in table[:-1]:
        if layout is not None and layout not in entry.layouts:
            reason = f"does not read codes that lie as {layout.name}"
        elif entry.most_rows is not None and rows > entry.most_rows:
            reason = f"is for {entry.most_rows} rows, here are {rows}"
        else:
            reason = entry.obstacle(facts)
        if not reason:
            return ProductChoice(entry, entry.layouts[0] if layout is None else layout, tuple(rejected))
        rejected.append((entry.name, reason))
    last = CodeLayout.ROWS if facts.rounded else CodeLayout.WIRE
    return ProductChoice(table[-1], last if layout is None else layout, tuple(rejected))


def device_traits(device: torch.device, triton: str) -> DeviceTraits:
    """Ask this torch, and the device, for what the table needs to know; `triton` is why our kernels do not run there."""
    if device.type != "cuda":
        return DeviceTraits(device.type, triton=triton)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    version = (torch.version.cuda or "0.0").split(".")
    return DeviceTraits(
        "cuda",
        torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0),
        torch.version.hip is not None,
        (int(version[0]), int(version[1])),
        frozenset(name for name in _SHIPPED if hasattr(torch, name) and has_kernel(f"aten::{name}", "CUDA")),
        triton,
    )


# ---- obstacles


def _not_shipped(facts: ProductFacts, name: str, least: tuple[int, int]) -> str:
    """Return why a function of torch does not run on the device, whatever it multiplies."""
    device = facts.device
    if device.kind != "cuda":
        return Unavailable("runs on cuda tensors only", elsewhere=True)
    if device.hip:
        return Unavailable("was not tried on AMD's devices")
    if name not in device.shipped:
        return Unavailable(f"torch {torch.__version__} has no {name} for CUDA", fix="install a newer torch")
    if device.capability < least:
        return Unavailable(f"needs compute capability {_dotted(least)}, the device has {_dotted(device.capability)}")
    return ""


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _shape(facts: ProductFacts, outputs: int, inputs: int) -> str:
    if facts.outputs % outputs or facts.inputs % inputs:
        return (
            f"takes multiples of {outputs} outputs and {inputs} inputs, the weight is {facts.outputs} x {facts.inputs}"
        )
    return ""


def _kind(facts: ProductFacts, kind: Format, dtype: torch.dtype | None) -> str:
    if facts.format != kind:
        return f"multiplies {kind.name} codes, these are {facts.format.name}"
    if dtype is not None and facts.dtype is not dtype:
        return Unavailable(f"does not take {facts.dtype}", fix=f"convert to {dtype}")
    return ""


def _both_rounded(facts: ProductFacts) -> str:
    if not facts.rounded:
        return Unavailable(
            "multiplies codes with codes, and inputs are not to be rounded",
            fix='ask for QuantizationOptions("fp8", group=0, activations="fp8")',
        )
    return _kind(facts, FP8_E4M3, torch.bfloat16) or _shape(facts, 16, 16)


def _scaled_rows(facts: ProductFacts) -> str:
    reason = "" if facts.by_row else f"has one scale a row, the weight one for {facts.group} inputs"
    return _both_rounded(facts) or reason or _not_shipped(facts, "_scaled_mm", (8, 9))


def _scaled_blocks(facts: ProductFacts) -> str:
    if reason := _both_rounded(facts):
        return reason
    if facts.group != _BLOCK or facts.inputs % _BLOCK:
        return f"has a scale for each {_BLOCK} inputs, the weight one for {facts.group} of {facts.inputs}"
    if reason := _not_shipped(facts, "_scaled_mm", (9, 0)):
        return reason
    device = facts.device
    if device.capability[0] != 9 or device.cuda < (12, 9):
        return Unavailable(
            f"cuBLAS has it for compute capability 9 since CUDA 12.9; here are {_dotted(device.capability)} and {_dotted(device.cuda)}"
        )
    return ""


def _scaled_groups(facts: ProductFacts) -> str:
    reason = "" if facts.by_row else f"has one scale a row, the weight one for {facts.group} inputs"
    if reason := _both_rounded(facts) or reason or _not_shipped(facts, "_scaled_grouped_mm", (9, 0)):
        return reason
    return "" if facts.device.capability == (9, 0) else "torch has it for compute capability 9.0 only"


def _triton(facts: ProductFacts) -> str:
    if facts.rounded:
        return "multiplies numbers, and inputs are rounded to fp8"
    if facts.format not in _READABLE:
        return f"does not read {facts.format.name} codes"
    if facts.group % 16 and not facts.by_row:
        return f"reads groups of multiples of 16, these are of {facts.group}"
    return facts.device.triton


def _int4pack(facts: ProductFacts) -> str:
    if reason := _kind(facts, INT4, torch.bfloat16) or _shape(facts, 8, 32):
        return reason
    if facts.group not in _TINYGEMM_GROUPS or facts.inputs % facts.group:
        return f"takes groups of 32, 64, 128 or 256, here are groups of {facts.group} of {facts.inputs} inputs"
    if not facts.bf16_params:
        return "keeps scales and zeros in bf16, which would round these"
    return _not_shipped(facts, "_weight_int4pack_mm", (8, 0))


def _int8pack(facts: ProductFacts) -> str:
    if reason := _kind(facts, INT8, None):
        return reason
    if not facts.symmetric or not facts.by_row:
        return "has one scale a row and no zero point"
    return _not_shipped(facts, "_weight_int8pack_mm", (0, 0))


def _groups_of_numbers(facts: ProductFacts) -> str:
    if facts.rounded:
        return "multiplies numbers, and inputs are rounded to fp8"
    if facts.dtype is not torch.bfloat16:
        return Unavailable(f"does not take {facts.dtype}", fix="convert to torch.bfloat16")
    size = 2 * facts.experts * facts.outputs * facts.inputs
    if size > _MOST_NUMBERS:
        return f"would make {size / 2**30:.1f} GiB of numbers at once"
    if reason := _shape(facts, 8, 8) or _not_shipped(facts, "_grouped_mm", (9, 0)):
        return reason
    major = facts.device.capability[0]
    return "" if major in GROUPED_MM_MAJORS else Unavailable(f"torch asks the host on compute capability {major}")


def _nothing(_facts: ProductFacts) -> str:
    return ""


_WIRE, _ROWS, _TINYGEMM = CodeLayout.WIRE, CodeLayout.ROWS, CodeLayout.TINYGEMM
PRODUCTS: Final = (
    ProductEntry("scaled_mm by row", (_ROWS,), _scaled_rows),
    ProductEntry("scaled_mm by block", (_ROWS,), _scaled_blocks),
    ProductEntry("triton", (_WIRE,), _triton, _MANY),
    ProductEntry("int4pack_mm", (_TINYGEMM,), _int4pack),
    ProductEntry("int8pack_mm", (_ROWS,), _int8pack, _FEW),
    ProductEntry("numbers", tuple(CodeLayout), _nothing),
)
"""Products with one matrix, best first; the last one runs everywhere."""

EXPERT_PRODUCTS: Final = (
    ProductEntry("scaled_grouped_mm", (_ROWS,), _scaled_groups),
    ProductEntry("triton", (_WIRE,), _triton),
    ProductEntry("grouped_mm", (_WIRE,), _groups_of_numbers),
    ProductEntry("numbers", tuple(CodeLayout), _nothing, asks_host=True),
)
"""Products of groups of rows, each with its own matrix, best first."""
