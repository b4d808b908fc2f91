"""A family of decoders whose checkpoints have names of their own: this file and one row; ds-inference knows nothing of it."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from ds_inference import SamplingParams, load
from ds_inference.families import FAMILIES, Config, DecoderFamily
from ds_inference.families.family_spec import LLAMA, gated_mlp, grouped_attention, llama_like
from ds_inference.spec import DecoderSpec, WeightSource

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 97, "max_position_embeddings": 64, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def spec(config: Config) -> DecoderSpec:
    """What the configuration means: layers like Llama's."""
    count = config["num_hidden_layers"]
    return llama_like(config, [grouped_attention(config)] * count, [gated_mlp(config)] * count)


def renamed(source: WeightSource) -> WeightSource:
    return WeightSource(tuple(name.replace("model.", "toy.") for name in source.names), source.layout, source.optional)


SOURCES = {role: tuple(map(renamed, found)) for role, found in LLAMA.items()}


def test_it_generates_what_its_twin_generates(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, pad_token_id=0)[
        0, 3:
    ].tolist()
    save_file(
        {re.sub("^model", "toy", n): t.contiguous() for n, t in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(model.config.to_json_string().replace('"llama"', '"toy"'))
    with mock.patch.dict(FAMILIES, {"toy": DecoderFamily(spec, lambda config: SOURCES)}):
        (found,) = load(tmp_path, cache_tokens=64).generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
    assert found.tokens == expected
