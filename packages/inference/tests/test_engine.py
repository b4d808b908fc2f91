"""Requests at work: prefix reuse, preemption, speculation, samples, cancellation; none of it changes an answer."""

from __future__ import annotations

import pytest
import torch

from ds_config.errors import CheckpointError, PlanError, UnsupportedError
from ds_inference import SamplingParams, SchedulerConfig, load
from ds_inference.sampling import derive_seed

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
        eos_token_id=None,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(0, 0.4)
    return made


PROMPTS = [[1, 2, 3] * n + [n] for n in (1, 5, 9, 14, 2, 7, 3)]


def alone(model, prompt, how, **options):
    return load(model, **options).generate([prompt], how)[0].tokens


def test_a_cache_that_holds_hardly_one_gives_the_same_answers(model):
    how = SamplingParams(max_new_tokens=12)
    wanted = [alone(model, p, how) for p in PROMPTS]
    engine = load(model, cache_tokens=60, block_size=4, budget=SchedulerConfig(16, 8))
    requests = []
    add = engine.scheduler.add
    engine.scheduler.add = lambda r: (requests.append(r), add(r))[1]
    assert [a.tokens for a in engine.generate(PROMPTS, how)] == wanted
    assert sum(r.num_preemptions for r in requests) > 0, "the cache was not small enough to try it"


def test_what_was_computed_is_found_again(model):
    engine = load(model, block_size=4)
    how = SamplingParams(max_new_tokens=6)
    first = engine.generate([PROMPTS[3]], how)[0]
    engine.submit(PROMPTS[3] + first.tokens[:2], how)
    plan = engine.scheduler.schedule()
    assert plan.num_tokens <= 4
    engine.scheduler._planned = None
    more = load(model, block_size=4).generate([PROMPTS[3] + first.tokens[:2]], how)[0].tokens
    assert more[:4] == first.tokens[2:]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_steps_and_not_answers(model, temperature):
    how = SamplingParams(max_new_tokens=30, temperature=temperature, seed=4)
    plain, fast = load(model), load(model, num_speculative_tokens=4)
    wanted, found = plain.generate(PROMPTS, how), fast.generate(PROMPTS, how)
    assert [a.tokens for a in found] == [a.tokens for a in wanted]


def test_samples_begin_with_one_token_where_drafts_would_be_right(model):
    """The last token of the prompt is computed alone, as one that is generated; a sample of it had no token left to compute."""
    how = SamplingParams(max_new_tokens=6, logit_bias={7: 1e30}, n=2, logprobs=0)
    plain, drafted = (
        load(model, budget=SchedulerConfig(7, 2), num_speculative_tokens=count).generate([[7] * 8], how)
        for count in (0, 3)
    )
    for one, other in zip(plain, drafted, strict=True):
        assert one.tokens == other.tokens == [7] * 6
        assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4)


def test_drafts_save_steps_where_text_repeats(model):
    with torch.no_grad():  # a model that repeats: the next token is a function of the last one
        repeating = transformers.LlamaForCausalLM(model.config).eval()
        for name, param in repeating.named_parameters():
            if "layers" in name and "norm" not in name:
                param.zero_()
    steps = []
    for speculate in (0, 4):
        engine, count = load(repeating, num_speculative_tokens=speculate), 0
        engine.submit([5], SamplingParams(max_new_tokens=60))
        while not engine.idle:
            engine.step()
            count += 1
        steps.append(count)
    assert steps[0] == 60
    assert steps[1] < 40


def test_a_draw_does_not_depend_on_the_batch(model):
    hows = [
        SamplingParams(max_new_tokens=9, temperature=0.5 + 0.2 * i, seed=i, top_k=20, top_p=0.9, repetition_penalty=1.2)
        for i in range(len(PROMPTS))
    ]
    together = load(model, budget=SchedulerConfig(7, 5)).generate(PROMPTS, hows)
    for prompt, how, answer in zip(PROMPTS, hows, together, strict=True):
        assert answer.tokens == alone(model, prompt, how)


def test_samples_are_those_of_their_seeds(model):
    how = SamplingParams(max_new_tokens=8, temperature=1.0, n=3, seed=10)
    several = load(model).generate([PROMPTS[1], PROMPTS[2]], how)
    for i, prompt in enumerate((PROMPTS[1], PROMPTS[2])):
        for n in range(3):
            seed = derive_seed(derive_seed(10, "prompt", i), "sample", n)
            one = alone(model, prompt, SamplingParams(max_new_tokens=8, temperature=1.0, seed=seed))
            assert several[3 * i + n].tokens == one


def test_log_probabilities_are_the_models(model):
    (answer,) = load(model, budget=SchedulerConfig(3, 2)).generate(
        [PROMPTS[2]], SamplingParams(max_new_tokens=5, logprobs=2)
    )
    whole = torch.tensor([PROMPTS[2] + answer.tokens])
    with torch.no_grad():
        logs = torch.log_softmax(model(whole).logits[0], -1)
    at = torch.arange(len(PROMPTS[2]) - 1, whole.shape[1] - 1)
    wanted = logs[at, whole[0, at + 1]]
    assert torch.allclose(torch.tensor(answer.logprobs), wanted, atol=1e-5)
    assert all(len(top) == 2 and token in top for top, token in zip(answer.tops, answer.tokens, strict=True))


