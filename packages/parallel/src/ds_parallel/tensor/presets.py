"""Rules of the model families that are known, by transformers' `model_type`. Data only.

Every family is checked against one process in tests/world/test_families.py: logits, loss and gradients at two and four ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_config import nearest
from ds_config.errors import PlanError
from ds_parallel.tensor.dim_shards import HeadUnit, ShardPart
from ds_parallel.tensor.layer_rules import LayerRule, ShardKind

__all__ = ["PRESETS", "Preset", "preset_for", "preset_named"]

Scalar = str | int | float | bool | None

_Q, _KV, _GROUP, _EVEN = (
    ShardPart(HeadUnit.QUERY),
    ShardPart(HeadUnit.KEY_VALUE),
    ShardPart(HeadUnit.GROUP),
    ShardPart(),
)


@dataclass(frozen=True, slots=True)
class Preset:
    """Rules of one family.

    Attributes:
        name: As `preset_model` says it.
        model_types: transformers' names of what it is for.
        rules: In the order they are tried, on names below any prefix.
        when: Values that the model's configuration must have besides.
        head_arguments: Arguments of attention modules that hold something for every head, and are cut as the heads are.
    """

    name: str
    model_types: tuple[str, ...]
    rules: tuple[LayerRule, ...]
    when: tuple[tuple[str, Scalar], ...] = ()
    head_arguments: tuple[str, ...] = ()

    def fits(self, model_type: str | None, flags: Mapping[str, Scalar]) -> bool:
        return model_type in self.model_types and all(flags.get(key) == value for key, value in self.when)


def _rules(family: str, *lines: tuple[str, ShardKind, tuple[ShardPart, ...] | None]) -> tuple[LayerRule, ...]:
    """Build the rules of `family`; the output of a model's last layer (`head`) is gathered.

    Query and key norms sum their gradients.
    """
    return tuple(
        LayerRule(
            rf"(?:.*\.)?(?:{pattern})",
            kind,
            f"preset {family}",
            parts,
            gather_output=pattern in _HEADS,
            sum_gradient=kind is ShardKind.SKIP and "norm" in pattern,
        )
        for pattern, kind, parts in lines
    )


_HEAD = r"lm_head|embed_out|output_layer|output_projection|proj_out"
_MASKED = r"cls\.predictions\.decoder|lm_head\.decoder|generator_lm_head"
_HEADS = (_HEAD, _MASKED)
_COLUMN, _ROW, _SKIP = ShardKind.COLUMN, ShardKind.ROW, ShardKind.SKIP

_LLAMA_ATTENTION = (
    (r"self_attn\.q_proj", _COLUMN, (_Q,)),
    (r"self_attn\.[kv]_proj", _COLUMN, (_KV,)),
    (r"self_attn\.(?:o_proj|dense)", _ROW, (_Q,)),
    (r"self_attn\.[qk]_(?:norm|layernorm)", _SKIP, None),
)
_LLAMA_MLP = (
    (r"mlp\.(?:shared_expert\.)?(?:gate|up)_proj", _COLUMN, (_EVEN,)),
    (r"mlp\.(?:shared_expert\.)?down_proj", _ROW, (_EVEN,)),
)
_FUSED_MLP = ((r"mlp\.gate_up_proj", _COLUMN, (_EVEN, _EVEN)), (r"mlp\.down_proj", _ROW, (_EVEN,)))
_NEOX_MLP = ((r"mlp\.dense_h_to_4h", _COLUMN, (_EVEN,)), (r"mlp\.dense_4h_to_h", _ROW, (_EVEN,)))
_OUTSIDE = ((r"embed_tokens", ShardKind.VOCABULARY, None), (_HEAD, _COLUMN, (_EVEN,)))
_BIGCODE = (
    (r"attn\.c_proj", _ROW, (_Q,)),
    (r"mlp\.c_fc", _COLUMN, (_EVEN,)),
    (r"mlp\.c_proj", _ROW, (_EVEN,)),
    (r"wte", ShardKind.VOCABULARY, None),
    (_HEAD, _COLUMN, (_EVEN,)),
)
_FALCON = (
    (r"self_attention\.dense", _ROW, (_Q,)),
    *_NEOX_MLP,
    (r"word_embeddings", ShardKind.VOCABULARY, None),
    (_HEAD, _COLUMN, (_EVEN,)),
)

PRESETS: tuple[Preset, ...] = (
    Preset(
        "llama",
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "smollm3", "seed_oss"),
        _rules("llama", *_LLAMA_ATTENTION, *_LLAMA_MLP, *_OUTSIDE),
    ),
    Preset(
        "mixtral",
        ("mixtral", "qwen2_moe", "qwen3_moe"),
        _rules(
            "mixtral",
            *_LLAMA_ATTENTION,
            (r"mlp\.gate|block_sparse_moe\.gate|mlp\.shared_expert_gate", _SKIP, None),
            (r"mlp\.experts|block_sparse_moe\.experts", ShardKind.EXPERTS, None),
            *_LLAMA_MLP,
            *_OUTSIDE,
        ),
    ),
    Preset(
        "phi",
        ("phi",),
        _rules(
            "phi",
            *_LLAMA_ATTENTION,
            (r"mlp\.fc1", _COLUMN, (_EVEN,)),
            (r"mlp\.fc2", _ROW, (_EVEN,)),
            *_OUTSIDE,
        ),
    ),
    Preset(
        "phi3",
        ("phi3",),
        _rules(
            "phi3",
            (r"self_attn\.qkv_proj", _COLUMN, (_Q, _KV, _KV)),
            (r"self_attn\.o_proj", _ROW, (_Q,)),
            *_FUSED_MLP,
            *_OUTSIDE,
        ),
    ),
    Preset("glm", ("glm", "glm4"), _rules("glm", *_LLAMA_ATTENTION, *_FUSED_MLP, *_OUTSIDE)),
    Preset(
        "gpt2",
        ("gpt2",),
        _rules(
            "gpt2",
            (r"crossattention\.c_attn", _COLUMN, (_KV, _KV)),
            (r"crossattention\.q_attn", _COLUMN, (_Q,)),
            (r"attn\.c_attn", _COLUMN, (_Q, _KV, _KV)),
            (r"(?:attn|crossattention)\.c_proj", _ROW, (_Q,)),
            (r"mlp\.c_fc", _COLUMN, (_EVEN,)),
            (r"mlp\.c_proj", _ROW, (_EVEN,)),
            (r"wte", ShardKind.VOCABULARY, None),
            (_HEAD, _COLUMN, (_EVEN,)),
        ),
    ),
    Preset(
        "gpt_neox",
        ("gpt_neox",),
        _rules(
            "gpt_neox",
            (r"attention\.query_key_value", _COLUMN, (_Q,)),
            (r"attention\.dense", _ROW, (_Q,)),
            *_NEOX_MLP,
            (r"embed_in", ShardKind.VOCABULARY, None),
            (_HEAD, _COLUMN, (_EVEN,)),
        ),
    ),
    Preset(
        "opt",
        ("opt",),
        _rules(
            "opt",
            (r"self_attn\.q_proj", _COLUMN, (_Q,)),
            (r"self_attn\.[kv]_proj", _COLUMN, (_KV,)),
            (r"self_attn\.out_proj", _ROW, (_Q,)),
            (r"fc1", _COLUMN, (_EVEN,)),
            (r"fc2", _ROW, (_EVEN,)),
            *_OUTSIDE,
        ),
    ),
    Preset(
        "bloom",
        ("bloom",),
        _rules(
            "bloom",
            (r"self_attention\.query_key_value", _COLUMN, (_Q,)),
            (r"self_attention\.dense", _ROW, (_Q,)),
            *_NEOX_MLP,
            (r"word_embeddings", ShardKind.VOCABULARY, None),
            (_HEAD, _COLUMN, (_EVEN,)),
        ),
        head_arguments=("alibi",),
    ),
    Preset(
        "falcon",
        ("falcon",),
        _rules("falcon", (r"self_attention\.query_key_value", _COLUMN, (_GROUP,)), *_FALCON),
        when=(("new_decoder_architecture", True),),
        head_arguments=("alibi", "attention_mask"),
    ),
    Preset(
        "falcon",
        ("falcon",),
        _rules("falcon", (r"self_attention\.query_key_value", _COLUMN, (_Q, _KV, _KV)), *_FALCON),
        when=(("new_decoder_architecture", False), ("multi_query", True)),
        head_arguments=("alibi", "attention_mask"),
    ),
    Preset(
        "falcon",
        ("falcon",),
        _rules("falcon", (r"self_attention\.query_key_value", _COLUMN, (_Q,)), *_FALCON),
        when=(("new_decoder_architecture", False), ("multi_query", False)),
        head_arguments=("alibi", "attention_mask"),
    ),
    Preset(
        "chatglm",
        ("chatglm",),
        _rules(
            "chatglm",
            (r"self_attention\.query_key_value", _COLUMN, (_Q, _KV, _KV)),
            (r"self_attention\.dense", _ROW, (_Q,)),
            (r"mlp\.dense_h_to_4h", _COLUMN, (_EVEN, _EVEN)),
            (r"mlp\.dense_4h_to_h", _ROW, (_EVEN,)),
            (r"word_embeddings", ShardKind.VOCABULARY, None),
            (_HEAD, _COLUMN, (_EVEN,)),
        ),
    ),
    Preset(
        "bert",
        (
            "bert",
            "roberta",
            "xlm-roberta",
            "electra",
            "vit",
            "deit",
            "camembert",
            "data2vec-text",
            "ernie",
            "xlm-roberta-xl",
            "roberta-prelayernorm",
            "megatron-bert",
            "rembert",
            "bert-generation",
            "roformer",
        ),
        _rules(
            "bert",
            (r"(?:attention|crossattention)\.(?:self|attention)\.query", _COLUMN, (_Q,)),
            (r"(?:attention|crossattention)\.(?:self|attention)\.(?:key|value)", _COLUMN, (_KV,)),
            (r"(?:attention|crossattention)\.output\.dense", _ROW, (_Q,)),
            (r"attention\.q_proj", _COLUMN, (_Q,)),
            (r"attention\.[kv]_proj", _COLUMN, (_KV,)),
            (r"attention\.o_proj", _ROW, (_Q,)),
            (r"intermediate\.dense|mlp\.fc1", _COLUMN, (_EVEN,)),
            (r"layer\.\d+\.output\.dense|mlp\.fc2", _ROW, (_EVEN,)),
            (r"word_embeddings", ShardKind.VOCABULARY, None),
            (_MASKED, _COLUMN, (_EVEN,)),
        ),
    ),
    Preset(
        "t5",
        ("t5", "mt5", "umt5"),
        _rules(
            "t5",
            (r"(?:SelfAttention|EncDecAttention)\.q", _COLUMN, (_Q,)),
            (r"(?:SelfAttention|EncDecAttention)\.[kv]", _COLUMN, (_KV,)),
            (r"(?:SelfAttention|EncDecAttention)\.o", _ROW, (_Q,)),
            (r"relative_attention_bias", ShardKind.FEATURES, (_Q,)),
            (r"DenseReluDense\.wi(?:_[01])?", _COLUMN, (_EVEN,)),
            (r"DenseReluDense\.wo", _ROW, (_EVEN,)),
            (r"shared", ShardKind.VOCABULARY, None),
            *_OUTSIDE,
        ),
    ),
    Preset(
        "whisper",
        (
            "whisper",
            "bart",
            "mbart",
            "pegasus",
            "marian",
            "blenderbot",
            "blenderbot-small",
            "plbart",
            "mvp",
            "biogpt",
            "xglm",
            "m2m_100",
        ),
        _rules(
            "whisper",
            (r"(?:self_attn|encoder_attn)\.q_proj", _COLUMN, (_Q,)),
            (r"(?:self_attn|encoder_attn)\.[kv]_proj", _COLUMN, (_KV,)),
            (r"(?:self_attn|encoder_attn)\.out_proj", _ROW, (_Q,)),
            (r"fc1", _COLUMN, (_EVEN,)),
            (r"fc2", _ROW, (_EVEN,)),
            (r"shared", ShardKind.VOCABULARY, None),
            *_OUTSIDE,
        ),
    ),
    Preset(
        "gpt_bigcode",
        ("gpt_bigcode",),
        _rules("gpt_bigcode", (r"attn\.c_attn", _COLUMN, (_Q, _KV, _KV)), *_BIGCODE),
        when=(("multi_query", True),),
    ),
    Preset(
        "gpt_bigcode",
        ("gpt_bigcode",),
        _rules("gpt_bigcode", (r"attn\.c_attn", _COLUMN, (_Q,)), *_BIGCODE),
        when=(("multi_query", False),),
    ),
)

_ALIASES = {"qwen2": "llama", "mistral": "llama", "qwen3": "llama", "gemma": "llama", "vit": "bert"}


def preset_for(model_type: str | None, flags: Mapping[str, Scalar]) -> Preset | None:
    """Return the preset of a model, by its type and its configuration; None for an unknown family."""
    return next((preset for preset in PRESETS if preset.fits(model_type, flags)), None)


def preset_named(name: str, flags: Mapping[str, Scalar]) -> Preset:
    """Return the preset that a user requests by name.

    Raises:
        PlanError: there is no preset of that name ("tensor-preset").
    """
    canonical = _ALIASES.get(name, name)
    named = [preset for preset in PRESETS if preset.name == canonical]
    if not named:
        known = sorted({preset.name for preset in PRESETS} | set(_ALIASES))
        close = nearest(name, known)
        raise PlanError(
            f"preset_model = {name!r}: there are rules for {', '.join(known)}",
            code="tensor-preset",
            fix=f"Did you mean {close[0]!r}?" if close else "Describe the layers in partition_config.",
        )
    return next((preset for preset in named if all(flags.get(k) == v for k, v in preset.when)), named[0])
