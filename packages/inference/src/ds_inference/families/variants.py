"""Decoders near Llama that differ in norms, multipliers, biases, or where positions are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ds_inference.families.family_spec import (
    LAYER,
    LLAMA,
    Config,
    DecoderFamily,
    Sources,
    first_of,
    gated_mlp,
    grouped_attention,
    heads_of,
    llama_like,
    plain,
    rope_of,
    rows,
    windows_of,
)
from ds_inference.families.llama import FOUR_NORMS, PHI3
from ds_inference.spec import AttentionSpec, DecoderSpec, Mlp, Norm, WeightSource

__all__ = ["VARIANTS", "multiplied"]


def _both(role: str, name: str) -> dict[str, tuple[WeightSource, ...]]:
    return {f"{role}.{part}": rows(f"{name}.{part}", optional=part == "bias") for part in ("weight", "bias")}


def _each(role: str, name: str) -> dict[str, tuple[WeightSource, ...]]:
    return _both("layers.{i}." + role, LAYER + name)


_BIASED_NORMS = {
    **_both("norm", "model.norm"),
    **_each("norm1", "input_layernorm"),
    **_each("norm2", "post_attention_layernorm"),
}


def _alike(config: Config, attention: AttentionSpec, feed: Mlp | None = None, **more: Any) -> DecoderSpec:
    """Build a Llama-like spec whose layers are all the same."""
    count = config["num_hidden_layers"]
    return llama_like(config, [attention] * count, [feed or gated_mlp(config)] * count, **more)


def _interleaved(config: Config) -> AttentionSpec:
    width = heads_of(config)[2]
    return grouped_attention(config, rope=rope_of(config, width, interleaved=True))


# ---- Cohere


def _cohere(config: Config) -> DecoderSpec:
    norm = Norm("layer", config.get("layer_norm_eps", 1e-5))
    attention = _interleaved(config)
    if config.get("use_qk_norm"):
        attention = replace(attention, head_norm=norm, head_norm_each=True)
    tied = bool(config.get("tie_word_embeddings", True))
    scale = float(first_of(config, "logit_scale", default=0.0625))
    return _alike(config, attention, norm=norm, order="parallel", tied=tied, logit_scale=scale)


def _cohere2(config: Config) -> DecoderSpec:
    spec, count = _cohere(config), config["num_hidden_layers"]
    pattern = first_of(config, "_sliding_window_pattern", "sliding_window_pattern", default=4)
    kinds = config.get("layer_types") or [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)
    ]
    layers = []
    for layer, kind in zip(spec.layers, kinds, strict=True):
        window = config.get("sliding_window") if kind == "sliding_attention" else None
        rope = None if window is None else layer.attention.rope  # layers that see everything know no positions
        layers.append(replace(layer, attention=replace(layer.attention, window=window, rope=rope)))
    return replace(spec, layers=tuple(layers))


_COHERE = {
    **{k: v for k, v in LLAMA.items() if "norm2" not in k},
    **{
        f"layers.{{i}}.attention.{p}_norm.weight": (
            WeightSource((LAYER + f"self_attn.{p}_norm.weight",), "flat", True),
        )
        for p in "qk"
    },
}


# ---- norms with biases


def _stablelm(config: Config) -> DecoderSpec:
    settings = {"partial_rotary_factor": 0.25, **config}
    norm = Norm("layer", config.get("layer_norm_eps", 1e-5))
    attention = grouped_attention(settings)
    if config.get("qk_layernorm"):
        attention = replace(attention, head_norm=norm, head_norm_each=True)
    order = "parallel" if config.get("use_parallel_residual") else "pre"
    return _alike(config, attention, norm=norm, order=order)


def _stablelm_sources(config: Config) -> Sources:
    heads, kv_heads, _ = heads_of(config)
    norms = {
        f"layers.{{i}}.attention.{p}_norm.weight": rows(
            *(LAYER + f"self_attn.{p}_layernorm.norms.{h}.weight" for h in range(count)), optional=True
        )
        for p, count in (("q", heads), ("k", kv_heads))
    }
    sources = {**LLAMA, **_BIASED_NORMS, **norms}
    if config.get("use_parallel_residual"):  # one norm a layer
        return {role: source for role, source in sources.items() if ".norm2." not in role}
    return sources


def _phi(config: Config) -> DecoderSpec:
    settings = {"partial_rotary_factor": 0.5, **config}
    norm = Norm("layer", config.get("layer_norm_eps", 1e-5))
    attention = grouped_attention(settings, head_norm=norm if config.get("qk_layernorm") else None)
    feed = Mlp(config["intermediate_size"], config.get("hidden_act", "gelu_new"), gated=False)
    return _alike(config, attention, feed, norm=norm, order="parallel")


_PHI = {
    **{k: v for k, v in LLAMA.items() if ".feed." not in k and "norm2" not in k},
    **_both("norm", "model.final_layernorm"),
    **_each("norm1", "input_layernorm"),
    **_each("attention.out", "self_attn.dense"),
    **{
        f"layers.{{i}}.attention.{p}_norm.{part}": rows(LAYER + f"self_attn.{p}_layernorm.{part}", optional=True)
        for p in "qk"
        for part in ("weight", "bias")
    },
    **_each("feed.up", "mlp.fc1"),
    **_each("feed.down", "mlp.fc2"),
}


def _starcoder2(config: Config) -> DecoderSpec:
    norm = Norm("layer", config.get("norm_epsilon", 1e-5))
    feed = Mlp(config["intermediate_size"], config.get("hidden_act", "gelu_pytorch_tanh"), gated=False)
    attention = grouped_attention(config, window=config.get("sliding_window"))
    return _alike(config, attention, feed, norm=norm, tied=bool(config.get("tie_word_embeddings", True)))


_STARCODER2 = {**LLAMA, **_BIASED_NORMS, **_each("feed.up", "mlp.c_fc"), **_each("feed.down", "mlp.c_proj")}


def _nemotron(config: Config) -> DecoderSpec:
    settings = {"partial_rotary_factor": 0.5, **config}
    norm = Norm("layer", config.get("norm_eps", 1e-5), offset=1.0)
    feed = Mlp(config["intermediate_size"], config.get("hidden_act", "relu2"), gated=False)
    return _alike(config, grouped_attention(settings), feed, norm=norm)


_NEMOTRON = {**LLAMA, **_BIASED_NORMS, **_each("feed.up", "mlp.up_proj"), **_each("feed.down", "mlp.down_proj")}


def _jais2(config: Config) -> DecoderSpec:
    norm = Norm("layer", config.get("layer_norm_eps", 1e-5))
    feed = Mlp(config["intermediate_size"], config.get("hidden_act", "relu2"), gated=False)
    return _alike(config, grouped_attention(config), feed, norm=norm)


# ---- RMS norms


def multiplied(config: Config, spec: DecoderSpec) -> DecoderSpec:
    """Apply Granite's multipliers to a spec."""
    scale = float(config.get("attention_multiplier", 1.0))
    residual = float(config.get("residual_multiplier", 1.0))
    return replace(
        spec,
        layers=tuple(replace(y, attention=replace(y.attention, scale=scale), residual=residual) for y in spec.layers),
        embed_scale=float(config.get("embedding_multiplier", 1.0)),
        logit_scale=1.0 / float(config.get("logits_scaling", 1.0)),
    )


