"""What several families share: readers of configurations, and the tables of Llama's names that others vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_config.errors import UnsupportedError
from ds_inference.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    ExpertsSpec,
    Mlp,
    Norm,
    RopeSpec,
    WeightSource,
)

__all__ = [
    "LAYER",
    "LLAMA",
    "Config",
    "DecoderFamily",
    "Sources",
    "ends_of",
    "first_of",
    "gated_mlp",
    "grouped_attention",
    "heads_of",
    "llama_like",
    "plain",
    "rope_of",
    "rows",
    "sees_later_tokens",
    "undeclared",
    "windows_of",
]

Config = Mapping[str, Any]
Sources = Mapping[str, tuple[WeightSource, ...]]
"""By role: the first source whose names the checkpoint has is taken. Layers' roles have `{i}`."""


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """How a family is read.

    Attributes:
        spec: From a configuration.
        sources: From a configuration: roles and their tensors.
    """

    spec: Callable[[Config], DecoderSpec]
    sources: Callable[[Config], Sources]


def first_of(config: Config, *names: str, default: Any = None) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    return default


def sees_later_tokens(config: Config) -> bool:
    """Whether attention is not causal, as in decoders that were made into embedders."""
    return config.get("is_causal") is False or config.get("use_bidirectional_attention") in (True, "all")


def undeclared(what: str) -> UnsupportedError:
    """Build the error for a variant of a family that has no declaration."""
    return UnsupportedError(
        f"{what} has no declaration",
        code="inference-family",
        fix="Load the model with transformers and pass the module: it then runs through its own forward, slower.",
    )


def ends_of(config: Config) -> tuple[int, ...]:
    token_ids = config.get("eos_token_id")
    return () if token_ids is None else tuple(token_ids) if isinstance(token_ids, Sequence) else (token_ids,)


_PARTIAL = {
    "glm", "glm4", "glm4_moe", "gpt_neox", "minimax_m2", "nemotron", "phi", "phi3", "solar_open", "stablelm",
}  # fmt: skip
"""Model types of which a part of the features may be rotated."""


def rope_of(config: Config, width: int, *, kind: str | None = None, interleaved: bool = False) -> RopeSpec:
    """Build the RoPE of `width` features a head from a configuration.

    Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4).

    Raises:
        UnsupportedError: a share of rotated features that transformers' model of this type does not read ("inference-family").
    """
    rope_parameters = config.get("rope_parameters") or {}
    if kind is not None and isinstance(rope_parameters.get(kind), Mapping):
        rope_parameters = rope_parameters[kind]
    scaling = config.get("rope_scaling") or {}
    parameters = {**scaling, **rope_parameters}
    if "type" in parameters:
        parameters.setdefault("rope_type", parameters.pop("type"))
    theta: Any = parameters.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10000.0)))
    share = parameters.get(
        "partial_rotary_factor", first_of(config, "partial_rotary_factor", "rotary_pct", default=1.0)
    )
    if (
        share != 1.0
        and config.get("model_type") not in _PARTIAL
        and parameters.get("rope_type", "default") == "default"
    ):
        raise undeclared(
            f"partial_rotary_factor = {share} of a {config.get('model_type')} model, whose own forward rotates all features"
        )
    if (original := config.get("original_max_position_embeddings")) is not None:
        parameters.setdefault("original_max_position_embeddings", original)
    parameters.setdefault("max_position_embeddings", config.get("max_position_embeddings", 0))
    return RopeSpec(int(width * share), float(theta), parameters, interleaved)


