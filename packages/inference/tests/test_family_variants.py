"""Configurations of declared families that few models have: the tokens are transformers' own, or the model runs its own forward, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_config.errors import UnsupportedError
from ds_inference import SamplingParams, load
from ds_inference.hf_runner import HFModelRunner

transformers = pytest.importorskip("transformers")

MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT = {
    **MOE, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
DECLARED = {
    "an activation of experts": ("MixtralConfig", {**MOE, "hidden_act": "relu2"}),
    "an activation of experts and a shared one": ("Qwen2MoeConfig", {**MOE, "hidden_act": "gelu", "shared_expert_intermediate_size": 16}),
    "an activation of experts behind a corrected router": ("Dots1Config", {**MOE, "hidden_act": "relu", "n_shared_experts": 1}),
    "an activation of Gemma's": ("GemmaConfig", {"head_dim": 8, "hidden_act": "relu"}),
    "yarn without a scale of all dims": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0,
            },
        },
    ),
    "a cap of scores that the forward does not read": (
        "Gemma3TextConfig", {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0},
    ),
}  # fmt: skip
FOREIGN = {
    "an activation that is not known": ("LlamaConfig", {"hidden_act": "mish"}),
    "a share of rotated features that the forward does not read": (
        "MistralConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "a cut after the norms": ("OlmoeConfig", {**MOE, "clip_qkv": 0.5}),
    "norms without weights": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "layer_norm_elementwise_affine": False}),
    "biases that no role reads": ("DeepseekV2Config", {**LATENT, "mlp_bias": True}),
}  # fmt: skip


def made(name: str, more: dict[str, Any]) -> Any:
    config = getattr(transformers, name)(**{
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 97, "max_position_embeddings": 128, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None, **more,
    })  # fmt: skip
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0.0, 0.3).add_(0.5 if param.dim() == 1 else 0.0)
    return model


def check(model: Any, engine: Any) -> None:
    for prompt in ([3], [5, 90, 11, 4, 40, 22, 7]):
        (answer,) = engine.generate([prompt], SamplingParams(max_new_tokens=6, logprobs=0))
        whole = torch.tensor([[*prompt, *answer.tokens]])
        with torch.no_grad():
            logs = torch.log_softmax(model(whole).logits[0, len(prompt) - 1 : -1].float(), -1)
        assert answer.tokens == logs.argmax(-1).tolist()
        assert torch.allclose(torch.tensor(answer.logprobs), logs.amax(-1), atol=1e-4)


@pytest.mark.parametrize("name", DECLARED)
def test_a_variant_that_is_declared(name: str) -> None:
    model = made(*DECLARED[name])
    for native in (False, True):
        check(model, load(model, cache_tokens=64, native=native))


@pytest.mark.parametrize("name", FOREIGN)
def test_a_variant_that_is_not_declared_runs_its_own_forward(name: str) -> None:
    model = made(*FOREIGN[name])
    engine = load(model, cache_tokens=64)
    assert isinstance(engine.decoder, HFModelRunner)
    check(model, engine)
    with pytest.raises(UnsupportedError):
        load(model, cache_tokens=64, native=True)


def test_what_is_added_to_a_layer_is_not_left_out() -> None:
    model = made("LlamaConfig", {})
    model.model.layers[1].mlp.extra = torch.nn.Linear(32, 32)
    assert isinstance(load(model, cache_tokens=64).decoder, HFModelRunner)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Gemma3TextConfig", {"use_bidirectional_attention": True}),
        ("LlamaConfig", {"is_causal": False}),
        ("OlmoConfig", {"is_causal": False}),
    ],
)
def test_attention_that_is_not_causal_is_refused(name: str, more: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="see those that come later"):
        load(made(name, {"head_dim": 8, "query_pre_attn_scalar": 8, **more}), cache_tokens=64)


def test_an_encoder_with_a_head_is_refused() -> None:
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=97
    )
    for decodes in (False, True):
        config.is_decoder = decodes
        model = transformers.BertLMHeadModel(config).eval()
        if decodes:
            load(model, cache_tokens=64).generate([[3, 4]], SamplingParams(max_new_tokens=2))
        else:
            with pytest.raises(UnsupportedError, match="see those that come later"):
                load(model, cache_tokens=64)


def test_layers_with_windows_in_a_model_without() -> None:
    model = made(
        "SmolLM3Config",
        {"sliding_window": 3, "use_sliding_window": False, "layer_types": ["sliding_attention", "full_attention"]},
    )
    check(model, load(model, cache_tokens=64))


def test_ends_are_those_of_the_generation_configuration(tmp_path: Path) -> None:
    model = made("LlamaConfig", {"eos_token_id": 96})
    (free,) = load(model, cache_tokens=64).generate([[5, 90, 11]], SamplingParams(max_new_tokens=6, ignore_eos=True))
    model.generation_config.eos_token_id = [96, free.tokens[2]]
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        (answer,) = load(source, cache_tokens=64).generate([[5, 90, 11]], SamplingParams(max_new_tokens=6))
        assert (answer.reason, answer.tokens) == ("stop", free.tokens[: free.tokens.index(free.tokens[2]) + 1])
