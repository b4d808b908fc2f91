"""Decoders with LayerNorm and biases: the generation before Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ds_inference.families.family_spec import (
    Config,
    DecoderFamily,
    Sources,
    ends_of,
    first_of,
    heads_of,
    plain,
    rope_of,
    rows,
    undeclared,
)
from ds_inference.spec import Alibi, AttentionSpec, DecoderLayerSpec, DecoderSpec, Mlp, Norm, RopeSpec, WeightSource

__all__ = ["OLDER"]


def _both(role: str, name: str, form: Any = "rows") -> dict[str, tuple[WeightSource, ...]]:
    """Map a role's weight and bias to a tensor each; only matrices have a form other than rows."""
    bias: Any = form if form in ("heads", "groups") else "rows"
    return {
        f"{role}.weight": (WeightSource((f"{name}.weight",), form),),
        f"{role}.bias": (WeightSource((f"{name}.bias",), bias, optional=True),),
    }


def _layers(prefix: str, parts: Mapping[str, tuple[str, str] | str]) -> dict[str, tuple[WeightSource, ...]]:
    sources: dict[str, tuple[WeightSource, ...]] = {}
    for role, name in parts.items():
        name, form = (name, "rows") if isinstance(name, str) else name
        sources |= _both(f"layers.{{i}}.{role}", prefix + name, form)
    return sources


def _older(config: Config, attention: AttentionSpec, feed: Mlp, eps: float, **more: Any) -> DecoderSpec:
    order = more.pop("order", "pre")
    count = first_of(config, "num_hidden_layers", "n_layer")
    spec = DecoderSpec(
        family=config["model_type"],
        hidden=first_of(config, "hidden_size", "n_embd"),
        vocab=config["vocab_size"],
        layers=(DecoderLayerSpec(attention, feed, order),) * count,
        norm=Norm("layer", eps),
        max_seq_len=first_of(config, "max_position_embeddings", "n_positions", "seq_length", default=2048),
        tied=bool(config.get("tie_word_embeddings", True)),
        eos_ids=ends_of(config),
    )
    return replace(spec, **more)


def _gpt2(config: Config) -> DecoderSpec:
    hidden, heads = config["n_embd"], config["n_head"]
    width = hidden // heads
    scale = width**-0.5 if config.get("scale_attn_weights", True) else 1.0
    attention = AttentionSpec(heads, heads, width, width, scale)
    feed = Mlp(config.get("n_inner") or 4 * hidden, config.get("activation_function", "gelu_new"), gated=False)
    table = (config["n_positions"], 0)
    spec = _older(config, attention, feed, config.get("layer_norm_epsilon", 1e-5), positions=table)
    if not config.get("scale_attn_by_inverse_layer_idx"):
        return spec
    layers = tuple(
        replace(y, attention=replace(y.attention, scale=y.attention.scale / (i + 1))) for i, y in enumerate(spec.layers)
    )
    return replace(spec, layers=layers)


_GPT2 = {
    "embed.weight": rows("transformer.wte.weight"),
    "positions.weight": rows("transformer.wpe.weight"),
    **_both("norm", "transformer.ln_f"),
    "head.weight": rows("lm_head.weight", optional=True),
    **_layers(
        "transformer.h.{i}.",
        {
            "norm1": "ln_1",
            "norm2": "ln_2",
            "attention.qkv": ("attn.c_attn", "columns"),
            "attention.out": ("attn.c_proj", "columns"),
            "feed.up": ("mlp.c_fc", "columns"),
            "feed.down": ("mlp.c_proj", "columns"),
        },
    ),
}


def _gpt_neox(config: Config) -> DecoderSpec:
    heads, _, width = heads_of(config)
    attention = AttentionSpec(heads, heads, width, width, width**-0.5, rope_of({"rotary_pct": 0.25, **config}, width))
    feed = Mlp(config["intermediate_size"], config.get("hidden_act", "gelu"), gated=False)
    order = "parallel_norms" if config.get("use_parallel_residual", True) else "pre"
    tied = bool(config.get("tie_word_embeddings", False))
    return _older(config, attention, feed, config.get("layer_norm_eps", 1e-5), order=order, tied=tied)


_GPT_NEOX = {
    "embed.weight": rows("gpt_neox.embed_in.weight"),
    **_both("norm", "gpt_neox.final_layer_norm"),
    "head.weight": (
        WeightSource(("embed_out.weight",), optional=True),
        WeightSource(("lm_head.weight",), optional=True),
    ),
    **_layers(
        "gpt_neox.layers.{i}.",
        {
            "norm1": "input_layernorm",
            "norm2": "post_attention_layernorm",
            "attention.qkv": ("attention.query_key_value", "heads"),
            "attention.out": "attention.dense",
            "feed.up": "mlp.dense_h_to_4h",
            "feed.down": "mlp.dense_4h_to_h",
        },
    ),
}