def _granite(config: Config) -> DecoderSpec:
    return multiplied(config, _alike(config, grouped_attention(config)))


def _arcee(config: Config) -> DecoderSpec:
    feed = Mlp(config["intermediate_size"], config.get("hidden_act", "relu2"), gated=False)
    return _alike(config, grouped_attention(config), feed)


_ARCEE = {**LLAMA, **_each("feed.up", "mlp.up_proj"), **_each("feed.down", "mlp.down_proj")}


def _helium(config: Config) -> DecoderSpec:
    return _alike(config, _interleaved(config))


def _smollm3(config: Config) -> DecoderSpec:
    count, every = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    base = grouped_attention(config)
    windows = windows_of({"use_sliding_window": False, **config}, count)
    attentions = [
        replace(base, window=window, rope=base.rope if turn else None)
        for window, turn in zip(windows, turns, strict=True)
    ]
    tied = bool(config.get("tie_word_embeddings", True))
    return llama_like(config, attentions, [gated_mlp(config)] * count, tied=tied)


def _glm(config: Config) -> DecoderSpec:
    order = "sandwich" if config["model_type"] == "glm4" else "pre"
    return _alike(config, _interleaved({"partial_rotary_factor": 0.5, **config}), order=order)


_GLM = {**LLAMA, "layers.{i}.feed.up.weight": PHI3["layers.{i}.feed.up.weight"]}
_GLM4 = {
    **_GLM,
    **FOUR_NORMS,
    "layers.{i}.norm2.weight": rows(LAYER + "post_self_attn_layernorm.weight"),
    "layers.{i}.norm3.weight": rows(LAYER + "post_attention_layernorm.weight"),
    "layers.{i}.norm4.weight": rows(LAYER + "post_mlp_layernorm.weight"),
}


def _ernie(config: Config) -> DecoderSpec:
    return _alike(config, _interleaved(config), tied=bool(config.get("tie_word_embeddings", True)))


def _hunyuan(config: Config) -> DecoderSpec:
    norm = Norm("rms", config.get("rms_norm_eps", 1e-5))
    return _alike(config, grouped_attention(config, head_norm=norm, head_norm_late=True))


_HUNYUAN = {
    **LLAMA,
    "layers.{i}.attention.q_norm.weight": rows(LAYER + "self_attn.query_layernorm.weight"),
    "layers.{i}.attention.k_norm.weight": rows(LAYER + "self_attn.key_layernorm.weight"),
}


def _seed(config: Config) -> DecoderSpec:
    return _alike(config, grouped_attention(config))


VARIANTS: Mapping[str, DecoderFamily] = {
    "arcee": plain(_arcee, _ARCEE),
    "cohere": plain(_cohere, _COHERE),
    "cohere2": plain(_cohere2, _COHERE),
    "ernie4_5": plain(_ernie),
    "glm": plain(_glm, _GLM),
    "glm4": plain(_glm, _GLM4),
    "granite": plain(_granite),
    "helium": plain(_helium),
    "hunyuan_v1_dense": plain(_hunyuan, _HUNYUAN),
    "jais2": plain(_jais2, _NEMOTRON),
    "nemotron": plain(_nemotron, _NEMOTRON),
    "phi": plain(_phi, _PHI),
    "seed_oss": plain(_seed),
    "smollm3": plain(_smollm3),
    "stablelm": DecoderFamily(_stablelm, _stablelm_sources),
    "starcoder2": plain(_starcoder2, _STARCODER2),
}
