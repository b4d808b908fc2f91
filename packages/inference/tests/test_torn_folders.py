"""Model folders that were cut, changed or made by hand: an error that says so, whatever is wrong with them."""

import json
import os
import time

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ds_config.errors import DsError
from ds_inference.model_loader import load

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    return tmp_path


CONFIGS = [
    {"num_hidden_layers": 0},
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": -1},
    {"num_hidden_layers": "two"},
    {"num_attention_heads": 0},
    {"num_attention_heads": 3},
    {"num_key_value_heads": 0},
    {"hidden_size": 0},
    {"hidden_size": None},
    {"hidden_size": 48},
    {"vocab_size": 10**12},
    {"vocab_size": 49},
    {"rope_theta": "x"},
    {"rope_scaling": {"rope_type": "spiral"}},
    {"model_type": ["llama"]},
    {"max_position_embeddings": -5},
]


@pytest.mark.parametrize("change", CONFIGS, ids=str)
def test_configurations(folder, change):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    began = time.process_time()
    try:
        load(folder)
    except DsError as error:
        assert str(folder) in str(error) or error.code != "inference-folder"  # noqa: PT017
    assert time.process_time() - began < 60  # a hang, not a speed


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b"1"])
def test_configurations_that_are_none(folder, content):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(DsError) as caught:
        load(folder)
    assert caught.value.code == "inference-folder"


def test_pipes(folder):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(DsError) as caught:
        load(folder)
    assert caught.value.code == "inference-folder"


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 0.5, 0.99])
def test_weights_that_were_cut(folder, kept):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: kept if isinstance(kept, int) else int(len(data) * kept)])
    with pytest.raises(DsError) as caught:
        load(folder)
    assert caught.value.code == "inference-folder"


@pytest.mark.parametrize("shape", [(3,), (), (0, 32), (32, 31), (1, 2, 3)])
def test_tensors_of_other_shapes(folder, shape):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj" in name)
    save_file(tensors | {name: torch.zeros(shape)}, file, {"format": "pt"})
    with pytest.raises(DsError):
        load(folder).generate([[1, 2, 3]])
