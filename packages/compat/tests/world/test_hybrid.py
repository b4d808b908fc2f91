"""A client that trains and generates with one engine, as DeepSpeed-Chat does."""

from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.rollout import (
    ResponseTokenBatch,
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
    generalized_jsd_loss,
)

from ds_config.errors import UnsupportedError
from ds_testing import world

transformers = pytest.importorskip("transformers")

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
    "hybrid_engine": {"enabled": True, "max_out_tokens": 32, "inference_tp_size": 1, "release_inference_cache": False},
}


@world(2)
def test_it_trains_and_answers():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 31,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, eos_token_id=None))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    assert isinstance(engine, DeepSpeedHybridEngine)
    rollout = build_rollout(RolloutConfig(), engine, SimpleNamespace(eos_token_id=7, pad_token_id=None))
    ids = torch.tensor([[0, 3, 4], [5, 6, 8]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    for _ in range(2):
        engine.eval()
        plain = engine.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
        assert plain.shape == (2, 7)
        answers = rollout.generate(RolloutRequest(ids, mask), SamplingConfig(max_new_tokens=4, temperature=0))
        assert (answers.batch_size, answers.response_start_idx.tolist()) == (2, [3, 3])
        kept = answers.attention_mask[:, 3:].bool()
        assert torch.equal(answers.input_ids[:, 3:][kept], plain[:, 3 : answers.seq_len][kept])
        assert torch.equal(answers.attention_mask[:, :3], mask)
        engine.train()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        rollout.sync_weights(engine.global_steps)
    several = rollout.generate(RolloutRequest(ids, mask), SamplingConfig(max_new_tokens=2, n_samples_per_prompt=3))
    assert several.batch_size == 6
    targets = ResponseTokenBatch.from_rollout(several)
    logits = targets.select_causal_logits(engine(input_ids=several.input_ids).logits)
    found = generalized_jsd_loss(logits, logits.roll(1, 0), targets.response_mask, beta=0.3)
    assert found.loss > 0
    assert found.valid_token_count == several.attention_mask[:, 3:].sum()
    for make, words in (
        (lambda: RolloutRequest(ids[0], mask[0]), "must be 2-D"),
        (lambda: build_rollout(RolloutConfig(engine="vllm")), "vllm"),
        (lambda: build_rollout(RolloutConfig()), "needs both"),
        (lambda: generalized_jsd_loss(logits, logits, targets.response_mask, beta=2), "beta"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    graphs = build_rollout(RolloutConfig(use_graph_capture=True), engine, rollout.tokenizer)
    with pytest.raises(UnsupportedError, match="use_graph_capture"):
        graphs.generate(RolloutRequest(ids, mask), SamplingConfig(max_new_tokens=4))
    engine.destroy()
