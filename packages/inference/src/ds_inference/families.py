"""Families of decoders as declarations: what their configuration means, and where their checkpoints keep what.

A new family is one function and one table. Configurations are plain dicts (`config.json`, or `config.to_dict()`), of transformers
4 and 5 alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_config.errors import UnsupportedError
from ds_inference.spec import Alibi, Attention, Experts, Latent, Layer, Mlp, Norm, Rope, Source, Spec

__all__ = ["FAMILIES", "Family", "family_of"]

Config = Mapping[str, Any]
Sources = Mapping[str, tuple[Source, ...]]
"""By role: the first source whose names the checkpoint has is taken. Layers' roles have `{i}`."""


@dataclass(frozen=True, slots=True)
class Family:
    """How a family is read.

    Attributes:
        spec: From a configuration.
        sources: From a configuration: roles and their tensors.
    """

    spec: Callable[[Config], Spec]
    sources: Callable[[Config], Sources]


def family_of(config: Config) -> Family:
    """The declaration for a configuration.

    Raises:
        UnsupportedError: nobody declared it ("inference-family").
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise UnsupportedError(
            f"model_type {kind!r} has no declaration; there are {', '.join(sorted(FAMILIES))}",
            code="inference-family",
            fix="Load the model with transformers and pass the module: it then runs through its own forward, slower.",
        )
    return FAMILIES[kind]


# ---- parts that many share


def _get(config: Config, *names: str, default: Any = None) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    return default


def _ends(config: Config) -> tuple[int, ...]:
    found = config.get("eos_token_id")
    return () if found is None else tuple(found) if isinstance(found, Sequence) else (found,)


def _rope(config: Config, width: int, *, kind: str | None = None, interleaved: bool = False) -> Rope:
    """Rotation of `width` features a head, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    given = config.get("rope_parameters") or {}
    if kind is not None and isinstance(given.get(kind), Mapping):
        given = given[kind]
    scaling = config.get("rope_scaling") or {}
    parameters = {**scaling, **given}
    if "type" in parameters:
        parameters.setdefault("rope_type", parameters.pop("type"))
    theta: Any = parameters.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10000.0)))
    share = parameters.get("partial_rotary_factor", _get(config, "partial_rotary_factor", "rotary_pct", default=1.0))
    if (original := config.get("original_max_position_embeddings")) is not None:
        parameters.setdefault("original_max_position_embeddings", original)
    parameters.setdefault("max_position_embeddings", config.get("max_position_embeddings", 0))
    return Rope(int(width * share), float(theta), parameters, interleaved)


