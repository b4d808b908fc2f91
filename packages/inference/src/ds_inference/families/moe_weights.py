"""Decoders whose layers have experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

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
    undeclared,
    windows_of,
)
from ds_inference.families.variants import multiplied
from ds_inference.spec import AttentionSpec, DecoderSpec, ExpertsSpec, LatentAttentionSpec, Mlp, Norm, WeightSource
from ds_moe.moe_families import FAMILIES, MoEFamily

__all__ = ["SPARSE"]


def _expert_rows(
    gate: Sequence[str], old: tuple[str, str, str], block: str = "mlp"
) -> dict[str, tuple[WeightSource, ...]]:
    """Map expert roles to a packed tensor (transformers 5 in memory) or to a module each (files, transformers 4).

    Args:
        gate: Names the router's weight may have.
        old: Names of one expert's gate, up and down matrices, with `{e}`.
    """
    packed = LAYER + "mlp.experts."
    first, up, down = (LAYER + name for name in old)
    return {
        "layers.{i}.feed.router.weight": tuple(WeightSource((LAYER + name,), optional=True) for name in gate),
        "layers.{i}.feed.experts.up": (
            WeightSource((packed + "gate_up_proj",), optional=True),
            WeightSource((first, up), "stack", optional=True),
        ),
        "layers.{i}.feed.experts.down": (
            WeightSource((packed + "down_proj",), optional=True),
            WeightSource((down,), "stack", optional=True),
        ),
    }


def _routed(config: Config, width: int, family: MoEFamily | None = None, **more: Any) -> ExpertsSpec:
    """Describe the experts of a layer: the router as ds-moe's table of families has it, for training and for inference alike.

    Args:
        width: Of an expert.
        family: Of models that the table has no row for.
    """
    family = FAMILIES[config["model_type"]] if family is None else family
    how = family.selection(SimpleNamespace(**{family.k_attr: config[family.k_attr], **config}))
    count = first_of(config, *family.count_attrs)
    how.check(count)
    return ExpertsSpec(
        count,
        how.k,
        width,
        first_of(config, "hidden_act", default="silu"),
        score="softmax_chosen" if how.score == "softmax_of_chosen" else how.score,
        normalized=how.normalize,
        scale=how.scale,
        groups=how.groups,
        top_k_groups=how.limited_groups,
        group_score="pair" if how.group_score == "top2" else "best",
        **more,
    )


def _mixtral(config: Config) -> DecoderSpec:
    count = config["num_hidden_layers"]
    feed = _routed(config, config["intermediate_size"])
    attention = grouped_attention(config)
    return llama_like(config, [replace(attention, window=w) for w in windows_of(config, count)], [feed] * count)


_MIXTRAL = {
    **LLAMA,
    **_expert_rows(
        ("mlp.gate.weight", "block_sparse_moe.gate.weight"),
        tuple(f"block_sparse_moe.experts.{{e}}.{w}.weight" for w in ("w1", "w3", "w2")),  # type: ignore[arg-type]
    ),
}
_NAMED = ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight", "mlp.experts.{e}.down_proj.weight")


def _sparse(config: Config, feed: ExpertsSpec) -> list[Mlp | ExpertsSpec]:
    """Return the feed-forward of each layer: experts in every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    count = config["num_hidden_layers"]
    return [feed if i not in dense and (i + 1) % step == 0 else gated_mlp(config) for i in range(count)]


def _qwen2_moe(config: Config) -> DecoderSpec:
    shared = config["shared_expert_intermediate_size"]
    feed = _routed(config, config["moe_intermediate_size"], shared=shared, shared_gate=True)
    count = config["num_hidden_layers"]
    attention = grouped_attention(config)
    windows = windows_of(config, count)
    return llama_like(config, [replace(attention, window=w) for w in windows], _sparse(config, feed))


def _qwen3_moe(config: Config) -> DecoderSpec:
    feed = _routed(config, config["moe_intermediate_size"])
    norm = Norm("rms", config.get("rms_norm_eps", 1e-6))
    attention = grouped_attention(config, head_norm=norm)
    windows = windows_of(config, config["num_hidden_layers"])
    return llama_like(config, [replace(attention, window=w) for w in windows], _sparse(config, feed))


_QWEN_MOE = {
    **LLAMA,
    **_expert_rows(("mlp.gate.weight",), _NAMED),
    "layers.{i}.feed.shared.up.weight": rows(
        *(LAYER + f"mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up")), optional=True
    ),
    "layers.{i}.feed.shared.down.weight": rows(LAYER + "mlp.shared_expert.down_proj.weight", optional=True),
    "layers.{i}.feed.shared_gate.weight": rows(LAYER + "mlp.shared_expert_gate.weight", optional=True),
}


