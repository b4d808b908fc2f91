"""Every family, tiny and random: greedy tokens are transformers' own, however the requests are batched and cut."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from ds_inference import LLMEngine, SamplingParams, SchedulerConfig, load


def expected(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    found = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0, use_cache=True
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def test_greedy_is_transformers_own(every_family: str, tiny: Any, prompts_of: Any) -> None:
    model, prompts = tiny(every_family), prompts_of([1, 5, 23, 12])
    wanted = expected(model, prompts, 10)
    budgets = (SchedulerConfig(64, 8, max_model_len=500), SchedulerConfig(5, 3, max_model_len=500))
    for budget, native in itertools.product(budgets, (False, True)):
        generator: LLMEngine = load(model, cache_tokens=256, block_size=4, budget=budget, native=native)
        found = [a.tokens for a in generator.generate(prompts, SamplingParams(max_new_tokens=10))]
        assert found == wanted
        assert generator.scheduler.pool.num_free == generator.scheduler.pool.count


def test_logits_are_transformers_own(every_family: str, tiny: Any, prompts_of: Any) -> None:
    model, (prompt,) = tiny(every_family), prompts_of([19])
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1].float(), -1)
    for native in (False, True):
        (answer,) = load(model, cache_tokens=64, budget=SchedulerConfig(max_model_len=500), native=native).generate(
            [prompt], SamplingParams(max_new_tokens=1, logprobs=97)
        )
        found = torch.tensor([answer.tops[0][i] for i in range(97)])
        assert (found - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_of_forced_tokens(
    every_family: str, dtype: torch.dtype, device: str, tiny: Any, prompts_of: Any
) -> None:
    """On the device, too. In bf16 ours are as far from transformers' fp32 as transformers' bf16 are."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    model, (tokens,) = copy.deepcopy(tiny(every_family)), prompts_of([19])
    lengths = [1, 7, 18, 19]

    def theirs() -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([tokens], device=model.device)).logits[0]
        return torch.log_softmax(logits.float(), -1).cpu()[[length - 1 for length in lengths]]

    exact = theirs()
    model.to(device=device, dtype=dtype)
    narrow = theirs()
    engine = load(model, cache_tokens=256, budget=SchedulerConfig(max_model_len=500), native=False)
    answers = engine.generate([tokens[:n] for n in lengths], SamplingParams(max_new_tokens=1, logprobs=97))
    found = torch.tensor([[answer.tops[0][i] for i in range(97)] for answer in answers])
    assert (found - exact).abs().mean() <= 1e-4 + 1.5 * (narrow - exact).abs().mean()


RENAMED = [
    "deepseek-v3", "dots1", "glm4-moe", "gpt-oss", "granitemoe", "granitemoeshared", "internlm3", "minimax-m2", "mixtral",
    "olmo3 yarn", "olmoe", "qwen2-moe", "qwen3-moe", "solar-open",
]  # fmt: skip


@pytest.mark.parametrize("family", RENAMED)
def test_from_a_folder_whose_names_are_others(family: str, tiny: Any, prompts_of: Any, tmp_path: Any) -> None:
    """Files have one matrix an expert where the module has one tensor of all."""
    model, prompts = tiny(family), prompts_of([1, 9])
    model.save_pretrained(tmp_path)
    found = [a.tokens for a in load(tmp_path, native=False).generate(prompts, SamplingParams(max_new_tokens=6))]
    assert found == expected(model, prompts, 6)