def _opt(config: Config) -> DecoderSpec:
    heads, _, width = heads_of(config)
    attention = AttentionSpec(heads, heads, width, width, width**-0.5)
    feed = Mlp(config["ffn_dim"], config.get("activation_function", "relu"), gated=False)
    before = config.get("do_layer_norm_before", True)
    if not config.get("layer_norm_elementwise_affine", True):
        raise undeclared("OPT whose norms have no weights (layer_norm_elementwise_affine false)")
    return _older(
        config,
        attention,
        feed,
        1e-5,
        order="pre" if before else "after",
        positions=(config["max_position_embeddings"] + 2, 2),
        final_norm=before and not config.get("_remove_final_layer_norm", False),
        embed=config.get("word_embed_proj_dim"),
    )


_OPT_LAYER = "model.decoder.layers.{i}."
_OPT = {
    "embed.weight": rows("model.decoder.embed_tokens.weight"),
    "embed_in.weight": rows("model.decoder.project_in.weight", optional=True),
    "embed_out.weight": rows("model.decoder.project_out.weight", optional=True),
    "positions.weight": rows("model.decoder.embed_positions.weight"),
    "norm.weight": rows("model.decoder.final_layer_norm.weight", optional=True),
    "norm.bias": rows("model.decoder.final_layer_norm.bias", optional=True),
    "head.weight": rows("lm_head.weight", optional=True),
    **_layers(
        _OPT_LAYER,
        {
            "norm1": "self_attn_layer_norm",
            "norm2": "final_layer_norm",
            "attention.out": "self_attn.out_proj",
            "feed.up": "fc1",
            "feed.down": "fc2",
        },
    ),
    "layers.{i}.attention.qkv.weight": rows(*(_OPT_LAYER + f"self_attn.{p}_proj.weight" for p in "qkv")),
    "layers.{i}.attention.qkv.bias": rows(*(_OPT_LAYER + f"self_attn.{p}_proj.bias" for p in "qkv"), optional=True),
}


def _bloom(config: Config) -> DecoderSpec:
    hidden, heads = first_of(config, "hidden_size", "n_embed"), first_of(config, "n_head", "num_attention_heads")
    width = hidden // heads
    attention = AttentionSpec(heads, heads, width, width, width**-0.5, alibi=Alibi())
    feed = Mlp(4 * hidden, "gelu_new", gated=False)
    if config.get("apply_residual_connection_post_layernorm"):
        raise undeclared("BLOOM with apply_residual_connection_post_layernorm")
    settings = {**config, "hidden_size": hidden}
    return _older(
        settings, attention, feed, config.get("layer_norm_epsilon", 1e-5), embed_norm=True, max_seq_len=1 << 20
    )


_BLOOM_PARTS: dict[str, tuple[str, str] | str] = {
    "attention.qkv": ("self_attention.query_key_value", "heads"),
    "attention.out": "self_attention.dense",
    "feed.up": "mlp.dense_h_to_4h",
    "feed.down": "mlp.dense_4h_to_h",
}
_WORDS = {
    "embed.weight": rows("transformer.word_embeddings.weight"),
    **_both("norm", "transformer.ln_f"),
    "head.weight": rows("lm_head.weight", optional=True),
}
_BLOOM = {
    **_WORDS,
    **_both("embed_norm", "transformer.word_embeddings_layernorm"),
    **_layers("transformer.h.{i}.", {"norm1": "input_layernorm", "norm2": "post_attention_layernorm", **_BLOOM_PARTS}),
}


def _falcon(config: Config) -> DecoderSpec:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    new = config.get("new_decoder_architecture", False)
    kv_heads = (
        first_of(config, "num_kv_heads", default=heads) if new else 1 if config.get("multi_query", True) else heads
    )
    width = hidden // heads
    alibi = Alibi(width**-0.5, rounded=True) if config.get("alibi") else None
    attention = AttentionSpec(
        heads, kv_heads, width, width, width**-0.5, None if alibi else rope_of(config, width), alibi=alibi
    )
    feed = Mlp(first_of(config, "ffn_hidden_size", default=4 * hidden), config.get("activation", "gelu"), gated=False)
    two = new and first_of(config, "num_ln_in_parallel_attn", default=2) == 2
    order = "parallel_norms" if two else "parallel" if new or config.get("parallel_attn", True) else "pre"
    return _older(config, attention, feed, config.get("layer_norm_epsilon", 1e-5), order=order)


def _falcon_sources(config: Config) -> Sources:
    new = config.get("new_decoder_architecture", False)
    two = new and first_of(config, "num_ln_in_parallel_attn", default=2) == 2
    norms: dict[str, tuple[str, str] | str] = (
        {"norm1": "ln_attn", "norm2": "ln_mlp"} if two else {"norm1": "input_layernorm"}
    )
    if not new and not config.get("parallel_attn", True):
        norms["norm2"] = "post_attention_layernorm"
    form = "heads" if not new and not config.get("multi_query", True) else "groups"
    qkv = {"attention.qkv": ("self_attention.query_key_value", form)}
    return {**_WORDS, **_layers("transformer.h.{i}.", {**norms, **_BLOOM_PARTS, **qkv})}


