"""What sequences hold between steps: keys and values in blocks, states in rows.

Keys and values grow with a sequence. A *state* does not: it is what a recurrent layer keeps of all tokens together (the last
inputs of a convolution, the matrix of a state space or of linear attention). A sequence has one row of states; it is found by
the sequence's first block, which no other sequence has where nothing is shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ds_accel import streams
from ds_config.errors import UnsupportedError
from ds_inference.spec import DecoderLayerSpec, DecoderSpec
from ds_ops.host_arena import zeros_huge

__all__ = ["SCALED", "Cache", "States"]

SCALED = (torch.int8, torch.float8_e4m3fn)
"""Formats that keys and values are rounded to, with a scale for each token and head."""


class States:
    """Rows of states, one for each sequence that has any. Rows of sequences that are over are used again."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._rows: dict[int, int] = {}
        self._blank: list[int] = []

    def __len__(self) -> int:
        """Return the number of sequences that have a row."""
        return len(self._rows)

    def read(self, sequences: Sequence[int]) -> list[Tensor]:
        """Copies of the sequences' states, [G, ...] each, in the order in which they were written."""
        if not self._tensors:
            return []
        at = _indices([self._rows[s] for s in sequences], self._tensors[0].device)
        return [t[at] for t in self._tensors]

    def write(self, sequences: Sequence[int], states: Sequence[Tensor]) -> None:
        """Keep `states`, [G, ...] each, as those of the sequences. Costs a copy; memory doubles where rows run out."""
        if not states:
            return
        new = [s for s in dict.fromkeys(sequences) if s not in self._rows]
        while len(self._blank) < len(new):
            self._grow(states)
        self._rows.update((s, self._blank.pop()) for s in new)
        at = _indices([self._rows[s] for s in sequences], self._tensors[0].device)
        for tensor, state in zip(self._tensors, states, strict=True):
            tensor[at] = state

    def forget(self, sequences: Iterable[int]) -> None:
        """Free the rows of sequences that ended or will be recomputed."""
        self._blank += [self._rows.pop(s) for s in sequences if s in self._rows]

    def _grow(self, states: Sequence[Tensor]) -> None:
        had = len(self._tensors[0]) if self._tensors else 0
        more = had or 4
        fresh = [s.new_zeros(more, *s.shape[1:]) for s in states]
        self._tensors = [torch.cat(pair) for pair in zip(self._tensors, fresh, strict=True)] if had else fresh
        self._blank += range(had + more - 1, had - 1, -1)


class Cache:
    """Keys and values of all layers in blocks. Block numbers mean the same block in every layer.

    Attributes:
        layers: For each layer (keys [blocks, size, kv heads, width], values [blocks, size, kv heads, value width]); of a
            layer with latent attention, what is kept is the latent: keys [blocks, size, 1, rank + rotated], no values. Of int8
            and fp8, scales fp32 [blocks, size, kv heads] of keys and of values follow.
        spare: A slot of the one block more that nobody is given: rows of padding write there.
        states: Of recurrent layers, by the number of a sequence's first block.
    """

    def __init__(self, spec: DecoderSpec, blocks: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size = size
        self.spare = blocks * size
        latent = any(y.attention.latent is not None for y in spec.layers)
        if dtype not in SCALED and not (dtype.is_floating_point and dtype.itemsize > 1):
            raise UnsupportedError(
                f"a cache of {dtype}",
                code="inference-cache-dtype",
                fix="Use torch.int8, torch.float8_e4m3fn or a float of 16 or 32 bits, or leave cache_dtype out.",
            )
        if dtype in SCALED and latent:
            raise UnsupportedError(
                f"a cache of {dtype} for a {spec.family} model, whose cache is compressed already",
                code="inference-cache-dtype",
                fix="Leave cache_dtype out.",
            )
        self.layers = [self._made(_kept(y), (blocks + 1, size), dtype, device) for y in spec.layers]
        self.states = States()

    @staticmethod
    def _made(
        sizes: tuple[tuple[int, int], ...], room: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        shapes = [(*room, *s) for s in sizes]
        if device.type == "cpu":  # memory is taken when a block is first written
            tensors = [zeros_huge([math.prod(s)], dtype)[0].view(s) for s in shapes]
        else:
            tensors = [torch.zeros(s, dtype=dtype, device=device) for s in shapes]
        if dtype in SCALED:
            tensors += [torch.zeros(*room, heads, device=device) for heads, _ in sizes]
        return tuple(tensors)

    @staticmethod
    def bytes_of(spec: DecoderSpec, size: int, dtype: torch.dtype) -> int:
        """Return the bytes of a block of `size` tokens in all layers; 0 if no layer stores keys and values."""
        scale = 4 if dtype in SCALED else 0
        return size * sum(h * (w * dtype.itemsize + scale) for layer in spec.layers for h, w in _kept(layer))

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy the content of KV cache blocks, for each pair (from, to)."""
        if pairs and self.layers:
            source, target = _indices(pairs, self.layers[0][0].device).unbind(1)
            for tensors in self.layers:
                for tensor in tensors:
                    bits = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
                    bits[target] = bits[source]


def _indices(numbers: Sequence[int] | Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Copy numbers of the host to the device, int64, without waiting for what that has to do before."""
    return streams.copy_to(torch.tensor(numbers, dtype=torch.int64, device="cpu"), device)


def _kept(layer: DecoderLayerSpec) -> tuple[tuple[int, int], ...]:
    attention = layer.attention
    if attention.latent is not None:
        return ((1, attention.latent.kv_lora_rank + attention.latent.qk_rope_head_dim),)
    return (attention.kv_heads, attention.width), (attention.kv_heads, attention.value_width)
