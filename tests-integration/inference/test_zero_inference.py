"""ZeRO-Inference: a model whose parameters rest on the host, in a file or on other ranks answers as it does when they are here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ds_zero
from ds_config.errors import UnsupportedError
from ds_inference import SamplingParams, load
from ds_testing import world
from ds_zero import OffloadPolicy

transformers = pytest.importorskip("transformers")


def tiny() -> Any:
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0.0, 0.3)
    return model


@world(2)
@pytest.mark.parametrize("tier", ["device", "host", "file"])
def test_answers_are_the_whole_model_s(tier: str, tmp_path: Path) -> None:
    prompts, how = [[1], [5, 6, 7] * 9, [9, 8]], SamplingParams(8)
    wanted = [a.tokens for a in load(tiny()).generate(prompts, how)]
    model = tiny()
    options: dict[str, Any] = (
        {}
        if tier == "device"
        else {"offload_optimizer": OffloadPolicy(tier, str(tmp_path))}
        if tier == "file"
        else {"offload_optimizer": OffloadPolicy(tier)}
    )
    sharding = ds_zero.shard(model, stage=3, **options)
    engine = load(model, use_module_forward=True, cache_tokens=128, block_size=4)
    assert [a.tokens for a in engine.generate(prompts, how)] == wanted
    assert [a.tokens for a in engine.generate(prompts[:1], how)] == wanted[:1]
    sharding.close()


def test_what_needs_the_weights_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="quantize"):
        load(tiny(), use_module_forward=True, quantize="int8")