def _gptj(config: Config) -> DecoderSpec:
    """Build the spec of GPT-J and CodeGen, which rotate the first `rotary_dim` features in neighbouring pairs."""
    hidden, heads = config["n_embd"], config["n_head"]
    width = hidden // heads
    rope = RopeSpec(first_of(config, "rotary_dim", default=width), interleaved=True)
    attention = AttentionSpec(heads, heads, width, width, width**-0.5, rope)
    feed = Mlp(config.get("n_inner") or 4 * hidden, config.get("activation_function", "gelu_new"), gated=False)
    tied = bool(config.get("tie_word_embeddings", False))
    return _older(config, attention, feed, config.get("layer_norm_epsilon", 1e-5), order="parallel", tied=tied)


_GPTJ_BLOCK = "transformer.h.{i}."
_GPTJ = {
    "embed.weight": rows("transformer.wte.weight"),
    **_both("norm", "transformer.ln_f"),
    "head.weight": rows("lm_head.weight", optional=True),
    "head.bias": rows("lm_head.bias", optional=True),
    **_layers(
        _GPTJ_BLOCK,
        {"norm1": "ln_1", "attention.out": "attn.out_proj", "feed.up": "mlp.fc_in", "feed.down": "mlp.fc_out"},
    ),
    "layers.{i}.attention.qkv.weight": rows(*(_GPTJ_BLOCK + f"attn.{p}_proj.weight" for p in "qkv")),
}
_CODEGEN = {
    **_GPTJ,
    "layers.{i}.attention.qkv.weight": (WeightSource((_GPTJ_BLOCK + "attn.qkv_proj.weight",), "shards"),),
}


def _big_code(config: Config) -> DecoderSpec:
    spec = _gpt2({"activation_function": "gelu_pytorch_tanh", **config})
    kv_heads = 1 if config.get("multi_query", True) else config["n_head"]
    return replace(
        spec,
        layers=tuple(replace(y, attention=replace(y.attention, kv_heads=kv_heads)) for y in spec.layers),
    )


def _big_code_sources(config: Config) -> Sources:
    form = "rows" if config.get("multi_query", True) else "heads"
    parts: dict[str, tuple[str, str] | str] = {
        "attention.qkv": ("attn.c_attn", form),
        "attention.out": "attn.c_proj",
        "feed.up": "mlp.c_fc",
        "feed.down": "mlp.c_proj",
    }
    return {**_GPT2, **_layers("transformer.h.{i}.", parts)}


def _mpt(config: Config) -> DecoderSpec:
    hidden, heads, inner = config["d_model"], config["n_heads"], config.get("attn_config") or {}
    odd = {"alibi": True, "alibi_bias_max": 8, "qk_ln": False, "prefix_lm": False, "attn_type": "multihead_attention"}
    wrong = {k: inner[k] for k, usual in odd.items() if inner.get(k, usual) != usual}
    if wrong:
        raise undeclared(f"MPT with {wrong}")
    width = hidden // heads
    scale = first_of(inner, "softmax_scale", default=width**-0.5)
    attention = AttentionSpec(
        heads, heads, width, width, float(scale), alibi=Alibi(), clip=inner.get("clip_qkv") or None
    )
    feed = Mlp(4 * hidden, "gelu", gated=False)
    settings = {**config, "hidden_size": hidden, "num_hidden_layers": config["n_layers"]}
    return _older(settings, attention, feed, config.get("layer_norm_epsilon", 1e-5), max_seq_len=config["max_seq_len"])


_MPT = {
    "embed.weight": rows("transformer.wte.weight"),
    **_both("norm", "transformer.norm_f"),
    "head.weight": rows("lm_head.weight", optional=True),
    **_layers(
        "transformer.blocks.{i}.",
        {
            "norm1": "norm_1",
            "norm2": "norm_2",
            "attention.qkv": "attn.Wqkv",
            "attention.out": "attn.out_proj",
            "feed.up": "ffn.up_proj",
            "feed.down": "ffn.down_proj",
        },
    ),
}


OLDER: Mapping[str, DecoderFamily] = {
    "bloom": plain(_bloom, _BLOOM),
    "codegen": plain(_gptj, _CODEGEN),
    "falcon": DecoderFamily(_falcon, _falcon_sources),
    "gpt2": plain(_gpt2, _GPT2),
    "gpt_bigcode": DecoderFamily(_big_code, _big_code_sources),
    "gpt_neox": plain(_gpt_neox, _GPT_NEOX),
    "gptj": plain(_gptj, _GPTJ),
    "mpt": plain(_mpt, _MPT),
    "opt": plain(_opt, _OPT),
}
