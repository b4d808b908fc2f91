"""A configuration and weights that do not belong together are refused before anything is allocated by the configuration's sizes."""

from __future__ import annotations

import json

import pytest
import transformers

from ds_config.errors import CheckpointError
from ds_inference import load

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
_LLAMA = transformers.LlamaConfig(**_SIZES)
_MIXTRAL = transformers.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize(
    ("config", "key", "value", "role"),
    [
        (_LLAMA, "head_dim", 2**31, "attention.qkv.weight"),
        (_LLAMA, "num_key_value_heads", 1, "attention.qkv.weight"),
        (_LLAMA, "vocab_size", 128, "embed.weight"),
        (_LLAMA, "intermediate_size", 24, "feed.up.weight"),
        (_MIXTRAL, "intermediate_size", 2**40, "feed.experts.up"),
    ],
)
def test_sizes_of_the_configuration_are_those_of_the_weights(tmp_path, config, key, value, role):
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    load(tmp_path, cache_tokens=64)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=role) as error:
        load(tmp_path, cache_tokens=64)
    assert error.value.code == "inference-folder"