def heads_of(config: Config) -> tuple[int, int, int]:
    heads = first_of(config, "num_attention_heads", "n_head")
    hidden = first_of(config, "hidden_size", "n_embd")
    return (
        heads,
        first_of(config, "num_key_value_heads", default=heads),
        first_of(config, "head_dim", default=hidden // heads),
    )


def grouped_attention(config: Config, **more: Any) -> AttentionSpec:
    """Build rotary attention with as many key heads as the configuration says."""
    heads, kv_heads, width = heads_of(config)
    attention = AttentionSpec(heads, kv_heads, width, width, width**-0.5, rope_of(config, width))
    return replace(attention, **more)


def windows_of(config: Config, layers: int) -> list[int | None]:
    """Return the sliding window of every layer; None for full attention.

    Raises:
        UnsupportedError: the configuration says that some layers have windows, and that none has ("inference-family").
    """
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if config.get("use_sliding_window") is False and "sliding_attention" in (kinds or ()):
        raise undeclared(f"a {config['model_type']} model of layer_types {kinds} with use_sliding_window false")
    if window is None or config.get("use_sliding_window") is False:
        return [None] * layers
    if kinds is not None:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    first = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
    return [window if i >= first else None for i in range(layers)]


def llama_like(
    config: Config,
    attentions: Sequence[AttentionSpec],
    feeds: Sequence[Mlp | ExpertsSpec],
    *,
    norm: Norm | None = None,
    order: Any = "pre",
    **more: Any,
) -> DecoderSpec:
    layers = tuple(DecoderLayerSpec(a, f, order) for a, f in zip(attentions, feeds, strict=True))
    spec = DecoderSpec(
        family=config["model_type"],
        hidden=config["hidden_size"],
        vocab=config["vocab_size"],
        layers=layers,
        norm=norm or Norm("rms", config.get("rms_norm_eps", 1e-6)),
        max_seq_len=config.get("max_position_embeddings", 2048),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_ids=ends_of(config),
    )
    return replace(spec, **more)


def gated_mlp(config: Config, width: int | None = None) -> Mlp:
    kind = first_of(config, "hidden_activation", "hidden_act", default="silu")
    return Mlp(width or config["intermediate_size"], kind, gated=True)


def rows(*names: str, optional: bool = False) -> tuple[WeightSource, ...]:
    return (WeightSource(names, optional=optional),)


def _attention_rows(prefix: str) -> dict[str, tuple[WeightSource, ...]]:
    parts = [f"{prefix}self_attn.{p}_proj" for p in ("q", "k", "v")]
    return {
        "layers.{i}.attention.qkv.weight": rows(*(f"{p}.weight" for p in parts)),
        "layers.{i}.attention.qkv.bias": rows(*(f"{p}.bias" for p in parts), optional=True),
        "layers.{i}.attention.out.weight": rows(f"{prefix}self_attn.o_proj.weight"),
        "layers.{i}.attention.out.bias": rows(f"{prefix}self_attn.o_proj.bias", optional=True),
        "layers.{i}.attention.q_norm.weight": rows(f"{prefix}self_attn.q_norm.weight", optional=True),
        "layers.{i}.attention.k_norm.weight": rows(f"{prefix}self_attn.k_norm.weight", optional=True),
    }


def _mlp_rows(prefix: str) -> dict[str, tuple[WeightSource, ...]]:
    parts = [f"{prefix}mlp.{p}_proj" for p in ("gate", "up")]
    return {
        "layers.{i}.feed.up.weight": rows(*(f"{p}.weight" for p in parts), optional=True),
        "layers.{i}.feed.up.bias": rows(*(f"{p}.bias" for p in parts), optional=True),
        "layers.{i}.feed.down.weight": rows(f"{prefix}mlp.down_proj.weight", optional=True),
        "layers.{i}.feed.down.bias": rows(f"{prefix}mlp.down_proj.bias", optional=True),
    }


_OUTER = {
    "embed.weight": rows("model.embed_tokens.weight"),
    "norm.weight": rows("model.norm.weight"),
    "head.weight": rows("lm_head.weight", optional=True),
    "head.bias": rows("lm_head.bias", optional=True),
}
LAYER = "model.layers.{i}."
_TWO_NORMS = {
    "layers.{i}.norm1.weight": rows(LAYER + "input_layernorm.weight"),
    "layers.{i}.norm2.weight": rows(LAYER + "post_attention_layernorm.weight"),
}
LLAMA = {**_OUTER, **_TWO_NORMS, **_attention_rows(LAYER), **_mlp_rows(LAYER)}


def plain(build: Callable[[Config], DecoderSpec], sources: Sources = LLAMA) -> DecoderFamily:
    return DecoderFamily(build, lambda config: sources)
