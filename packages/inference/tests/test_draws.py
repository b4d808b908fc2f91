"""Draws follow the distribution in every way to sample, rows of one call never share a stream, and a seed makes a call repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from ds_inference import SamplingParams, SchedulerConfig, init_inference, load
from ds_inference.batched_sampling import SequencePlace, _sample_torch, _tables, sample_rows, sampling_row

transformers = pytest.importorskip("transformers")

WORDS, DRAWS = 13, 400
PROMPT = [3, 1, 4]
WAYS = ["injected", "own forward", "equal prompts", "samples", "step by step"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=WORDS,
        eos_token_id=None,
        bos_token_id=None,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(0, 0.4)
    return made


def shares(model, prompt: Sequence[int]) -> list[float]:
    with torch.no_grad():
        return torch.softmax(model(torch.tensor([list(prompt)])).logits[0, -1], -1).tolist()


def goodness_of_fit(drawn: Sequence[object], wanted: Mapping[object, float]) -> float:
    """How likely a chi-square is that is as large as that of the draws; what is expected less than 5 times counts together."""
    often = {key: p * len(drawn) for key, p in wanted.items()}
    bins = [[key] for key, count in often.items() if count >= 5] + [[k for k, c in often.items() if c < 5]]
    bins = [keys for keys in bins if sum(often[k] for k in keys) > 1e-9]
    value = 0.0
    for keys in bins:
        expected = sum(often[k] for k in keys)
        value += (sum(map(list(drawn).count, keys)) - expected) ** 2 / expected
    return float(torch.special.gammaincc(torch.tensor((len(bins) - 1) / 2), torch.tensor(value / 2)))


def rows(way: str, model, count: int, length: int, seed: int | None = None) -> list[list[int]]:
    """So many answers to one prompt in one call."""
    if way in ("injected", "own forward"):
        engine = init_inference(model, dtype=torch.float32, replace_with_kernel_inject=way == "injected")
        if seed is not None:
            torch.manual_seed(seed)
        ids = torch.tensor([PROMPT] * (count // 2))
        how = {"do_sample": True, "top_k": 0, "max_new_tokens": length, "pad_token_id": 0}
        return engine.generate(ids, num_return_sequences=2, **how)[:, len(PROMPT) :].tolist()
    engine, how = load(model, cache_tokens=4096), SamplingParams(length, temperature=1.0, seed=seed)
    if way == "samples":
        return [a.tokens for a in engine.generate([PROMPT], replace(how, n=count))]
    if way == "equal prompts":
        return [a.tokens for a in engine.generate([PROMPT] * count, how)]
    (first, *_) = said = {i: [] for one in range(count) for i in engine.submit(PROMPT, how)}
    assert first == 0
    for event in engine.stream():
        said[event.request].append(event.token)
    return list(said.values())


@pytest.mark.parametrize("way", WAYS)
def test_four_hundred_draws_follow_the_distribution(model, way):
    drawn = rows(way, model, DRAWS, 2)
    first = dict(enumerate(shares(model, PROMPT)))
    pairs = {(a, b): p * q for a, p in first.items() for b, q in enumerate(shares(model, [*PROMPT, a]))}
    assert goodness_of_fit([row[0] for row in drawn], first) > 1e-6
    assert goodness_of_fit([tuple(row) for row in drawn], pairs) > 1e-6
    assert goodness_of_fit([drawn[0][0]] * DRAWS, first) < 1e-6, "the test cannot tell"


@pytest.mark.parametrize("way", WAYS)
def test_calls_without_a_seed_differ(model, way):
    assert rows(way, model, 4, 12) != rows(way, model, 4, 12)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "step by step"])
def test_a_seed_repeats_a_call_whose_rows_differ(model, way):
    once, again, other = (rows(way, model, 8, 12, seed) for seed in (7, 7, 8))
    assert once == again
    assert len({tuple(row) for row in once + other}) == 16


def test_a_row_is_that_of_its_seed_and_its_number_only(model):
    """Whatever else is in the batch, with drafts, with a small cache, and of whichever length the call is."""
    how = SamplingParams(12, temperature=1.0, seed=11, n=2)
    wanted = [a.tokens for a in load(model).generate([PROMPT] * 6, how)]
    for options in (
        {"num_speculative_tokens": 3},
        {"budget": SchedulerConfig(5, 3)},
        {"cache_tokens": 48, "block_size": 4},
    ):
        assert [a.tokens for a in load(model, **options).generate([PROMPT] * 6, how)] == wanted, options
    assert [a.tokens for a in load(model).generate([PROMPT] * 3, how)] == wanted[:6]
    assert [a.tokens for a in load(model).generate([PROMPT], how)] == wanted[:2]


def test_streams_of_a_call_never_meet(model):
    """Seeds that neighbour each other, prompts and samples: no two rows are drawn alike."""
    hows = [SamplingParams(12, temperature=1.0, seed=seed, n=3) for seed in (0, 1, 0, 2, 1, 0)]
    said = [tuple(a.tokens) for a in load(model).generate([PROMPT] * 6, hows)]
    assert len(set(said)) == 18
    alone = [tuple(a.tokens) for a in load(model).generate([PROMPT], hows[1])]
    assert said[3:6] == alone, "the first of a seed is as alone"


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6])
def test_the_smallest_temperatures_take_the_likeliest(temperature):
    logits = torch.tensor([1.0, -3.0, 9.0, 8.9, 2.0])
    how = SamplingParams(temperature=temperature)
    rows = [sampling_row(0, replace(how, seed=seed), SequencePlace([1], 1), 5) for seed in range(50)]
    assert {token.token for token in sample_rows(logits[None], rows).read()} == {2}


@pytest.mark.parametrize(
    "how",
    [
        SamplingParams(logit_bias={1: 1e30, 2: 1e30}, presence_penalty=-1e30, temperature=1.0),
        SamplingParams(repetition_penalty=1e-30, frequency_penalty=-1e30, temperature=0.5, top_p=0.9),
        SamplingParams(repetition_penalty=1e30, frequency_penalty=1e30, temperature=2.0, min_p=0.1),
    ],
)
def test_the_largest_values_leave_numbers(how):
    row = sampling_row(0, replace(how, seed=1), SequencePlace([0, 1, 1, 1, 2], 2), 3)
    tables = _tables([row], elsewhere=False)
    work = torch.tensor([[30.0, -30.0, 0.0]])
    (token,) = _sample_torch(work, tables).tolist()
    assert 0 <= token < 3
    assert work.isfinite().all()
