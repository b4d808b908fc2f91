"""Weights of few bits: generation equals that of a model whose weights are the dequantised ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_config.errors import PlanError, UnsupportedError
from ds_inference import (
    QuantizationOptions,
    RaggedConfig,
    RaggedEngine,
    SamplingParams,
    build_hf_engine,
    init_inference,
    load,
)
from ds_inference.decoder_model import Decoder
from ds_inference.model_loader import read_decoder
from ds_inference.quantize import dequantised
from ds_ops.formats import QuantTensor

FORMS = {
    "int8": QuantizationOptions("int8"),
    "int8 in small groups": QuantizationOptions("int8", 8, symmetric=False),
    "int8 rows": QuantizationOptions("int8", 0),
    "int4": QuantizationOptions("int4", 16),
    "int4 with zero points": QuantizationOptions("int4", 16, symmetric=False),
    "fp8": QuantizationOptions("fp8", 16),
    "fp6": QuantizationOptions("fp6", 0),
}


def plain(decoder: Decoder) -> Decoder:
    """The same numbers, no codes, no native loop."""
    return Decoder(decoder.spec, {role: dequantised(weight) for role, weight in decoder.weights.items()})


def logits(generator: Any, prompt: list[int]) -> Tensor:
    (answer,) = generator.generate([prompt], SamplingParams(max_new_tokens=1, logprobs=97))
    return torch.tensor([answer.tops[0][i] for i in range(97)])


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("family", ["llama", "qwen2-moe", "gpt2"])
def test_codes_are_as_good_as_their_numbers(family: str, form: str, tiny: Any, prompts_of: Any) -> None:
    model, prompts = tiny(family), prompts_of([1, 30, 9])
    coded, numbers = (load(model, cache_tokens=256, quantize=FORMS[form], native=False) for _ in range(2))
    numbers.decoder = plain(coded.decoder)
    count = sum(isinstance(w, QuantTensor) for w in coded.decoder.weights.values())
    assert count >= 4 * len(coded.decoder.spec.layers)
    for prompt in prompts:
        assert (logits(coded, prompt) - logits(numbers, prompt)).abs().max() < 1e-3
    how = SamplingParams(max_new_tokens=6)
    assert [a.tokens for a in coded.generate(prompts, how)] == [a.tokens for a in numbers.generate(prompts, how)]


def test_a_folder_is_quantised_while_it_is_read(tmp_path: Any, tiny: Any) -> None:
    model = tiny("llama").bfloat16()
    model.save_pretrained(tmp_path)
    decoder = read_decoder(tmp_path, quantize="int8", native=False)
    weight = decoder.weights["layers.0.attention.qkv.weight"]
    assert isinstance(weight, QuantTensor)
    assert weight.wire.dtype == torch.uint8
    assert decoder.dtype == torch.bfloat16
    live = read_decoder(model, quantize="int8", native=False).weights["layers.0.attention.qkv.weight"]
    assert isinstance(live, QuantTensor)
    assert torch.equal(weight.wire, live.wire)


def test_what_cannot_be_is_said(tiny: Any) -> None:
    with pytest.raises(PlanError, match="multiple of 8"):
        QuantizationOptions(group=12)
    with pytest.raises(PlanError, match="no zero point"):
        QuantizationOptions("fp8", symmetric=False)
    with pytest.raises(PlanError, match="int3"):
        load(tiny("llama"), quantize="int3")


@pytest.mark.parametrize(("bits", "kind"), [(8, "symmetric"), (4, "asymmetric")])
def test_init_inference_quantises(bits: int, kind: str, tiny: Any, prompts_of: Any) -> None:
    weight = {"num_bits": bits, "q_type": kind, "q_groups": 4}
    engine = init_inference(tiny("llama"), dtype="fp32", kernel_inject=True, quant={"weight": weight})
    ids = torch.tensor(prompts_of([9]))
    found = engine.generate(ids, max_new_tokens=6, pad_token_id=0)
    own = load(tiny("llama"), quantize=QuantizationOptions("int8" if bits == 8 else "int4", 8, kind == "symmetric"))
    (answer,) = own.generate(ids.tolist(), SamplingParams(max_new_tokens=6))
    assert found[0, 9:].tolist() == answer.tokens
    with pytest.raises(UnsupportedError, match="num_bits"):
        init_inference(tiny("llama"), dtype="fp32", quant={"weight": weight})


@pytest.mark.parametrize("mode", ["wf6af16", "int8"])
def test_the_ragged_engine_quantises(mode: str, tiny: Any, prompts_of: Any) -> None:
    manager = {"memory_config": {"mode": "allocate", "size": 4}}
    config = RaggedConfig(quantization={"quantization_mode": mode}, state_manager=manager)
    how = QuantizationOptions("fp6", group=0) if mode == "wf6af16" else mode
    numbers = RaggedEngine(plain(read_decoder(tiny("llama"), quantize=how, native=False)), config)
    tokens = [torch.tensor(p) for p in prompts_of([11])]
    found = build_hf_engine(tiny("llama"), config).put([1], tokens)
    assert (found - numbers.put([1], tokens)).abs().max() < 1e-3
    whole = build_hf_engine(tiny("llama"), RaggedConfig(state_manager=manager)).put([1], tokens)
    assert (found - whole).abs().max() > 1e-3