def _heads(config: Config) -> tuple[int, int, int]:
    heads = _get(config, "num_attention_heads", "n_head")
    hidden = _get(config, "hidden_size", "n_embd")
    return heads, _get(config, "num_key_value_heads", default=heads), _get(config, "head_dim", default=hidden // heads)


def _grouped(config: Config, **more: Any) -> Attention:
    """Rotary attention with as many key heads as the configuration says."""
    heads, kv_heads, width = _heads(config)
    attention = Attention(heads, kv_heads, width, width, width**-0.5, _rope(config, width))
    return replace(attention, **more)


def _windows(config: Config, layers: int) -> list[int | None]:
    """The window of every layer."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if window is None or config.get("use_sliding_window") is False:
        return [None] * layers
    if kinds is not None:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    first = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
    return [window if i >= first else None for i in range(layers)]


def _llama_like(
    config: Config,
    attentions: Sequence[Attention],
    feeds: Sequence[Mlp | Experts],
    *,
    norm: Norm | None = None,
    order: Any = "pre",
    **more: Any,
) -> Spec:
    layers = tuple(Layer(a, f, order) for a, f in zip(attentions, feeds, strict=True))
    found = Spec(
        family=config["model_type"],
        hidden=config["hidden_size"],
        vocab=config["vocab_size"],
        layers=layers,
        norm=norm or Norm("rms", config.get("rms_norm_eps", 1e-6)),
        longest=config.get("max_position_embeddings", 2048),
        tied=bool(config.get("tie_word_embeddings", False)),
        ends=_ends(config),
    )
    return replace(found, **more)


def _gated(config: Config, width: int | None = None) -> Mlp:
    kind = _get(config, "hidden_activation", "hidden_act", default="silu")
    return Mlp(width or config["intermediate_size"], kind, gated=True)


def _rows(*names: str, optional: bool = False) -> tuple[Source, ...]:
    return (Source(names, optional=optional),)


def _attention_rows(prefix: str) -> dict[str, tuple[Source, ...]]:
    parts = [f"{prefix}self_attn.{p}_proj" for p in ("q", "k", "v")]
    return {
        "layers.{i}.attention.qkv.weight": _rows(*(f"{p}.weight" for p in parts)),
        "layers.{i}.attention.qkv.bias": _rows(*(f"{p}.bias" for p in parts), optional=True),
        "layers.{i}.attention.out.weight": _rows(f"{prefix}self_attn.o_proj.weight"),
        "layers.{i}.attention.out.bias": _rows(f"{prefix}self_attn.o_proj.bias", optional=True),
        "layers.{i}.attention.q_norm.weight": _rows(f"{prefix}self_attn.q_norm.weight", optional=True),
        "layers.{i}.attention.k_norm.weight": _rows(f"{prefix}self_attn.k_norm.weight", optional=True),
    }


def _mlp_rows(prefix: str) -> dict[str, tuple[Source, ...]]:
    parts = [f"{prefix}mlp.{p}_proj" for p in ("gate", "up")]
    return {
        "layers.{i}.feed.up.weight": _rows(*(f"{p}.weight" for p in parts), optional=True),
        "layers.{i}.feed.up.bias": _rows(*(f"{p}.bias" for p in parts), optional=True),
        "layers.{i}.feed.down.weight": _rows(f"{prefix}mlp.down_proj.weight", optional=True),
        "layers.{i}.feed.down.bias": _rows(f"{prefix}mlp.down_proj.bias", optional=True),
    }


_OUTER = {
    "embed.weight": _rows("model.embed_tokens.weight"),
    "norm.weight": _rows("model.norm.weight"),
    "head.weight": _rows("lm_head.weight", optional=True),
    "head.bias": _rows("lm_head.bias", optional=True),
}
_LAYER = "model.layers.{i}."
_TWO_NORMS = {
    "layers.{i}.norm1.weight": _rows(_LAYER + "input_layernorm.weight"),
    "layers.{i}.norm2.weight": _rows(_LAYER + "post_attention_layernorm.weight"),
}
_LLAMA = {**_OUTER, **_TWO_NORMS, **_attention_rows(_LAYER), **_mlp_rows(_LAYER)}


def _plain(build: Callable[[Config], Spec], sources: Sources = _LLAMA) -> Family:
    return Family(build, lambda config: sources)


# ---- Llama and its kin


def _llama(config: Config) -> Spec:
    count = config["num_hidden_layers"]
    windows = _windows(config, count) if config["model_type"] != "llama" else [None] * count
    attention = _grouped(config)
    return _llama_like(config, [replace(attention, window=w) for w in windows], [_gated(config)] * count)


def _qwen3(config: Config) -> Spec:
    spec = _llama(config)
    norm = spec.norm
    return replace(spec, layers=tuple(replace(y, attention=replace(y.attention, head_norm=norm)) for y in spec.layers))


def _gemma(config: Config) -> Spec:
    count = config["num_hidden_layers"]
    norm = Norm("rms", config.get("rms_norm_eps", 1e-6), offset=1.0)
    feed = Mlp(config["intermediate_size"], _get(config, "hidden_activation", default="gelu_pytorch_tanh"), gated=True)
    scale = math.sqrt(config["hidden_size"])
    return _llama_like(config, [_grouped(config)] * count, [feed] * count, norm=norm, embed_scale=scale)


def _gemma2(config: Config) -> Spec:
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


def _gemma3(config: Config) -> Spec:
    pattern = config.get("_sliding_window_pattern", config.get("sliding_window_pattern", 6))
    kinds = config.get("layer_types") or [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(config["num_hidden_layers"])
    ]
    spec = _gemma2({**config, "layer_types": kinds})
    width = spec.layers[0].attention.width
    full = _rope(config, width, kind="full_attention")
    near = _rope(config, width, kind="sliding_attention")
    if not isinstance((config.get("rope_parameters") or {}).get("sliding_attention"), Mapping):  # transformers 4
        near = Rope(width, float(config.get("rope_local_base_freq", 10000.0)))
    layers = tuple(
        replace(y, attention=replace(y.attention, head_norm=spec.norm, rope=near if k == "sliding_attention" else full))
        for y, k in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=layers)


_FOUR_NORMS = {
    "layers.{i}.norm1.weight": _rows(_LAYER + "input_layernorm.weight"),
    "layers.{i}.norm2.weight": _rows(_LAYER + "post_attention_layernorm.weight"),
    "layers.{i}.norm3.weight": _rows(_LAYER + "pre_feedforward_layernorm.weight"),
    "layers.{i}.norm4.weight": _rows(_LAYER + "post_feedforward_layernorm.weight"),
}


def _phi3(config: Config) -> Spec:
    count = config["num_hidden_layers"]
    heads, kv_heads, width = _heads(config)
    attention = Attention(heads, kv_heads, width, width, width**-0.5, _rope(config, width))
    windows = _windows(config, count)
    return _llama_like(config, [replace(attention, window=w) for w in windows], [_gated(config)] * count)


_PHI3 = {
    **_LLAMA,
    "layers.{i}.attention.qkv.weight": _rows(_LAYER + "self_attn.qkv_proj.weight"),
    "layers.{i}.attention.qkv.bias": _rows(_LAYER + "self_attn.qkv_proj.bias", optional=True),
    "layers.{i}.feed.up.weight": _rows(_LAYER + "mlp.gate_up_proj.weight"),
}


def _exaone4(config: Config) -> Spec:
    count = config["num_hidden_layers"]
    norm = Norm("rms", config.get("rms_norm_eps", 1e-5))
    base = _grouped(config, head_norm=norm)
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
    return _llama_like(config, attentions, [_gated(config)] * count, norm=norm, order="post")


_EXAONE4 = {
    **_LLAMA,
    "layers.{i}.norm1.weight": _rows(_LAYER + "post_attention_layernorm.weight"),
    "layers.{i}.norm2.weight": _rows(_LAYER + "post_feedforward_layernorm.weight"),
}


def _olmo2(config: Config) -> Spec:
    count = config["num_hidden_layers"]
    norm = Norm("rms", config.get("rms_norm_eps", 1e-5))
    attention = _grouped(config, whole_norm=norm)
    return _llama_like(config, [attention] * count, [_gated(config)] * count, norm=norm, order="post")


# ---- experts


def _expert_rows(gate: Sequence[str], old: tuple[str, str, str], block: str = "mlp") -> dict[str, tuple[Source, ...]]:
    """Experts as a packed tensor (transformers 5 in memory), or as one module each (files, and transformers 4).

    Args:
        gate: Names the router's weight may have.
        old: Names of one expert's gate, up and down matrices, with `{e}`.
    """
    packed = _LAYER + "mlp.experts."
    first, up, down = (_LAYER + name for name in old)
    return {
        "layers.{i}.feed.router.weight": tuple(Source((_LAYER + name,), optional=True) for name in gate),
        "layers.{i}.feed.experts.up": (
            Source((packed + "gate_up_proj",), optional=True),
            Source((first, up), "stack", optional=True),
        ),
        "layers.{i}.feed.experts.down": (
            Source((packed + "down_proj",), optional=True),
            Source((down,), "stack", optional=True),
        ),
    }


def _mixtral(config: Config) -> Spec:
    count = config["num_hidden_layers"]
    feed = Experts(config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"])
    attention = _grouped(config)
    return _llama_like(config, [replace(attention, window=w) for w in _windows(config, count)], [feed] * count)


_MIXTRAL = {
    **_LLAMA,
    **_expert_rows(
        ("mlp.gate.weight", "block_sparse_moe.gate.weight"),
        tuple(f"block_sparse_moe.experts.{{e}}.{w}.weight" for w in ("w1", "w3", "w2")),  # type: ignore[arg-type]
    ),
}
_NAMED = ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight", "mlp.experts.{e}.down_proj.weight")


def _sparse(config: Config, feed: Experts) -> list[Mlp | Experts]:
    """Which layers have experts: every `decoder_sparse_step`-th, but those of `mlp_only_layers`."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    count = config["num_hidden_layers"]
    return [feed if i not in dense and (i + 1) % step == 0 else _gated(config) for i in range(count)]


def _qwen2_moe(config: Config) -> Spec:
    feed = Experts(
        _get(config, "num_experts", "num_local_experts"),
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        normalized=config.get("norm_topk_prob", False),
        shared=config["shared_expert_intermediate_size"],
        shared_gate=True,
    )
    count = config["num_hidden_layers"]
    attention = _grouped(config)
    windows = _windows(config, count)
    return _llama_like(config, [replace(attention, window=w) for w in windows], _sparse(config, feed))


def _qwen3_moe(config: Config) -> Spec:
    feed = Experts(
        _get(config, "num_experts", "num_local_experts"),
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        normalized=config.get("norm_topk_prob", False),
    )
    norm = Norm("rms", config.get("rms_norm_eps", 1e-6))
    attention = _grouped(config, head_norm=norm)
    windows = _windows(config, config["num_hidden_layers"])
    return _llama_like(config, [replace(attention, window=w) for w in windows], _sparse(config, feed))


_QWEN_MOE = {
    **_LLAMA,
    **_expert_rows(("mlp.gate.weight",), _NAMED),
    "layers.{i}.feed.shared.up.weight": _rows(
        *(_LAYER + f"mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up")), optional=True
    ),
    "layers.{i}.feed.shared.down.weight": _rows(_LAYER + "mlp.shared_expert.down_proj.weight", optional=True),
    "layers.{i}.feed.shared_gate.weight": _rows(_LAYER + "mlp.shared_expert_gate.weight", optional=True),
}