def _olmoe(config: Config) -> DecoderSpec:
    if config.get("clip_qkv") is not None:  # after the norms
        raise undeclared(f"OLMoE with clip_qkv = {config['clip_qkv']}")
    count = config["num_hidden_layers"]
    feed = _routed(config, config["intermediate_size"])
    norm = Norm("rms", config.get("rms_norm_eps", 1e-5))
    return llama_like(config, [grouped_attention(config, whole_norm=norm)] * count, [feed] * count, norm=norm)


def _gpt_oss(config: Config) -> DecoderSpec:
    count = config["num_hidden_layers"]
    clamp, alpha = float(config.get("swiglu_limit", 7.0)), float(config.get("swiglu_alpha", 1.702))
    feed = _routed(config, config["intermediate_size"], clamp=clamp, alpha=alpha)
    kinds = config.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    base = grouped_attention(config, sinks=True)
    windows = [config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    return llama_like(config, [replace(base, window=w) for w in windows], [feed] * count)


def _oss(role: str, name: str, form: Any = "rows") -> dict[str, tuple[WeightSource, ...]]:
    return {f"layers.{{i}}.{role}": (WeightSource((LAYER + name,), form),)}


_GPT_OSS = {
    **{k: v for k, v in LLAMA.items() if ".feed." not in k},
    **_oss("attention.sinks", "self_attn.sinks"),
    **_oss("feed.router.weight", "mlp.router.weight"),
    **_oss("feed.router.bias", "mlp.router.bias"),
    **_oss("feed.experts.up", "mlp.experts.gate_up_proj", "paired"),
    **_oss("feed.experts.up_bias", "mlp.experts.gate_up_proj_bias", "paired"),
    **_oss("feed.experts.down", "mlp.experts.down_proj", "swapped"),
    **_oss("feed.experts.down_bias", "mlp.experts.down_proj_bias"),
}


def _deepseek(config: Config) -> DecoderSpec:
    heads, plain, rotated = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    third = config["model_type"] == "deepseek_v3"
    latent = LatentAttentionSpec(config["kv_lora_rank"], config.get("q_lora_rank"), plain, rotated)
    rope = rope_of(
        {**config, "partial_rotary_factor": 1.0}, rotated, interleaved=bool(config.get("rope_interleave", True))
    )
    parameters = rope.parameters
    scale, stretched = (plain + rotated) ** -0.5, parameters.get("rope_type", "default") != "default"
    if third and stretched and parameters.get("mscale_all_dim"):
        factor = float(parameters["factor"])
        grown = 1.0 if factor <= 1 else 0.1 * parameters["mscale_all_dim"] * math.log(factor) + 1.0
        scale *= grown * grown
    attention = AttentionSpec(heads, heads, plain + rotated, config["v_head_dim"], scale, rope, latent=latent)
    shared = config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0)
    feed = _routed(config, config["moe_intermediate_size"], score_bias=third, shared=shared)
    dense = config.get("first_k_dense_replace", 0)
    kinds = config.get("mlp_layer_types")
    count = config["num_hidden_layers"]
    sparse = [k == "sparse" for k in kinds] if kinds else [i >= dense for i in range(count)]
    return llama_like(config, [attention] * count, [feed if s else gated_mlp(config) for s in sparse])


_DEEPSEEK = {
    **{k: v for k, v in LLAMA.items() if ".qkv." not in k and "_norm" not in k},
    **_expert_rows(("mlp.gate.weight",), _NAMED),
    "layers.{i}.attention.q.weight": rows(LAYER + "self_attn.q_proj.weight", optional=True),
    "layers.{i}.attention.q_down.weight": rows(LAYER + "self_attn.q_a_proj.weight", optional=True),
    "layers.{i}.attention.q_down.bias": rows(LAYER + "self_attn.q_a_proj.bias", optional=True),
    "layers.{i}.attention.q_down_norm.weight": rows(LAYER + "self_attn.q_a_layernorm.weight", optional=True),
    "layers.{i}.attention.q_up.weight": rows(LAYER + "self_attn.q_b_proj.weight", optional=True),
    "layers.{i}.attention.kv_down.weight": rows(LAYER + "self_attn.kv_a_proj_with_mqa.weight"),
    "layers.{i}.attention.kv_down.bias": rows(LAYER + "self_attn.kv_a_proj_with_mqa.bias", optional=True),
    "layers.{i}.attention.kv_down_norm.weight": rows(LAYER + "self_attn.kv_a_layernorm.weight"),
    "layers.{i}.attention.kv_up.weight": rows(LAYER + "self_attn.kv_b_proj.weight"),
    "layers.{i}.feed.correction": rows(LAYER + "mlp.gate.e_score_correction_bias", optional=True),
    "layers.{i}.feed.shared.up.weight": rows(
        *(LAYER + f"mlp.shared_experts.{p}_proj.weight" for p in ("gate", "up")), optional=True
    ),
    "layers.{i}.feed.shared.down.weight": rows(LAYER + "mlp.shared_experts.down_proj.weight", optional=True),
}


