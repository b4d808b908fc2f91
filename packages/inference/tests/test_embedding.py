"""Vectors of texts: those of the module one by one, whatever is batched."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ds_config.errors import CheckpointError, PlanError
from ds_inference import load_embedder

transformers = pytest.importorskip("transformers")


def bert(kind: str = "Bert") -> Any:
    torch.manual_seed(0)
    more = {"num_key_value_heads": 2} if kind == "Qwen3" else {}
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=97,
        max_position_embeddings=128, pad_token_id=0, **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind}Model")(config).eval()


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "ModernBert", "Qwen3"])
@pytest.mark.parametrize("pooling", ["mean", "first", "last", "max"])
def test_vectors_do_not_depend_on_the_batch(kind: str, pooling: Any, prompts_of: Any) -> None:
    model, prompts = bert(kind), [[t + 3 for t in p if t < 90] or [5] for p in prompts_of([1, 40, 7, 23, 7, 60])]
    found = load_embedder(model, pooling=pooling, budget=100).embed(prompts)
    assert found.shape == (6, 32)
    for vector, prompt in zip(found, prompts, strict=True):
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        wanted = {"mean": hidden.mean(0), "first": hidden[0], "last": hidden[-1], "max": hidden.amax(0)}[pooling]
        assert (vector - wanted / wanted.norm()).abs().max() < 1e-5


def test_a_folder_of_sentence_transformers_is_followed(tmp_path: Any) -> None:
    model = bert()
    model.save_pretrained(tmp_path)
    parts = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (tmp_path / "modules.json").write_text(
        json.dumps([{"path": p, "type": f"sentence_transformers.models.{t}"} for p, t in parts])
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    embedder = load_embedder(tmp_path)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([[5, 6, 7]])).last_hidden_state[0, 0]
    assert torch.allclose(embedder.embed([[5, 6, 7]])[0], wanted, atol=1e-5), "first token, not normalized"
    with pytest.raises(PlanError, match="1 to 20"):
        embedder.embed([[1] * 21])
    with pytest.raises(PlanError, match="no tokenizer"):
        embedder.embed(["text"])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_embedder(tmp_path / "1_Pooling")
