"""Language models of transformers, made small by their configurations' own keys; what cannot be is left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SIZES: dict[str, int] = {
    "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 64, "head_dim": 8, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "d_model": 32, "n_layers": 2,
    "n_heads": 4, "num_layers": 2, "num_heads": 4, "d_ff": 48, "d_kv": 8, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "kv_lora_rank": 8, "q_lora_rank": 8,
    "shared_expert_intermediate_size": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "rotary_dim": 4, "max_seq_len": 64, "decoder_layers": 2,
    "encoder_layers": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48,
    "num_kv_heads": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "moe_topk": 2, "state_size": 4, "sliding_window": 8,
    "mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "conv_kernel": 4, "expand": 2, "time_step_rank": 4,
    "embedding_size": 32, "lru_width": 32, "attention_window_size": 8, "type_vocab_size": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_OPTIONAL = ("sliding_window", "rotary_dim", "q_lora_rank", "num_key_value_heads", "num_kv_heads")
_LARGEST = 3_000_000


def names() -> list[str]:
    """The classes with a head for words, alphabetically."""
    from transformers.models.auto import modeling_auto as auto

    tables = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
    found = {name for table in tables for of in table.values() for name in ([of] if isinstance(of, str) else of)}
    return sorted(found)


def make(name: str, attention: str = "eager") -> nn.Module:
    """The same weights in every process. Raises whatever transformers raises where sizes do not fit together."""
    import transformers

    model_class: Any = getattr(transformers, name)
    first = model_class.config_class()
    text = first.get_text_config()
    sizes: dict[str, int] = {}
    for key, value in SIZES.items():
        was = getattr(text, key, ...)
        tokens = key in ("pad_token_id", "bos_token_id", "eos_token_id")
        unset = was is None and key in _OPTIONAL
        if was is ... or unset or (key == "head_dim" and key not in text.to_dict()):
            continue
        if isinstance(was, int | None) or tokens:
            every = key == "num_key_value_heads" and was == getattr(text, "num_attention_heads", None)
            sizes[key] = SIZES["num_attention_heads"] if every else value
    config = model_class.config_class(**(sizes if text is first else {"text_config": sizes}))
    for key, value in config.get_text_config().to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config.get_text_config(), key, 0.0)
    config.is_decoder = "CausalLM" in name or "LMHead" in name
    config._attn_implementation = attention
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > _LARGEST:
        raise MemoryError(f"{name} has {count} parameters")
    torch.manual_seed(3)
    model = model_class(config)
    for param in model.parameters():
        if param.dim() <= 1:  # ones and zeros look alike wherever they are cut
            param.data.add_(torch.randn_like(param) * 0.05)
    return model
