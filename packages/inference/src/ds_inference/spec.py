"""What a decoder model is made of, as data: the runner executes it and knows no family by name.

A family (`families/`) is a function from a Hugging Face configuration to a `DecoderSpec`, and a table that says from which tensors of a
checkpoint each *role* is made. Roles are the weights that the runner asks for by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "Alibi",
    "AttentionSpec",
    "DecoderLayerSpec",
    "DecoderSpec",
    "ExpertsSpec",
    "LatentAttentionSpec",
    "Mlp",
    "Norm",
    "Order",
    "RopeSpec",
    "WeightSource",
]

Order = Literal["pre", "parallel", "parallel_norms", "sandwich", "post", "after"]
"""Where norms and residuals are in a layer; a is attention, m is the feed-forward part:

    pre             x + a(n1 x), then x + m(n2 x)                        Llama and most others
    parallel        x + a(n1 x) + m(n1 x)                                Falcon 7B, GPT-J
    parallel_norms  x + a(n1 x) + m(n2 x)                                GPT-NeoX, Falcon 40B
    sandwich        x + n2 a(n1 x), then x + n4 m(n3 x)                  Gemma 2 and 3
    post            x + n1 a(x), then x + n2 m(x)                        EXAONE 4, OLMo 2
    after           n1(x + a(x)), then n2(x + m(x))                      OPT 350M, the original transformer
"""


@dataclass(frozen=True, slots=True)
class Norm:
    """`kind` over the last dim. The weight counts as `offset + weight`."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class RopeSpec:
    """Rotary positions: the first `dim` features of each head are rotated.

    Attributes:
        parameters: `rope_type` and what belongs to it, as a Hugging Face configuration has them.
        interleaved: Pairs are neighbours (2i, 2i + 1), else halves (i, i + dim / 2).
    """

    dim: int
    theta: float = 10000.0
    parameters: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 section 2.1): keys and values are made from `kv_lora_rank` numbers a token.

    Attributes:
        kv_lora_rank: Of keys and values together; the cache holds `kv_lora_rank + qk_rope_head_dim` numbers a token.
        q_lora_rank: Of queries; None: made at once.
        qk_nope_head_dim, qk_rope_head_dim: Features of a query and key head without and with positions.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int

    @property
    def norm(self) -> Norm:
        """Of the compressed numbers; configurations do not name it."""
        return Norm("rms", 1e-6)


