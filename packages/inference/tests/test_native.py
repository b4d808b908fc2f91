"""The native layer loop: what it computes is what the torch path computes, in every format of weights and cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_inference import LLMEngine, QuantizationOptions, SamplingParams, SchedulerConfig, build_hf_engine, load
from ds_inference.decoder_model import Cache
from ds_inference.model_loader import read_decoder
from ds_ops.native_decoder import obstacle

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "built")

FORMS = {
    "int8": QuantizationOptions("int8"),
    "int8 in small groups": QuantizationOptions("int8", 8, symmetric=False),
    "int8 rows": QuantizationOptions("int8", 0),
    "int4": QuantizationOptions("int4", 16),
    "int4 with zero points": QuantizationOptions("int4", 16, symmetric=False),
}
HOW = SamplingParams(max_new_tokens=6, logprobs=97)
RUNS = {
    "llama",
    "llama tied",
    "mistral windowed",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "exaone4",
    "gpt2",
    "bloom",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "olmoe",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v3",
}


def logs(generator: LLMEngine, prompts: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of the first tokens [prompts, vocabulary]."""
    answers = generator.generate(prompts, HOW)
    return torch.tensor([[a.tops[0][i] for i in range(97)] for a in answers])


@pytest.fixture(params=[1, 2, 3])
def threads(request: Any) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_it_runs_the_families_it_is_made_for(every_family: str, tiny: Any) -> None:
    decoder = read_decoder(tiny(every_family), native=True)
    known = {"a projection before the head", "ALiBi rounded to bf16"}
    assert decoder.obstacle in known | {""}
    assert every_family not in RUNS or not decoder.obstacle


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen2-moe", "deepseek-v3"])
def test_formats(family: str, form: str, tiny: Any, prompts_of: Any) -> None:
    model, prompts = tiny(family), prompts_of([1, 40, 7, 13, 5, 17])
    ours = load(model, quantize=FORMS[form], native=True)
    plain = load(model, quantize=FORMS[form], native=False)
    assert not ours.decoder.obstacle
    assert (logs(ours, prompts) - logs(plain, prompts)).abs().max() < 1e-3


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt-oss"])
def test_bf16_is_as_near_to_fp32_as_transformers_is(family: str, tiny: Any, prompts_of: Any) -> None:
    """Inputs of products are rounded to bf16, sums and what lies between are not."""
    model, prompts = tiny(family).bfloat16(), prompts_of([1, 40, 7, 13, 5, 17])
    ours = load(model, native=True)
    exact = load(tiny(family).bfloat16().float(), native=False)
    spec = exact.decoder.spec
    exact.decoder.spec = replace(spec, embed_scale=float(torch.tensor(spec.embed_scale).bfloat16()))
    with torch.no_grad():
        theirs = torch.stack([model(torch.tensor([p])).logits[0, -1].float().log_softmax(-1) for p in prompts])
    wanted = logs(exact, prompts)
    assert not ours.decoder.obstacle
    assert (logs(ours, prompts) - wanted).abs().mean() < (theirs - wanted).abs().mean()


def test_rounded_inputs_are_near(tiny: Any, prompts_of: Any) -> None:
    model, prompts = tiny("llama"), prompts_of([1, 40, 7])
    for form in ("int8", "int4"):
        near = load(model, quantize=QuantizationOptions(form, 16, activations="int8"), native=True)
        exact = load(model, quantize=QuantizationOptions(form, 16), native=True)
        difference = (logs(near, prompts) - logs(exact, prompts)).abs().max()
        assert 0 < difference < 0.2


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_cache_of_int8_is_near(family: str, native: bool, tiny: Any, prompts_of: Any) -> None:
    model, prompts = tiny(family), prompts_of([1, 40, 7])
    small = load(model, native=native, cache_dtype=torch.int8, block_size=4)
    assert small.cache.layers[0][0].dtype == torch.int8
    difference = (logs(small, prompts) - logs(load(model, native=False), prompts)).abs().max()
    assert 0 < difference < 0.2
    other = load(model, native=not native, cache_dtype=torch.int8, block_size=16)
    assert (logs(small, prompts) - logs(other, prompts)).abs().max() < 5e-2
    spec = small.decoder.spec
    assert Cache.bytes_of(spec, 16, torch.int8) < Cache.bytes_of(spec, 16, torch.bfloat16)


def test_any_number_of_threads(threads: int, tiny: Any, prompts_of: Any) -> None:
    prompts = prompts_of([50, 1, 30, 4, 9])
    budget = SchedulerConfig(64, 8, max_model_len=400)
    for family in ("llama", "qwen2-moe", "deepseek-v2"):
        ours = load(tiny(family), native=True, budget=budget)
        wanted = load(tiny(family), native=False, budget=budget)
        assert [a.tokens for a in ours.generate(prompts, HOW)] == [a.tokens for a in wanted.generate(prompts, HOW)]


def test_a_folder_is_packed_and_a_live_module_is_not(tiny: Any, tmp_path: Any) -> None:
    model = tiny("qwen2")
    model.save_pretrained(tmp_path)
    packed = read_decoder(tmp_path)
    assert not packed.obstacle
    assert "layers.0.feed.up.weight" not in packed.weights
    assert read_decoder(model).obstacle == "it was not asked for"


def test_the_ragged_engine_over_a_folder(tiny: Any, prompts_of: Any, tmp_path: Any) -> None:
    model, prompts = tiny("llama"), prompts_of([5, 23])
    model.save_pretrained(tmp_path)
    ours = build_hf_engine(tmp_path)
    assert not ours.model.obstacle
    tokens = [torch.tensor(p) for p in prompts]
    with torch.no_grad():
        wanted = torch.stack([model(t[None]).logits[0, -1] for t in tokens])
    assert (ours.put([1, 2], tokens) - wanted).abs().max() < 1e-4