def _olmoe(config: Config) -> Spec:
    count = config["num_hidden_layers"]
    feed = Experts(
        _get(config, "num_experts", "num_local_experts"),
        config["num_experts_per_tok"],
        config["intermediate_size"],
        normalized=config.get("norm_topk_prob", False),
    )
    norm = Norm("rms", config.get("rms_norm_eps", 1e-5))
    return _llama_like(config, [_grouped(config, whole_norm=norm)] * count, [feed] * count, norm=norm)


def _gpt_oss(config: Config) -> Spec:
    count = config["num_hidden_layers"]
    feed = Experts(
        config["num_local_experts"],
        config["num_experts_per_tok"],
        config["intermediate_size"],
        score="softmax_chosen",
        clamp=float(config.get("swiglu_limit", 7.0)),
        alpha=float(config.get("swiglu_alpha", 1.702)),
    )
    kinds = config.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    base = _grouped(config, sinks=True)
    windows = [config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    return _llama_like(config, [replace(base, window=w) for w in windows], [feed] * count)


def _oss(role: str, name: str, form: Any = "rows") -> dict[str, tuple[Source, ...]]:
    return {f"layers.{{i}}.{role}": (Source((_LAYER + name,), form),)}


_GPT_OSS = {
    **{k: v for k, v in _LLAMA.items() if ".feed." not in k},
    **_oss("attention.sinks", "self_attn.sinks"),
    **_oss("feed.router.weight", "mlp.router.weight"),
    **_oss("feed.router.bias", "mlp.router.bias"),
    **_oss("feed.experts.up", "mlp.experts.gate_up_proj", "paired"),
    **_oss("feed.experts.up_bias", "mlp.experts.gate_up_proj_bias", "paired"),
    **_oss("feed.experts.down", "mlp.experts.down_proj", "swapped"),
    **_oss("feed.experts.down_bias", "mlp.experts.down_proj_bias"),
}


def _deepseek(config: Config) -> Spec:
    heads, plain, rotated = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    third = config["model_type"] == "deepseek_v3"
    latent = Latent(config["kv_lora_rank"], config.get("q_lora_rank"), plain, rotated)
    rope = _rope(
        {**config, "partial_rotary_factor": 1.0}, rotated, interleaved=bool(config.get("rope_interleave", True))
    )
    parameters = rope.parameters
    scale, stretched = (plain + rotated) ** -0.5, parameters.get("rope_type", "default") != "default"
    if third and stretched and parameters.get("mscale_all_dim"):
        factor = float(parameters["factor"])
        grown = 1.0 if factor <= 1 else 0.1 * parameters["mscale_all_dim"] * math.log(factor) + 1.0
        scale *= grown * grown
    attention = Attention(heads, heads, plain + rotated, config["v_head_dim"], scale, rope, latent=latent)
    feed = Experts(
        _get(config, "n_routed_experts", "num_local_experts"),
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        score="sigmoid" if third else "softmax",
        normalized=bool(config.get("norm_topk_prob", False)) and third,
        scale=config.get("routed_scaling_factor", 1.0),
        groups=config.get("n_group") or 1 if third or config.get("topk_method") == "group_limited_greedy" else 1,
        chosen_groups=config.get("topk_group") or 1,
        group_score="pair" if third else "best",
        corrected=third,
        shared=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
    )
    dense = config.get("first_k_dense_replace", 0)
    kinds = config.get("mlp_layer_types")
    count = config["num_hidden_layers"]
    sparse = [k == "sparse" for k in kinds] if kinds else [i >= dense for i in range(count)]
    return _llama_like(config, [attention] * count, [feed if s else _gated(config) for s in sparse])


_DEEPSEEK = {
    **{k: v for k, v in _LLAMA.items() if ".qkv." not in k and "_norm" not in k},
    **_expert_rows(("mlp.gate.weight",), _NAMED),
    "layers.{i}.attention.q.weight": _rows(_LAYER + "self_attn.q_proj.weight", optional=True),
    "layers.{i}.attention.q_down.weight": _rows(_LAYER + "self_attn.q_a_proj.weight", optional=True),
    "layers.{i}.attention.q_down.bias": _rows(_LAYER + "self_attn.q_a_proj.bias", optional=True),
    "layers.{i}.attention.q_down_norm.weight": _rows(_LAYER + "self_attn.q_a_layernorm.weight", optional=True),
    "layers.{i}.attention.q_up.weight": _rows(_LAYER + "self_attn.q_b_proj.weight", optional=True),
    "layers.{i}.attention.kv_down.weight": _rows(_LAYER + "self_attn.kv_a_proj_with_mqa.weight"),
    "layers.{i}.attention.kv_down.bias": _rows(_LAYER + "self_attn.kv_a_proj_with_mqa.bias", optional=True),
    "layers.{i}.attention.kv_down_norm.weight": _rows(_LAYER + "self_attn.kv_a_layernorm.weight"),
    "layers.{i}.attention.kv_up.weight": _rows(_LAYER + "self_attn.kv_b_proj.weight"),
    "layers.{i}.feed.correction": _rows(_LAYER + "mlp.gate.e_score_correction_bias", optional=True),
    "layers.{i}.feed.shared.up.weight": _rows(
        *(_LAYER + f"mlp.shared_experts.{p}_proj.weight" for p in ("gate", "up")), optional=True
    ),
    "layers.{i}.feed.shared.down.weight": _rows(_LAYER + "mlp.shared_experts.down_proj.weight", optional=True),
}


# ---- LayerNorm and biases: the generation before


def _both(role: str, name: str, form: Any = "rows") -> dict[str, tuple[Source, ...]]:
    """Weight and bias of one tensor each; only matrices have a form that is not rows."""
    bias: Any = form if form in ("heads", "groups") else "rows"
    return {
        f"{role}.weight": (Source((f"{name}.weight",), form),),
        f"{role}.bias": (Source((f"{name}.bias",), bias, optional=True),),
    }


def _layers(prefix: str, parts: Mapping[str, tuple[str, str] | str]) -> dict[str, tuple[Source, ...]]:
    found: dict[str, tuple[Source, ...]] = {}
    for role, name in parts.items():
        name, form = (name, "rows") if isinstance(name, str) else name
        found |= _both(f"layers.{{i}}.{role}", prefix + name, form)
    return found


def _older(config: Config, attention: Attention, feed: Mlp, eps: float, **more: Any) -> Spec:
    order = more.pop("order", "pre")
    count = _get(config, "num_hidden_layers", "n_layer")
    found = Spec(
        family=config["model_type"],
        hidden=_get(config, "hidden_size", "n_embd"),
        vocab=config["vocab_size"],
        layers=(Layer(attention, feed, order),) * count,
        norm=Norm("layer", eps),
        longest=_get(config, "max_position_embeddings", "n_positions", "seq_length", default=2048),
        tied=bool(config.get("tie_word_embeddings", True)),
        ends=_ends(config),
    )
    return replace(found, **more)


def _gpt2(config: Config) -> Spec:
    hidden, heads = config["n_embd"], config["n_head"]
    width = hidden // heads
    scale = width**-0.5 if config.get("scale_attn_weights", True) else 1.0
    attention = Attention(heads, heads, width, width, scale)
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
    "embed.weight": _rows("transformer.wte.weight"),
    "positions.weight": _rows("transformer.wpe.weight"),
    **_both("norm", "transformer.ln_f"),
    "head.weight": _rows("lm_head.weight", optional=True),
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


def _gpt_neox(config: Config) -> Spec:
    heads, _, width = _heads(config)
    attention = Attention(heads, heads, width, width, width**-0.5, _rope({"rotary_pct": 0.25, **config}, width))
    feed = Mlp(config["intermediate_size"], config.get("hidden_act", "gelu"), gated=False)
    order = "parallel_norms" if config.get("use_parallel_residual", True) else "pre"
    tied = bool(config.get("tie_word_embeddings", False))
    return _older(config, attention, feed, config.get("layer_norm_eps", 1e-5), order=order, tied=tied)


_GPT_NEOX = {
    "embed.weight": _rows("gpt_neox.embed_in.weight"),
    **_both("norm", "gpt_neox.final_layer_norm"),
    "head.weight": (Source(("embed_out.weight",), optional=True), Source(("lm_head.weight",), optional=True)),
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


def _opt(config: Config) -> Spec:
    heads, _, width = _heads(config)
    attention = Attention(heads, heads, width, width, width**-0.5)
    feed = Mlp(config["ffn_dim"], config.get("activation_function", "relu"), gated=False)
    before = config.get("do_layer_norm_before", True)
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
    "embed.weight": _rows("model.decoder.embed_tokens.weight"),
    "embed_in.weight": _rows("model.decoder.project_in.weight", optional=True),
    "embed_out.weight": _rows("model.decoder.project_out.weight", optional=True),
    "positions.weight": _rows("model.decoder.embed_positions.weight"),
    "norm.weight": _rows("model.decoder.final_layer_norm.weight", optional=True),
    "norm.bias": _rows("model.decoder.final_layer_norm.bias", optional=True),
    "head.weight": _rows("lm_head.weight", optional=True),
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
    "layers.{i}.attention.qkv.weight": _rows(*(_OPT_LAYER + f"self_attn.{p}_proj.weight" for p in "qkv")),
    "layers.{i}.attention.qkv.bias": _rows(*(_OPT_LAYER + f"self_attn.{p}_proj.bias" for p in "qkv"), optional=True),
}


def _bloom(config: Config) -> Spec:
    hidden, heads = _get(config, "hidden_size", "n_embed"), _get(config, "n_head", "num_attention_heads")
    width = hidden // heads
    attention = Attention(heads, heads, width, width, width**-0.5, alibi=Alibi())
    feed = Mlp(4 * hidden, "gelu_new", gated=False)
    if config.get("apply_residual_connection_post_layernorm"):
        raise UnsupportedError(
            "BLOOM with apply_residual_connection_post_layernorm has no declaration",
            code="inference-family",
            fix="Load the model with transformers and pass the module.",
        )
    given = {**config, "hidden_size": hidden}
    return _older(given, attention, feed, config.get("layer_norm_epsilon", 1e-5), embed_norm=True, longest=1 << 20)


_BLOOM_PARTS: dict[str, tuple[str, str] | str] = {
    "attention.qkv": ("self_attention.query_key_value", "heads"),
    "attention.out": "self_attention.dense",
    "feed.up": "mlp.dense_h_to_4h",
    "feed.down": "mlp.dense_4h_to_h",
}
_WORDS = {
    "embed.weight": _rows("transformer.word_embeddings.weight"),
    **_both("norm", "transformer.ln_f"),
    "head.weight": _rows("lm_head.weight", optional=True),
}
_BLOOM = {
    **_WORDS,
    **_both("embed_norm", "transformer.word_embeddings_layernorm"),
    **_layers("transformer.h.{i}.", {"norm1": "input_layernorm", "norm2": "post_attention_layernorm", **_BLOOM_PARTS}),
}


def _falcon(config: Config) -> Spec:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    new = config.get("new_decoder_architecture", False)
    kv_heads = _get(config, "num_kv_heads", default=heads) if new else 1 if config.get("multi_query", True) else heads
    width = hidden // heads
    alibi = Alibi(width**-0.5, rounded=True) if config.get("alibi") else None
    attention = Attention(
        heads, kv_heads, width, width, width**-0.5, None if alibi else _rope(config, width), alibi=alibi
    )
    feed = Mlp(_get(config, "ffn_hidden_size", default=4 * hidden), config.get("activation", "gelu"), gated=False)
    two = new and _get(config, "num_ln_in_parallel_attn", default=2) == 2
    order = "parallel_norms" if two else "parallel" if new or config.get("parallel_attn", True) else "pre"
    return _older(config, attention, feed, config.get("layer_norm_epsilon", 1e-5), order=order)


def _falcon_sources(config: Config) -> Sources:
    new = config.get("new_decoder_architecture", False)
    two = new and _get(config, "num_ln_in_parallel_attn", default=2) == 2
    norms: dict[str, tuple[str, str] | str] = (
        {"norm1": "ln_attn", "norm2": "ln_mlp"} if two else {"norm1": "input_layernorm"}
    )
    if not new and not config.get("parallel_attn", True):
        norms["norm2"] = "post_attention_layernorm"
    form = "heads" if not new and not config.get("multi_query", True) else "groups"
    qkv = {"attention.qkv": ("self_attention.query_key_value", form)}
    return {**_WORDS, **_layers("transformer.h.{i}.", {**norms, **_BLOOM_PARTS, **qkv})}


FAMILIES: Mapping[str, Family] = {
    "bloom": _plain(_bloom, _BLOOM),
    "deepseek_v2": _plain(_deepseek, _DEEPSEEK),
    "deepseek_v3": _plain(_deepseek, _DEEPSEEK),
    "exaone4": _plain(_exaone4, _EXAONE4),
    "falcon": Family(_falcon, _falcon_sources),
    "gemma": _plain(_gemma),
    "gemma2": _plain(_gemma2, {**_LLAMA, **_FOUR_NORMS}),
    "gemma3_text": _plain(_gemma3, {**_LLAMA, **_FOUR_NORMS}),
    "gpt2": _plain(_gpt2, _GPT2),
    "gpt_neox": _plain(_gpt_neox, _GPT_NEOX),
    "gpt_oss": _plain(_gpt_oss, _GPT_OSS),
    "llama": _plain(_llama),
    "mistral": _plain(_llama),
    "mixtral": _plain(_mixtral, _MIXTRAL),
    "olmo2": _plain(_olmo2, _EXAONE4),
    "olmoe": _plain(_olmoe, {**_LLAMA, **_expert_rows(("mlp.gate.weight",), _NAMED)}),
    "opt": _plain(_opt, _OPT),
    "phi3": _plain(_phi3, _PHI3),
    "qwen2": _plain(_llama),
    "qwen2_moe": _plain(_qwen2_moe, _QWEN_MOE),
    "qwen3": _plain(_qwen3),
    "qwen3_moe": _plain(_qwen3_moe, _QWEN_MOE),
}