# ---- attention as in Llama or Qwen3, experts as in DeepSeek-V3


def _corrected(config: Config) -> list[Mlp | ExpertsSpec]:
    """Return the feed-forward of each layer: after the dense layers, experts selected by sigmoid and score bias."""
    width, shared = config["moe_intermediate_size"], config.get("n_shared_experts") or 0
    family = FAMILIES.get(config["model_type"], FAMILIES["deepseek_v3"])
    feed = _routed({"norm_topk_prob": True, **config}, width, family, score_bias=True, shared=width * shared)
    count, dense = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0
    return [feed if i >= dense else gated_mlp(config) for i in range(count)]


def _glm4_moe(config: Config) -> DecoderSpec:
    settings = {"partial_rotary_factor": 0.5, **config}
    norm = Norm("rms", config.get("rms_norm_eps", 1e-5))
    attention = grouped_attention(settings, head_norm=norm if config.get("use_qk_norm") else None)
    return llama_like(config, [attention] * config["num_hidden_layers"], _corrected(config))


def _dots1(config: Config) -> DecoderSpec:
    attention = grouped_attention(config, head_norm=Norm("rms", config.get("rms_norm_eps", 1e-6)))
    windows = windows_of(config, config["num_hidden_layers"])
    return llama_like(config, [replace(attention, window=w) for w in windows], _corrected(config))


def _solar_open(config: Config) -> DecoderSpec:
    return llama_like(config, [grouped_attention(config)] * config["num_hidden_layers"], _corrected(config))


_CORRECTED = {**LLAMA, **{role: source for role, source in _DEEPSEEK.items() if ".feed." in role}}


def _minimax_m2(config: Config) -> DecoderSpec:
    count, (_, _, width) = config["num_hidden_layers"], heads_of(config)
    turned = {"partial_rotary_factor": config["rotary_dim"] / width, **config} if config.get("rotary_dim") else config
    family = MoEFamily("minimax_m2", "sigmoid", epsilon=1e-20, count_attrs=("num_local_experts", "num_experts"))
    feed = _routed(config, config["intermediate_size"], family, score_bias=True)
    attention = grouped_attention(turned, whole_norm=Norm("rms", config.get("rms_norm_eps", 1e-6)))
    return llama_like(config, [attention] * count, [feed] * count)


_MINIMAX_M2 = {
    **_MIXTRAL,
    "layers.{i}.feed.correction": tuple(
        WeightSource((LAYER + f"{block}.e_score_correction_bias",), optional=True)
        for block in ("mlp", "block_sparse_moe")
    ),
}


# ---- others


def _granite_moe(config: Config) -> DecoderSpec:
    family = MoEFamily("granitemoe", "softmax_of_chosen", normalize=False)
    shared = config.get("shared_intermediate_size") or 0
    feed = _routed(config, config["intermediate_size"], family, shared=shared)
    count = config["num_hidden_layers"]
    return multiplied(config, llama_like(config, [grouped_attention(config)] * count, [feed] * count))


_GRANITE_MOE = {
    **LLAMA,
    **{
        f"layers.{{i}}.feed.{role}": tuple(
            WeightSource((LAYER + "block_sparse_moe." + n,), optional=True) for n in names
        )
        for role, names in {
            "router.weight": ("router.weight", "router.layer.weight"),
            "experts.up": ("experts.gate_up_proj", "input_linear.weight"),
            "experts.down": ("experts.down_proj", "output_linear.weight"),
        }.items()
    },
    "layers.{i}.feed.shared.up.weight": rows(LAYER + "shared_mlp.input_linear.weight", optional=True),
    "layers.{i}.feed.shared.down.weight": rows(LAYER + "shared_mlp.output_linear.weight", optional=True),
}


SPARSE: Mapping[str, DecoderFamily] = {
    "deepseek_v2": plain(_deepseek, _DEEPSEEK),
    "deepseek_v3": plain(_deepseek, _DEEPSEEK),
    "dots1": plain(_dots1, _CORRECTED),
    "glm4_moe": plain(_glm4_moe, _CORRECTED),
    "gpt_oss": plain(_gpt_oss, _GPT_OSS),
    "granitemoe": plain(_granite_moe, _GRANITE_MOE),
    "granitemoeshared": plain(_granite_moe, _GRANITE_MOE),
    "minimax_m2": plain(_minimax_m2, _MINIMAX_M2),
    "mixtral": plain(_mixtral, _MIXTRAL),
    "olmoe": plain(_olmoe, {**LLAMA, **_expert_rows(("mlp.gate.weight",), _NAMED)}),
    "qwen2_moe": plain(_qwen2_moe, _QWEN_MOE),
    "qwen3_moe": plain(_qwen3_moe, _QWEN_MOE),
    "solar_open": plain(_solar_open, _CORRECTED),
}
