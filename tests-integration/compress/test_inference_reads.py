"""Folders that ds-compress writes are read by ds-inference, codes as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_compress.model_export import export_compressed_tensors, export_gptq
from ds_compress.posttraining import QuantScheme, round_to_nearest
from ds_inference import SamplingParams, load

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("write", [export_compressed_tensors, export_gptq])
def test_answers_are_those_of_the_codes(write: Any, symmetric: bool, bits: int, tmp_path: Path) -> None:
    if write is export_compressed_tensors and not symmetric:
        pytest.skip("the exporter writes symmetric codes only")
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0.0, 0.3)
    codes = round_to_nearest(model, QuantScheme(bits, 16, symmetric))  # the model is left with what its codes are worth
    folder = write(model, codes, tmp_path)
    how, prompt = SamplingParams(1, logprobs=97), [5, 6, 7, 8, 9]
    (wanted,), (found,) = load(model).generate([prompt], how), load(folder).generate([prompt], how)
    # GPTQ folders keep scales in 16 bits.
    assert max(abs(wanted.tops[0][i] - found.tops[0][i]) for i in range(97)) < (
        1e-3 if write is export_compressed_tensors else 0.1
    )
