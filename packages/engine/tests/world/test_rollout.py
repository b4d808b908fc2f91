"""What a rollout says is what the model that is trained would say, at every stage and after every step; so does `engine.generate`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import ds_engine
import ds_zero
from ds_config.errors import PlanError
from ds_engine import Rollout
from ds_engine import rollout as rollout_module
from ds_engine.generating import HybridEngine
from ds_inference import SamplingParams, decoder_model
from ds_testing import world

transformers = pytest.importorskip("transformers")


def tiny() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=31,
        eos_token_id=None,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.5)
    return model


def trained(stage: int, bf16: bool = False, **more: Any) -> Any:
    config = more | {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": bf16},
    }
    engine, *_ = ds_engine.initialize(model=tiny(), config=config)
    return engine


def step(engine: Any) -> None:
    x = torch.arange(16).view(2, 8) % 31
    engine.backward(engine(input_ids=x, labels=x).loss)
    engine.step()


@world(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_answers_follow_training(stage: int) -> None:
    engine = trained(stage)
    rollout = Rollout(engine, cache_tokens=256)
    rank = torch.distributed.get_rank()
    prompts = [[3, 4, 5, 6 + rank], [9]][: 2 - rank]  # ranks ask different things
    said = []
    for steps in range(3):
        answers = rollout.generate(prompts, SamplingParams(max_new_tokens=6, logprobs=0))
        assert {v for a in answers for v in a.versions} == {steps}
        state = engine.full_state_dict()
        everyone = [state]
        torch.distributed.broadcast_object_list(everyone)
        plain = tiny().eval()
        plain.load_state_dict(everyone[0])
        for prompt, answer in zip(prompts, answers, strict=True):
            whole = torch.tensor([prompt + answer.tokens])
            with torch.no_grad():
                logs = torch.log_softmax(plain(whole).logits[0], -1)
            at = torch.arange(len(prompt) - 1, whole.shape[1] - 1)
            assert logs[at].argmax(-1).tolist() == answer.tokens
            assert torch.allclose(logs[at, whole[0, at + 1]], torch.tensor(answer.logprobs), atol=1e-5)
        said.append([a.tokens for a in answers])
        rollout.release() if steps == 1 else None
        step(engine)
    assert said[0] != said[2], "training changed nothing that can be seen"
    engine.close()


@world(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_sync_writes_into_what_is_there(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There were old weights, new ones and a second cache at once, and graphs were captured anew after every step."""
    engine = trained(stage)
    rollout = Rollout(engine, cache_tokens=256)
    prompts, how = [[3, 4, 5, 6], [9]], SamplingParams(max_new_tokens=6)
    said = [[a.tokens for a in rollout.generate(prompts, how)]]
    held = rollout._generator
    assert held is not None
    captures, replays = [], []

    def record(call: Any) -> Any:  # as a graph: what was captured is computed again from where its inputs are
        captures.append(out := call())
        return (lambda: replays.append(out.copy_(call()))), out

    monkeypatch.setattr(decoder_model, "captures_in_place", lambda *_: True)
    held.decoder._record = record
    held._capture()
    places = {role: weight.data_ptr() for role, weight in held.decoder.weights.items()}
    count, decoder, cache = len(captures), held.decoder, held.cache
    monkeypatch.setattr(rollout_module, "load", None)
    for _ in range(2):
        step(engine)
        said.append([a.tokens for a in rollout.generate(prompts, how)])
    assert (held.decoder, held.cache, rollout._generator) == (decoder, cache, held)
    assert places == {role: weight.data_ptr() for role, weight in held.decoder.weights.items()}
    assert len(captures) == count
    assert replays
    monkeypatch.undo()
    assert [a.tokens for a in Rollout(engine, cache_tokens=256).generate(prompts, how)] == said[-1] != said[0]
    engine.close()