class Letters:
    """One character a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 60 for c in text]

    def decode(self, tokens) -> str:
        return "".join(chr(60 + t) for t in tokens)


def test_text_in_and_out_and_stop_strings(model):
    free = load(model, tokenizer=Letters()).generate(["ABC"], SamplingParams(max_new_tokens=12))[0]
    assert len(free.text) == 12
    stop = free.text[4:6]
    (cut,) = load(model, tokenizer=Letters()).generate(["ABC"], SamplingParams(max_new_tokens=12, stop=(stop,)))
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.reason == "stop"
    with pytest.raises(PlanError, match="no tokenizer"):
        load(model).generate(["ABC"])


def test_an_end_token_ends(model):
    free = alone(model, PROMPTS[0], SamplingParams(max_new_tokens=10))
    end = free[3]
    (answer,) = load(model).generate([PROMPTS[0]], SamplingParams(max_new_tokens=10, stop_token_ids=(end,)))
    assert answer.tokens == free[: free.index(end) + 1]
    assert answer.reason == "stop"


def test_cancelled_requests_leave_no_blocks(model):
    engine = load(model, budget=SchedulerConfig(6, 4))
    identities = [engine.submit(p, SamplingParams(max_new_tokens=20))[0] for p in PROMPTS]
    engine.step()
    assert engine.cancel(identities[0])
    engine.step()
    assert all(map(engine.cancel, identities[1:]))
    assert not engine.cancel(identities[0])
    assert engine.idle
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.count


def test_old_weights_answer_nothing_after_a_change(model):
    other = transformers.LlamaForCausalLM(model.config).eval()
    engine = load(model, block_size=4)
    how = SamplingParams(max_new_tokens=6)
    engine.generate([PROMPTS[3]], how)
    engine.submit(PROMPTS[4], how)
    engine.step()
    engine.decoder.weights.update(load(other).decoder.weights)
    engine.weights_changed(1)
    assert {e.version for e in engine.stream()} == {1}
    assert engine.generate([PROMPTS[3]], how)[0].tokens == alone(other, PROMPTS[3], how)


def test_from_a_folder(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    how = SamplingParams(max_new_tokens=6)
    assert alone(tmp_path, PROMPTS[1], how) == alone(model, PROMPTS[1], how)


def test_bad_folders_say_what_is_missing(model, tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    with pytest.raises(CheckpointError, match="safetensors"):
        load(tmp_path)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    with pytest.raises(UnsupportedError, match="unheard"):
        load(tmp_path)


def test_bad_sampling_names_all_rules():
    with pytest.raises(PlanError, match=r"temperature >= 0, 0 < top_p <= 1"):
        SamplingParams(temperature=-1, top_p=0)


def test_a_callback_says_which_tokens_may_come(tiny, prompts_of):
    """Even tokens only, and the second one is 42: with drafts, with samples and alone."""
    seen = []

    def allowed(answer):
        seen.append(tuple(answer))
        mask = torch.zeros(97, dtype=torch.bool)
        mask[42 if len(answer) == 1 else slice(0, None, 2)] = True
        return mask

    (prompt,) = prompts_of([12])
    how = SamplingParams(max_new_tokens=8, allowed_tokens=allowed)
    (answer,) = load(tiny("llama"), cache_tokens=256).generate([prompt], how)
    assert answer.tokens[1] == 42
    assert all(token % 2 == 0 for token in answer.tokens)
    assert seen == [tuple(answer.tokens[:i]) for i in range(8)]
    (drafted,) = load(tiny("llama"), cache_tokens=256, num_speculative_tokens=4).generate([prompt], how)
    assert drafted.tokens == answer.tokens
    many = load(tiny("llama"), cache_tokens=256).generate(
        [prompt], SamplingParams(max_new_tokens=4, allowed_tokens=allowed, n=3, temperature=1.0)
    )
    assert all(one.tokens[1] == 42 and all(t % 2 == 0 for t in one.tokens) for one in many)


def test_a_callback_that_allows_nothing_is_told(tiny, prompts_of):
    for mask in (torch.zeros(97, dtype=torch.bool), torch.ones(5, dtype=torch.bool), torch.ones(97)):
        with pytest.raises(PlanError, match="structured"):
            load(tiny("llama"), cache_tokens=256).generate(
                prompts_of([3]), SamplingParams(allowed_tokens=lambda _, mask=mask: mask)
            )


@pytest.mark.parametrize("keys", [{"num_speculative_tokens": -1}, {"block_size": 0}])
def test_numbers_that_say_nothing_are_refused(keys):
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    with pytest.raises(PlanError, match=str(next(iter(keys.values())))):
        load(transformers.LlamaForCausalLM(config), **keys)
