"""Decoders that nobody declared run through their own forward: the same tokens, whatever is batched, cut, shared or pushed out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_config.errors import UnsupportedError
from ds_inference import RaggedConfig, SamplingParams, SchedulerConfig, build_hf_engine, load
from ds_inference.hf_runner import HFModelRunner
from ds_inference.sampling import derive_seed

transformers = pytest.importorskip("transformers")

KINDS: dict[str, dict[str, Any]] = {
    "Olmo": {"num_key_value_heads": 2, "clip_qkv": 0.9},
    "Persimmon": {"hidden_act": "relu2"},
    "Doge": {"num_key_value_heads": 2},
    "XGLM": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
}


def made(kind: str) -> Any:
    given = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
        "max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if "d_model" in KINDS[kind]:
        given = {k: v for k, v in given.items() if k == "vocab_size" or k.endswith("token_id")}
    torch.manual_seed(4)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**given, **KINDS[kind]))
    model = model.eval().float()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0.0, 0.3).add_(0.5 if param.dim() == 1 else 0.0)
    return model


def own(model: Any, prompt: list[int], count: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("kind", list(KINDS))
def test_greedy_is_its_own(kind: str, prompts_of: Any) -> None:
    model, prompts = made(kind), prompts_of([1, 5, 23, 12, 5])
    wanted = [own(model, p, 8) for p in prompts]
    for budget, blocks in (
        (SchedulerConfig(64, 8, max_model_len=400), 64),
        (SchedulerConfig(5, 3, max_model_len=400), 12),
    ):
        engine = load(model, cache_tokens=4 * blocks, block_size=4, budget=budget)
        assert isinstance(engine.decoder, HFModelRunner)
        assert [a.tokens for a in engine.generate(prompts, SamplingParams(8))] == wanted
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.count
        again = engine.generate([prompts[2] + wanted[2][:3]], SamplingParams(5))[
            0
        ].tokens  # what is in the cache is found
        assert again == wanted[2][3:]


def test_samples_drafts_and_a_small_cache(prompts_of: Any) -> None:
    model, (prompt,) = made("Olmo"), prompts_of([9])
    how = SamplingParams(7, temperature=0.9, n=2, seed=3)
    first, second = load(model).generate([prompt], how)
    for seed, answer in ((3, first), (derive_seed(3, "sample", 1), second)):
        assert (
            load(model, num_speculative_tokens=3)
            .generate([prompt], SamplingParams(7, temperature=0.9, seed=seed))[0]
            .tokens
            == answer.tokens
        )
    (small,) = load(model, cache_dtype=torch.int8).generate([prompt], SamplingParams(1, logprobs=97))
    (whole,) = load(model).generate([prompt], SamplingParams(1, logprobs=97))
    assert max(abs(small.tops[0][i] - whole.tops[0][i]) for i in range(97)) < 0.2


def test_from_a_folder_in_another_dtype_and_by_put(prompts_of: Any, tmp_path: Any) -> None:
    model, (prompt,) = made("Olmo"), prompts_of([9])
    model.save_pretrained(tmp_path)
    assert load(tmp_path).generate([prompt], SamplingParams(6))[0].tokens == own(model, prompt, 6)
    half = load(model, dtype=torch.bfloat16)
    assert half.decoder.dtype == torch.bfloat16
    assert next(model.parameters()).dtype == torch.float32, "the caller's own module was changed"
    manager = {"memory_config": {"mode": "allocate", "size": 4}}
    logits = build_hf_engine(tmp_path, RaggedConfig(state_manager=manager)).put([1], [torch.tensor(prompt)])
    with torch.no_grad():
        assert (logits[0] - model(torch.tensor([prompt])).logits[0, -1]).abs().max() < 1e-4


def test_quantised_weights_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no declaration"):
        load(made("Olmo"), quantize="int8")
