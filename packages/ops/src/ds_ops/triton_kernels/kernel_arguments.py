"""What the Triton kernels are told besides tensors. Imports no Triton, so that references take the same records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from torch import Tensor

__all__ = [
    "GATES",
    "PHILOX_ROUNDS",
    "SAMPLING_FIELDS",
    "WIDEST_NORM",
    "AttentionTraits",
    "HeadTraits",
    "NormWeights",
    "PagedMetadata",
]

GATES: Final = {"silu": 0, "swish": 0, "gelu": 1, "gelu_new": 2, "gelu_fast": 2, "gelu_pytorch_tanh": 2, "relu": 3}
"""Activations of gated feed-forward parts that one kernel computes."""

WIDEST_NORM: Final = 16384
"""Features of a row that a program holds in registers."""

SAMPLING_FIELDS: Final = 8
"""Integers that say how a row is sampled, see `triton_sampling.draw_tokens`."""

PHILOX_ROUNDS: Final = 7
"""Of Philox 4x32: the fewest that pass all tests of BigCrush (Salmon et al. 2011, table 2)."""


class PagedMetadata(NamedTuple):
    """Where the sequences of a batch are, all int32 on the device.

    Attributes:
        cu_seqlens_q: [B + 1], first token of each sequence among those of q, and the end of the last one.
        seqlens_k: [B], tokens of each sequence in the cache, those of the batch included.
        block_table: [B, M], blocks of each sequence.
        max_seqlen_q: No sequence has more tokens in q.
        num_tokens: The sequences have no more tokens together.
    """

    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    block_table: Tensor
    max_seqlen_q: int
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionTraits:
    """What scores are besides q . k * scale.

    Attributes:
        window: Only so many last positions are seen; 0: all.
        softcap: Scores become cap * tanh(score / cap); 0: no.
        slopes: [heads], fp32 or bf16: a bias slope * key position * `alibi_scale`; None: no.
        alibi_rounded: Slope times position is rounded to bf16.
        sinks: [heads]: one more score of each head, without a value; None: no.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    slopes: Tensor | None = None
    alibi_scale: float = 1.0
    alibi_rounded: bool = False
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """A norm over the last dim of [T, n].

    Attributes:
        weight, bias: [n]; no bias: None.
        layer: Layer norm, else RMS.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float = 0.0
    layer: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class HeadTraits:
    """How heads are made.

    Attributes:
        heads, kv_heads: Of queries; of keys and values.
        rotary: Features that are rotated, the first ones of a head; 0: none.
        interleaved: Pairs are neighbours, else halves.
        q_norm, k_norm: Weights [width] of an RMS norm of each head before the rotation, or None; they count as `offset + weight`.
    """

    heads: int
    kv_heads: int
    rotary: int = 0
    interleaved: bool = False
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0