@world(1)
def test_a_sync_that_fails_leaves_nothing_half_new(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained(0)
    rollout = Rollout(engine, cache_tokens=256)
    rollout.generate([[9]])
    step(engine)
    read = rollout_module._Live.__getitem__

    def torn(live: Any, name: str) -> torch.Tensor:
        if "layers.1" in name:
            raise RuntimeError("the gather failed")
        return read(live, name)

    monkeypatch.setattr(rollout_module._Live, "__getitem__", torn)
    with pytest.raises(RuntimeError, match="gather failed"):
        rollout.generate([[9]])
    assert rollout.version is None
    monkeypatch.undo()
    (answer,) = rollout.generate([[9]], SamplingParams(max_new_tokens=4))
    assert set(answer.versions) == {1}
    engine.close()


@world(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_groups_of_one_prompt_differ(stage: int) -> None:
    """400 draws for one prompt, half of them on each rank, follow the distribution; a seed makes a call repeat."""
    rollout = Rollout(trained(stage), cache_tokens=256)
    how = SamplingParams(max_new_tokens=1, temperature=1.0)
    drawn = [a.tokens[0] for a in rollout.generate([[3, 4, 5]] * 200, how)]
    (answer,) = rollout.generate([[3, 4, 5]], SamplingParams(max_new_tokens=1, logprobs=31))
    seeded = replace(how, max_new_tokens=8, seed=5)
    twice = [[a.tokens for a in rollout.generate([[3, 4, 5]] * 4, seeded)] for _ in range(2)]
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, (drawn, twice[0]))
    assert goodness_of_fit(everyone[0][0] + everyone[1][0], answer.tops[0]) > 1e-6
    assert goodness_of_fit([3] * 400, answer.tops[0]) < 1e-6, "the test cannot tell"
    assert twice[0] == twice[1]
    assert len({tuple(tokens) for _, rows in everyone for tokens in rows}) == 8, "rows share streams"
    rollout.engine.close()


def goodness_of_fit(drawn: list[int], logs: Mapping[int, float]) -> float:
    """How likely a chi-square is that is as large as that of the draws; tokens that are expected less than 5 times count together."""
    wanted = {token: len(drawn) * math.exp(log) for token, log in logs.items()}
    bins = [[token] for token, count in wanted.items() if count >= 5] + [[t for t, c in wanted.items() if c < 5]]
    value = 0.0
    for tokens in filter(None, bins):
        expected = sum(wanted[t] for t in tokens)
        value += (sum(drawn.count(t) for t in tokens) - expected) ** 2 / expected
    return float(torch.special.gammaincc(torch.tensor((len(bins) - 1) / 2), torch.tensor(value / 2)))


@world(1)
def test_bf16_weights_are_those_of_the_forward() -> None:
    engine = trained(1, bf16=True)
    rollout = Rollout(engine, cache_tokens=64)
    (answer,) = rollout.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, logprobs=0))
    with torch.no_grad():
        logs = torch.log_softmax(engine(torch.tensor([[1, 2, 3, *answer.tokens]])).logits[0].float(), -1)
    found = logs[torch.arange(2, 6), torch.tensor(answer.tokens)]
    assert torch.allclose(found, torch.tensor(answer.logprobs), atol=0.05)
    engine.close()


@world(1)
def test_a_model_that_says_nothing_of_itself_is_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = ds_engine.initialize(model=torch.nn.Linear(2, 2), config=config)
    with pytest.raises(PlanError, match="Linear has no `config`"):
        Rollout(engine)
    engine.close()


@world(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_trains_generates(stage: int) -> None:
    engine = trained(stage, hybrid_engine={"enabled": True, "max_out_tokens": 12})
    assert isinstance(engine, HybridEngine)
    rank = torch.distributed.get_rank()
    alone = tiny()
    for _ in range(2):
        prompt = torch.tensor(
            [[3, 4, 5, 6 + rank][: 4 - rank]]
        )  # ranks ask for different things, and for different lengths
        how = {"max_new_tokens": 3 + 2 * rank, "do_sample": False, "synced_gpus": True}
        found = engine.generate(prompt, **how)
        assert not engine.module.lm_head.weight.requires_grad or found.grad_fn is None
        how.pop("synced_gpus")
        with whole(engine) as state:
            alone.load_state_dict(state)
        assert torch.equal(found, alone.generate(prompt, **how))
        step(engine)
    with pytest.raises(PlanError, match="max_out_tokens = 12"):
        engine.generate(torch.ones(1, 10, dtype=torch.int64), max_new_tokens=3)
    engine.close()


@contextmanager
def whole(engine: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The engine's weights, whole."""
    with ds_zero.GatheredParameters(engine.module.parameters()):
        yield {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
