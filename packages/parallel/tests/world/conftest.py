"""Tiny random models of the families that tensor parallelism knows, each with a batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_parallel.tensor.partial_gradients import ReplicaGradientCheck

ReplicaGradientCheck.every = True  # a run compares its first backward only

VOCABULARY = 67  # no multiple of two or four

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 44,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
_OLD: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_BERT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

# name: (model class, configuration class, its arguments)
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _SIZES | _TOKENS),
    "llama-uneven": (
        "LlamaForCausalLM",
        "LlamaConfig",
        _SIZES
        | _TOKENS
        | {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 36, "attention_bias": True},
    ),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", _SIZES | _TOKENS | {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", _SIZES | _TOKENS),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _SIZES | _TOKENS),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _SIZES | _TOKENS | {"head_dim": 8}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _SIZES | _TOKENS | {"head_dim": 8, "num_key_value_heads": 1}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _SIZES | _TOKENS | {"head_dim": 8}),
    "phi": ("PhiForCausalLM", "PhiConfig", _SIZES | _TOKENS),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _SIZES | _TOKENS),
    "glm": ("GlmForCausalLM", "GlmConfig", _SIZES | _TOKENS | {"head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _SIZES | _TOKENS | {"num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _SIZES | _TOKENS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _OLD | {"intermediate_size": 64}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
        | {"max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0}
        | _TOKENS,
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        | _TOKENS,
    ),
    "falcon-groups": (
        "FalconForCausalLM",
        "FalconConfig",
        _OLD | _TOKENS | {"new_decoder_architecture": True, "num_kv_heads": 4, "alibi": False},
    ),
    "falcon-multi-query": (
        "FalconForCausalLM",
        "FalconConfig",
        _OLD | _TOKENS | {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
    ),
    "falcon-alibi": (
        "FalconForCausalLM",
        "FalconConfig",
        _OLD | _TOKENS | {"new_decoder_architecture": False, "multi_query": False, "alibi": True},
    ),
    "codegen": (
        "CodeGenForCausalLM",
        "CodeGenConfig",
        {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        | _TOKENS,
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _SIZES | _TOKENS),
    "granite-tied": ("GraniteForCausalLM", "GraniteConfig", _SIZES | _TOKENS | {"tie_word_embeddings": True}),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        _SIZES
        | _TOKENS
        | {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
        | {"v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        _SIZES | _TOKENS | {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48},
    ),
    "longcat": (
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 1, "num_attention_heads": 4, "ffn_hidden_size": 48}
        | {"max_position_embeddings": 64, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8}
        | {"qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "n_routed_experts": 4, "zero_expert_num": 2}
        | {"moe_topk": 2, "expert_ffn_hidden_size": 24}
        | _TOKENS,
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "scale_embedding": True}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
        | {"max_position_embeddings": 32, "dropout": 0.0, "decoder_start_token_id": 1}
        | _TOKENS,
    ),
    "bigcode": (
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        | _TOKENS,
    ),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", _BERT | {"vocab_size": VOCABULARY, "embedding_size": 16}),
    "bert": ("BertForMaskedLM", "BertConfig", _BERT | {"vocab_size": VOCABULARY, "max_position_embeddings": 64}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _BERT | {"vocab_size": VOCABULARY}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", _BERT | {"image_size": 16, "patch_size": 4, "num_labels": 5}),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
        | {"max_source_positions": 16, "max_target_positions": 32, "dropout": 0.0, "decoder_start_token_id": 1}
        | _TOKENS,
    ),
}


def make_tiny(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with the same random weights on every rank, and a batch with labels."""
    torch.manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (2, 9))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if name == "chatglm":
        return ChatGLM(), batch
    transformers = pytest.importorskip("transformers", reason="families are transformers' models")
    model_class, config_class, arguments = _MODELS[name]
    config = getattr(transformers, config_class)(**arguments)
    model = getattr(transformers, model_class)(config)
    if name == "vit":
        batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 3])}
    if name == "whisper":
        batch = {"input_features": torch.randn(2, 8, 32), "labels": ids}
    return model, batch


class _GlmAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.hidden_size_per_attention_head = hidden // heads
        self.num_attention_heads_per_partition, self.num_multi_query_groups_per_partition = heads, groups
        self.projection_size = hidden
        self.query_key_value = nn.Linear(hidden, hidden + 2 * groups * (hidden // heads))
        self.dense = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        width, groups = self.hidden_size_per_attention_head, self.num_multi_query_groups_per_partition
        heads = self.num_attention_heads_per_partition
        q, k, v = self.query_key_value(x).split([heads * width, groups * width, groups * width], -1)
        q, k, v = (t.view(*t.shape[:2], -1, width).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(out.transpose(1, 2).reshape(*x.shape[:2], self.projection_size))


class _GlmMlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden, 2 * inner, bias=False)
        self.dense_4h_to_h = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.dense_h_to_4h(x).chunk(2, -1)
        return self.dense_4h_to_h(functional.silu(gate) * up)


class _GlmBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(32), nn.RMSNorm(32)
        self.self_attention, self.mlp = _GlmAttention(32, 4, 2), _GlmMlp(32, 44)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class ChatGLM(nn.Module):
    """A model with the names, the fused layouts and the attributes of THUDM's ChatGLM; its code is not in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="chatglm", to_dict=lambda: {"model_type": "chatglm"})
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(VOCABULARY, 32)})
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(_GlmBlock() for _ in range(2))})
        self.output_layer = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embedding["word_embeddings"](input_ids)
        for layer in self.encoder["layers"]:
            x = layer(x)
        logits = self.output_layer(x)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)


@pytest.fixture
def tiny() -> Callable[[str], tuple[nn.Module, dict[str, Tensor]]]:
    return make_tiny