@dataclass(frozen=True, slots=True)
class Alibi:
    """A slope by head (Press et al. 2022) times the position of the key, times `scale`; `rounded`: slope and product in bf16 (Falcon)."""

    scale: float = 1.0
    rounded: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How a layer attends.

    Attributes:
    heads, kv_heads: Of queries; of keys and values.
    width, value_width: Features of a query and key head; of a value head.
    scale: Scores are multiplied by it.
    rope: None: no rotation.
    window: Only the last so many positions are seen; None: all.
    softcap: Scores become cap * tanh(score / cap).
    alibi: Scores get a bias that grows with the key's position; None: no.
    head_norm: Norm of every query and key head.
    head_norm_late: It comes after the rotation, not before it.
    head_norm_each: Every head has weights of its own, one head after the other.
    whole_norm: Norm of all query features together, and of all key features.
    clip: Queries, keys and values are cut to [-clip, clip] when they are made; None: no.
    sinks: One more score a head that takes part in the softmax and has no value (GPT-OSS).
    latent: How keys and values are made where they are compressed.
    first, of: Where heads are cut over ranks: the first of this rank's, and how many (query, key) heads there are in all.
    """

    heads: int
    kv_heads: int
    width: int
    value_width: int
    scale: float
    rope: RopeSpec | None = None
    window: int | None = None
    softcap: float | None = None
    alibi: Alibi | None = None
    head_norm: Norm | None = None
    head_norm_late: bool = False
    head_norm_each: bool = False
    whole_norm: Norm | None = None
    clip: float | None = None
    sinks: bool = False
    latent: LatentAttentionSpec | None = None
    head_offset: int = 0
    total_heads: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(f(up x)), or gated down(f(gate x) * up x); the two are one matrix, gate first."""

    width: int
    activation: str
    gated: bool


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A router and experts, each a gated Mlp of `width`.

    Attributes:
        count, top_k: Experts, and how many a token goes to.
        score: Of the router's logits.
        normalized: Weights of the chosen ones add up to 1.
        scale: What weights are multiplied by in the end.
        groups, top_k_groups: Only experts of the best groups are chosen from; a group's score is the sum of its best two
            (`"pair"`) or its best (`"best"`).
        score_bias: A bias is added to the scores for choosing, not for weighing.
        shared: Width of an expert that every token goes to; 0: none.
        shared_gate: That one's output is weighed by a sigmoid of its own.
        local_range: Experts of this rank, from and to, where they are given to ranks; None: all.
        clamp, alpha: With a clamp (GPT-OSS): (up + 1) * gate * sigmoid(alpha * gate), both cut at the clamp before.
    """

    count: int
    top_k: int
    width: int
    activation: str = "silu"
    score: Literal["softmax", "sigmoid", "softmax_chosen"] = "softmax"
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    top_k_groups: int = 1
    group_score: Literal["pair", "best"] = "best"
    score_bias: bool = False
    shared: int = 0
    shared_gate: bool = False
    local_range: tuple[int, int] | None = None
    clamp: float | None = None
    alpha: float = 1.702


@dataclass(frozen=True, slots=True)
class DecoderLayerSpec:
    """One block: attention and a feed-forward part. What both give is multiplied by `residual` before it joins the stream."""

    attention: AttentionSpec
    feed: Mlp | ExpertsSpec
    order: Order = "pre"
    residual: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder.

    Attributes:
        family: As in `model_type` of its configuration.
        hidden: Features of the residual stream.
        embed: Features of the embedding table; more or less than `hidden` if there is a projection (OPT 350M).
        vocab: Rows of the embedding table.
        norm: Of the layers and the end.
        positions: Rows of a table of positions that is added, with the number of the first; None: no table.
        embed_scale: What embeddings are multiplied by.
        embed_norm: Embeddings are normed (BLOOM).
        final_norm: The last layer's output is normed.
        tied: The head is the embedding table.
        logit_scale: What logits are multiplied by.
        logit_softcap: Logits become cap * tanh(logit / cap).
        max_seq_len: Positions the model knows.
        eos_ids: Tokens that end an answer.
    """

    family: str
    hidden: int
    vocab: int
    layers: tuple[DecoderLayerSpec, ...]
    norm: Norm
    max_seq_len: int
    embed: int | None = None
    positions: tuple[int, int] | None = None
    embed_scale: float = 1.0
    embed_norm: bool = False
    final_norm: bool = True
    tied: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightSource:
    """From which tensors of a checkpoint a role is made.

    Attributes:
        names: Tensors, with `{i}` for the layer and `{e}` for every expert in order.
        layout: How: `"rows"`: one under the other. `"columns"`: transposed, then rows (GPT-2 keeps matrices [in, out]).
            `"heads"`: rows are [head, (q, k, v), feature]. `"groups"`: rows are [kv head, (queries..., k, v), feature].
            `"stack"`: experts one behind the other; with two names, each pair is put together by rows. `"swapped"`: a packed
            [expert, in, out] tensor. `"flat"`: one row of numbers. `"shards"`: rows are [4 shards, (q, v, k), features] (CodeGen).
            `"paired"`: as swapped, its outputs are gate and up, alternating; of a bias [expert, out], too.
        optional: The role is left out if the checkpoint has none of the names.
    """

    names: tuple[str, ...]
    layout: Literal["rows", "columns", "heads", "groups", "stack", "swapped", "paired", "flat", "shards"] = "rows"
    optional: bool = False
