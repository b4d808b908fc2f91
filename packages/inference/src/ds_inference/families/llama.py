"""Dense decoders with RMSNorm, gated MLPs and rotary positions: Llama and its kin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ds_inference.families.family_spec import (
    LAYER,
    LLAMA,
    Config,
    DecoderFamily,
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
from ds_inference.spec import AttentionSpec, DecoderSpec, Mlp, Norm, RopeSpec

__all__ = ["FOUR_NORMS", "LLAMA_LIKE", "PHI3"]


def _llama(config: Config) -> DecoderSpec:
    count = config["num_hidden_layers"]
    windows = windows_of(config, count) if config["model_type"] != "llama" else [None] * count
    attention = grouped_attention(config)
    return llama_like(config, [replace(attention, window=w) for w in windows], [gated_mlp(config)] * count)


def _qwen3(config: Config) -> DecoderSpec:
    spec = _llama(config)
    norm = spec.norm
    return replace(spec, layers=tuple(replace(y, attention=replace(y.attention, head_norm=norm)) for y in spec.layers))


def _gemma(config: Config) -> DecoderSpec:
    count = config["num_hidden_layers"]
    norm = Norm("rms", config.get("rms_norm_eps", 1e-6), offset=1.0)
    feed = Mlp(
        config["intermediate_size"],
        first_of(config, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        gated=True,
    )
    scale = math.sqrt(config["hidden_size"])
    return llama_like(config, [grouped_attention(config)] * count, [feed] * count, norm=norm, embed_scale=scale)


def _gemma2(config: Config) -> DecoderSpec:
    spec, count = _gemma(config), config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    scale = config["query_pre_attn_scalar"] ** -0.5
    layers = [
        replace(
            layer,
            order="sandwich",
            attention=replace(
                layer.attention,
                scale=scale,
                softcap=config.get("attn_logit_softcapping"),
                window=config["sliding_window"] if kind == "sliding_attention" else None,
            ),
        )
        for layer, kind in zip(spec.layers, kinds, strict=True)
    ]
    return replace(spec, layers=tuple(layers), logit_softcap=config.get("final_logit_softcapping"))


def _gemma3(config: Config) -> DecoderSpec:
    pattern = config.get("_sliding_window_pattern", config.get("sliding_window_pattern", 6))
    kinds = config.get("layer_types") or [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(config["num_hidden_layers"])
    ]
    spec = _gemma2({**config, "layer_types": kinds})
    width = spec.layers[0].attention.width
    full = rope_of(config, width, kind="full_attention")
    near = rope_of(config, width, kind="sliding_attention")
    if not isinstance((config.get("rope_parameters") or {}).get("sliding_attention"), Mapping):  # transformers 4
        near = RopeSpec(width, float(config.get("rope_local_base_freq", 10000.0)))
    # transformers' forward reads no attn_logit_softcapping here.
    layers = tuple(
        replace(
            y,
            attention=replace(
                y.attention, softcap=None, head_norm=spec.norm, rope=near if k == "sliding_attention" else full
            ),
        )
        for y, k in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=layers)


FOUR_NORMS = {
    "layers.{i}.norm1.weight": rows(LAYER + "input_layernorm.weight"),
    "layers.{i}.norm2.weight": rows(LAYER + "post_attention_layernorm.weight"),
    "layers.{i}.norm3.weight": rows(LAYER + "pre_feedforward_layernorm.weight"),
    "layers.{i}.norm4.weight": rows(LAYER + "post_feedforward_layernorm.weight"),
}


def _phi3(config: Config) -> DecoderSpec:
    count = config["num_hidden_layers"]
    heads, kv_heads, width = heads_of(config)
    attention = AttentionSpec(heads, kv_heads, width, width, width**-0.5, rope_of(config, width))
    windows = windows_of(config, count)
    return llama_like(config, [replace(attention, window=w) for w in windows], [gated_mlp(config)] * count)


PHI3 = {
    **LLAMA,
    "layers.{i}.attention.qkv.weight": rows(LAYER + "self_attn.qkv_proj.weight"),
    "layers.{i}.attention.qkv.bias": rows(LAYER + "self_attn.qkv_proj.bias", optional=True),
    "layers.{i}.feed.up.weight": rows(LAYER + "mlp.gate_up_proj.weight"),
}


def _exaone4(config: Config) -> DecoderSpec:
    count = config["num_hidden_layers"]
    norm = Norm("rms", config.get("rms_norm_eps", 1e-5))
    base = grouped_attention(config, head_norm=norm)
    window = config.get("sliding_window")
    kinds = config.get("layer_types") or ["full_attention"] * count
    attentions = [
        replace(base, window=window)
        if kind == "sliding_attention"
        else replace(
            base, rope=None if window is not None else base.rope
        )  # with windows, global layers know no positions
        for kind in kinds
    ]
    return llama_like(config, attentions, [gated_mlp(config)] * count, norm=norm, order="post")


_EXAONE4 = {
    **LLAMA,
    "layers.{i}.norm1.weight": rows(LAYER + "post_attention_layernorm.weight"),
    "layers.{i}.norm2.weight": rows(LAYER + "post_feedforward_layernorm.weight"),
}


def _olmo2(config: Config) -> DecoderSpec:
    count = config["num_hidden_layers"]
    norm = Norm("rms", config.get("rms_norm_eps", 1e-5))
    attention = grouped_attention(config, whole_norm=norm)
    return llama_like(config, [attention] * count, [gated_mlp(config)] * count, norm=norm, order="post")


def _olmo3(config: Config) -> DecoderSpec:
    spec, count = _olmo2(config), config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(count)]
    width = spec.layers[0].attention.width
    full, near = (rope_of(config, width, kind=kind) for kind in ("full_attention", "sliding_attention"))
    if not isinstance((config.get("rope_parameters") or {}).get("sliding_attention"), Mapping):  # transformers 4
        near = RopeSpec(width, near.theta)  # only what sees everything is stretched
    layers = tuple(
        replace(y, attention=replace(y.attention, rope=near, window=config["sliding_window"]))
        if kind == "sliding_attention"
        else replace(y, attention=replace(y.attention, rope=full))
        for y, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=layers)


def _vaultgemma(config: Config) -> DecoderSpec:
    spec = _gemma2(config)
    return replace(spec, layers=tuple(replace(layer, order="pre") for layer in spec.layers))


_VAULTGEMMA = {**LLAMA, "layers.{i}.norm2.weight": rows(LAYER + "pre_feedforward_layernorm.weight")}


LLAMA_LIKE: Mapping[str, DecoderFamily] = {
    "cwm": plain(_llama),
    "exaone4": plain(_exaone4, _EXAONE4),
    "gemma": plain(_gemma),
    "gemma2": plain(_gemma2, {**LLAMA, **FOUR_NORMS}),
    "gemma3_text": plain(_gemma3, {**LLAMA, **FOUR_NORMS}),
    "internlm3": plain(_llama),
    "llama": plain(_llama),
    "ministral": plain(_llama),
    "mistral": plain(_llama),
    "olmo2": plain(_olmo2, _EXAONE4),
    "olmo3": plain(_olmo3, _EXAONE4),
    "phi3": plain(_phi3, PHI3),
    "qwen2": plain(_llama),
    "qwen3": plain(_qwen3),
    "vaultgemma": plain(_vaultgemma, _VAULTGEMMA),
}
