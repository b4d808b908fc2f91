"""Folders whose matrices are codes already: GPTQ, AWQ, compressed-tensors, fp8 with block scales, MXFP4. Names and packing.

| `quant_method` | tensors of a matrix `m` | kept as |
|---|---|---|
| `gptq` (2, 4, 8 bits) | `m.qweight` int32 [in * bits / 32, out], `m.qzeros`, `m.scales`, `m.g_idx` | codes, or numbers where inputs are reordered |
| `awq` (4 bits, GEMM) | `m.qweight` int32 [in, out / 8] in the order 0 2 4 6 1 3 5 7, `m.qzeros`, `m.scales` | codes |
| `compressed-tensors` (4, 8 bits) | `m.weight_packed` int32 [out, in * bits / 32], `m.weight_scale`, `m.weight_zero_point` | codes |
| `compressed-tensors` (naive) | `m.weight` int8 or fp8, `m.weight_scale` | numbers |
| `fp8` (DeepSeek-V3) | `m.weight` e4m3, `m.weight_scale_inv` for blocks | codes; a scale of a block is that of each of its rows |
| `mxfp4` (GPT-OSS) | `m_blocks` uint8 [.., out, in / 32, 16], `m_scales` | codes [.., out, in] |

Codes stay as they are, bit for bit (`QuantTensor` with zero points), so that a product reads as few bits as the folder has. Inputs of
layers are never rounded, also where a folder says that they were when it was made: the result is nearer to the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_config.errors import UnsupportedError
from ds_inference.quantize import Weight
from ds_ops.formats import FP4_E2M1, FP8_E4M3, INT4, INT8, QuantSpec, QuantTensor

__all__ = ["PackedCheckpoint", "unpacked"]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWAY = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point",
         "weight_scale_inv", "weight_g_idx", "_blocks", "_scales")  # fmt: skip

Read = Callable[[str], Weight]


def unpacked(checkpoint: Mapping[str, Tensor], config: Mapping[str, Any]) -> Mapping[str, Weight]:
    """Return the checkpoint with its packed matrices under their plain names.

    Args:
        config: `config.json`; without a `quantization_config` the checkpoint is returned unchanged.
    Raises:
        UnsupportedError: another packing ("inference-packed").
    """
    section: Mapping[str, Any] | None = config.get("quantization_config")
    if not section:
        return checkpoint
    return PackedCheckpoint(checkpoint, section)


class PackedCheckpoint(Mapping[str, Weight]):
    """Tensors of a folder, matrices unpacked when they are asked for."""

    def __init__(self, inner: Mapping[str, Tensor], section: Mapping[str, Any]) -> None:
        self._inner, self._section = inner, section
        read = self._reader()
        self._readers: dict[str, Callable[[], Weight]] = {}
        for name in inner:
            for tail, plain in (("qweight", "weight"), ("weight_packed", "weight"), ("weight_scale", "weight"),
                                ("weight_scale_inv", "weight"), ("_blocks", "")):  # fmt: skip
                if name.endswith(tail):
                    base = name.removesuffix(tail)
                    self._readers[base + plain] = partial(read, base)
        away = {n for n in inner if n.endswith(_AWAY)}
        self._names = [n for n in inner if n not in away and n not in self._readers] + list(self._readers)

    def __getitem__(self, name: str) -> Weight:
        return self._readers[name]() if name in self._readers else self._inner[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is not packed: the embeddings', where there are any."""
        plain = [
            self._inner[n] for n in self._names if (n not in self._readers and "embed" in n) or n.endswith("wte.weight")
        ]
        return next((t.dtype for t in plain if t.is_floating_point()), torch.float32)

    # ---- by method

    def _reader(self) -> Read:
        section = self._section
        method, bits = section.get("quant_method"), section.get("bits", 4)
        if method == "gptq" and bits in (2, 4, 8):
            return self._gptq
        if method == "awq" and bits == 4 and str(section.get("version", "gemm")).lower() == "gemm":
            return self._awq
        if method == "compressed-tensors" and section.get("format") in _COMPRESSED:
            return self._compressed
        if method == "fp8":
            return self._blocked
        if method == "mxfp4":
            return self._mxfp4
        raise UnsupportedError(
            f"a folder packed by {method} ({', '.join(f'{k} {section[k]}' for k in ('bits', 'format', 'version') if k in section)})",
            code="inference-packed",
            fix="Read are gptq of 2, 4 and 8 bits, awq (gemm), compressed-tensors (pack-, int-, float-, naive-quantized), fp8, mxfp4.",
        )

    def _gptq(self, base: str) -> Weight:
        bits = int(self._section.get("bits", 4))
        codes = _words(self._inner[base + "qweight"].t(), bits)
        scales = self._inner[base + "scales"]
        zeros = _words(self._inner[base + "qzeros"], bits)[:, : scales.shape[1]]
        if self._section.get("checkpoint_format", "gptq") != "gptq_v2":
            zeros = (zeros + 1) % (1 << bits)  # version 1 keeps them less one
        inputs, groups = codes.shape[1], scales.shape[0]
        group = -(-inputs // groups)
        order = (
            self._inner[base + "g_idx"].long()
            if base + "g_idx" in self._inner
            else torch.arange(inputs, device="cpu") // group
        )
        if bits == 2 or not torch.equal(order, torch.arange(inputs, device="cpu") // group):
            return ((codes - zeros.t()[:, order]) * scales.t().float()[:, order]).to(scales.dtype)
        return _coded(codes, scales.t(), zeros.t(), bits, group)

    def _awq(self, base: str) -> Weight:
        back = torch.tensor(_AWQ_ORDER, device="cpu").argsort()

        def columns(packed: Tensor) -> Tensor:
            return _words(packed, 4).view(packed.shape[0], -1, 8)[..., back].flatten(1)

        scales = self._inner[base + "scales"]
        codes, zeros = columns(self._inner[base + "qweight"]).t(), columns(self._inner[base + "qzeros"]).t()
        return _coded(codes, scales.t(), zeros, 4, -(-codes.shape[1] // scales.shape[0]))

    def _compressed(self, base: str) -> Weight:
        scales = self._inner[base + "weight_scale"]
        if base + "weight_packed" not in self._inner:
            return (self._inner[base + "weight"].float() * _stretched(scales, self._inner[base + "weight"].shape)).to(
                scales.dtype
            )
        rows, inputs = self._inner[base + "weight_shape"].tolist()
        bits = 32 * self._inner[base + "weight_packed"].shape[1] // inputs
        bits = 8 if bits >= 8 else 4
        codes = _words(self._inner[base + "weight_packed"], bits)[:, :inputs]
        zeros = torch.full(scales.shape, 1 << (bits - 1), device="cpu")
        if base + "weight_zero_point" in self._inner:
            zeros = _words(self._inner[base + "weight_zero_point"].t(), bits)[:, :rows].t()
        return _coded(
            codes, scales.view(rows, -1), zeros.reshape(rows, -1), bits, -(-inputs // scales.view(rows, -1).shape[1])
        )

    def _blocked(self, base: str) -> Weight:
        codes, scales = self._inner[base + "weight"], self._inner[base + "weight_scale_inv"].float()
        if codes.dtype != torch.float8_e4m3fn or scales.dim() != 2 or (group := _block(scales, codes.shape, 1)) % 8:
            return (codes.float() * _stretched(scales, codes.shape)).to(torch.bfloat16)
        rows = scales.repeat_interleave(_block(scales, codes.shape, 0), 0)[: codes.shape[0]]
        return _floats(codes.view(torch.uint8), rows, QuantSpec(FP8_E4M3, group))

    def _mxfp4(self, base: str) -> Weight:
        blocks, scales = self._inner[base + "_blocks"], self._inner[base + "_scales"]
        shape = (*blocks.shape[:-2], 32 * blocks.shape[-2])
        powers = torch.ldexp(torch.ones(scales.shape, device="cpu"), scales.int() - 127).flatten(0, -2)
        return _floats(blocks.flatten(-2).flatten(0, -2), powers, QuantSpec(FP4_E2M1, 32), shape)


_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def _words(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, words] into codes int64 [rows, words * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, device="cpu")
    return ((packed.long()[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _stretched(scales: Tensor, shape: torch.Size) -> Tensor:
    """Scales of blocks, each block of one size, as large as the matrix."""
    scales = scales.float().reshape(scales.shape if scales.dim() == 2 else (-1, 1))
    for dim in (0, 1):
        block = _block(scales, shape, dim)
        scales = scales.repeat_interleave(block, dim)[: shape[0]] if dim == 0 else scales.repeat_interleave(block, dim)
    return scales[:, : shape[1]]


def _block(scales: Tensor, shape: torch.Size, dim: int) -> int:
    """Return how many rows, or columns, of a matrix share a scale."""
    return next(b for b in (1, 32, 64, 128, 256, shape[dim]) if -(-shape[dim] // b) == scales.shape[dim])


def _floats(codes: Tensor, scales: Tensor, spec: QuantSpec, shape: tuple[int, ...] | None = None) -> QuantTensor:
    """Build a QuantTensor, worth bf16, from bytes of floating codes [N, .] and scales [N, groups]."""
    rows, inputs = codes.shape[0], codes.shape[1] * 8 // spec.format.bits
    quantized = QuantTensor.empty(
        spec, rows, inputs, like=torch.empty(0, dtype=torch.bfloat16, device="cpu"), shape=shape
    )
    quantized.wire.zero_()
    quantized.codes.copy_(codes)
    quantized.params.copy_(scales[..., None])
    return quantized


def _coded(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int) -> Weight:
    """Build a QuantTensor from codes [N, K] with scales and zero points [N, groups].

    Dequantizes where a group is no multiple of 8.
    """
    rows, inputs = codes.shape
    if group % 8 or scales.shape[1] != -(-inputs // group):
        at = torch.arange(inputs, device="cpu") // group
        return ((codes - zeros[:, at]) * scales.float()[:, at]).to(scales.dtype)
    quantized = QuantTensor.empty(
        QuantSpec(INT8 if bits == 8 else INT4, group, symmetric=False), rows, inputs, like=scales.new_empty(0)
    )
    quantized.wire.zero_()
    flat = codes.to(torch.uint8)
    if bits == 4:
        flat = flat if inputs % 2 == 0 else torch.nn.functional.pad(flat, (0, 1))
        flat = flat[:, 0::2] | (flat[:, 1::2] << 4)
    quantized.codes.copy_(flat)
    quantized.params.copy_(torch.stack([scales.float(), zeros.float()], -1))
    return quantized
