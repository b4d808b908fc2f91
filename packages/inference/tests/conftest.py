"""Tiny random models of every family, and prompts for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_MOE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
_LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "n_group": 4,
    "topk_group": 2,
}
_CORRECTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
}
_MULTIPLIED = {
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
}
_LONG = {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_OLD = {"num_key_value_heads": ...}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama multi-head": ("Llama", {"num_key_value_heads": 4}),
    "llama 3": (
        "Llama",
        {"rope_parameters": {**_LONG, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ),
    "llama yarn": ("Llama", {"rope_parameters": {**_LONG, "rope_type": "yarn"}}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}}),
    "phi3 long": (
        "Phi3",
        {
            "sliding_window": None,
            "max_position_embeddings": 2048,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
                "original_max_position_embeddings": 512,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 2.5, 3.0, 4.0],
            },
        },
    ),
    "mistral windowed": ("Mistral", {"sliding_window": 7}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 windowed": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen2-moe": ("Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 40}),
    "qwen3-moe": ("Qwen3Moe", {**_MOE, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 5, "num_hidden_layers": 7}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "olmo2": ("Olmo2", {}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "exaone4": ("Exaone4", {"sliding_window": 6, "num_hidden_layers": 4, "sliding_window_pattern": 4}),
    "deepseek-v2": ("DeepseekV2", {**_LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"}),
    "deepseek-v2 plain": ("DeepseekV2", {**_LATENT, "q_lora_rank": 24, "topk_method": "greedy"}),
    "deepseek-v3": ("DeepseekV3", {**_LATENT, "q_lora_rank": 24}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512, **_OLD}),
    "gpt-neox": ("GPTNeoX", {**_OLD, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "gpt-neox serial": ("GPTNeoX", {**_OLD, "use_parallel_residual": False, "rotary_pct": 0.5}),
    "opt": ("OPT", {**_OLD, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt after": ("OPT", {**_OLD, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "head_dim": 8}),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2, **_OLD}),
    "bloom of six heads": ("Bloom", {"hidden_size": 36, "n_head": 6, "n_layer": 2, **_OLD}),
    "falcon one kv head": ("Falcon", {**_OLD, "multi_query": True, "parallel_attn": True, "bias": False}),
    "falcon new": ("Falcon", {**_OLD, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "phi": ("Phi", {"qk_layernorm": True}),
    "gptj": ("GPTJ", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512, "rotary_dim": 4, **_OLD}),
    "codegen": ("CodeGen", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512, "rotary_dim": 4, **_OLD}),
    "gpt-bigcode": ("GPTBigCode", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512, **_OLD}),
    "cohere": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"sliding_window": 6, "num_hidden_layers": 4}),
    "stablelm": ("StableLm", {"qk_layernorm": True, "use_qkv_bias": True}),
    "stablelm parallel": ("StableLm", {"use_parallel_residual": True}),
    "granite": ("Granite", _MULTIPLIED),
    "granitemoe": ("GraniteMoe", {**_MULTIPLIED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoeshared": (
        "GraniteMoeShared",
        {**_MULTIPLIED, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 20},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "starcoder2": ("Starcoder2", {"sliding_window": 6}),
    "glm": ("Glm", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "nemotron": ("Nemotron", {}),
    "mpt": (
        "Mpt",
        {"d_model": 36, "n_heads": 6, "n_layers": 2, "max_seq_len": 512, "attn_config": {"clip_qkv": 0.8}, **_OLD},
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 8, "use_bias": True}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 8}),
    "seed-oss": ("SeedOss", {"head_dim": 8}),
    "arcee": ("Arcee", {}),
    "cwm": ("Cwm", {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 5, "bos_token_id": 0}),
    "ministral": ("Ministral", {"head_dim": 8, "sliding_window": 6}),
    "internlm3": ("InternLM3", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "olmo3": ("Olmo3", {"sliding_window": 6, "num_hidden_layers": 4}),
    "olmo3 yarn": (
        "Olmo3",
        {
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {**_LONG, "rope_type": "yarn"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
    ),
    "helium": ("Helium", {"head_dim": 8}),
    "jais2": ("Jais2", {}),
    "vaultgemma": ("VaultGemma", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 16}),
    "glm4-moe": ("Glm4Moe", {**_CORRECTED, "use_qk_norm": True, "first_k_dense_replace": 1, "attention_bias": True}),
    "dots1": ("Dots1", {**_CORRECTED, "sliding_window": 6, "max_window_layers": 1}),
    "solar-open": ("SolarOpen", {**_CORRECTED, "head_dim": 8}),
    "minimax-m2": ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4}),
    "falcon alibi": ("Falcon", {**_OLD, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
}


def _tiny(name: str) -> Any:
    """A random model of a family. Weights are large enough that greedy choices differ, buffers are not zero."""
    transformers = pytest.importorskip("transformers")
    kind, more = FAMILIES[name]
    given = {k: v for k, v in {**SMALL, **more}.items() if v is not ...}
    if kind in ("GPTJ", "CodeGen", "GPTBigCode", "Mpt"):
        given = {k: v for k, v in given.items() if k in more or k == "vocab_size" or k.endswith("token_id")}
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**given)
    config._attn_implementation = "eager" if kind in ("Gemma2", "Bloom", "GptOss", "Mpt", "VaultGemma") else "sdpa"
    torch.manual_seed(3)
    known = getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}", None)
    made = (known or transformers.AutoModelForCausalLM.from_config)(config).eval().float()
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(0.0, 0.3 if param.dim() > 1 else 0.2).add_(0.5 if param.dim() == 1 else 0.0)
        for buffer_name, buffer in made.named_buffers():
            if "correction" in buffer_name:
                buffer.normal_()
    return made


def _prompts_of(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(97) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Any]:
    return _tiny


@pytest.fixture(scope="session")
def prompts_of() -> Callable[[list[int]], list[list[int]]]:
    return _prompts_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `every_family` runs for each."""
    if "every_family" in metafunc.fixturenames:
        metafunc.parametrize("every_family", list(FAMILIES))
