"""Every family over the whole grid: prompts of 1 to 300 tokens, batches of 1, 7 and 64, chunks of 1, 16 and 512, forced preemption, and
prompts whose beginnings are in the cache; greedy tokens are transformers' own. Minutes: `pytest -m slow`. Two ranks: world/test_ranks.py."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ds_inference import SamplingParams, SchedulerConfig, load

pytestmark = pytest.mark.slow
COUNT = 4


def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """By `generate`, prompts of one length at a time, so that nothing is padded."""
    found: dict[int, list[int]] = {}
    for length in sorted({len(p) for p in prompts}):
        rows = [i for i, p in enumerate(prompts) if len(p) == length]
        ids = torch.tensor([prompts[i] for i in rows])
        # Without a mask, transformers takes tokens that look like padding for padding.
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=COUNT, do_sample=False, pad_token_id=0)
        found |= {i: tokens[length:].tolist() for i, tokens in zip(rows, out, strict=True)}
    return [found[i] for i in range(len(prompts))]


def work(draw: random.Random) -> list[list[int]]:
    """64 prompts of 1 to 300 tokens; half of them begin alike."""
    lengths = (
        [1, 2, 15, 16, 17, 300] * 4
        + [draw.randint(1, 300) for _ in range(4)]
        + [draw.randint(1, 40) for _ in range(36)]
    )
    base = [draw.randrange(97) for _ in range(300)]
    prompts = []
    for i, length in enumerate(lengths):
        shared = draw.randint(0, length) if i % 2 else 0
        prompts.append(base[:shared] + [draw.randrange(97) for _ in range(length - shared)])
    return prompts


def test_greedy_over_the_grid(every_family: str, tiny: Any) -> None:
    model, draw = tiny(every_family), random.Random(11)
    prompts = work(draw)
    wanted = expected(model, prompts)
    how = SamplingParams(COUNT)
    cuts = [(1, 512), (16, 512), (512, 512)]
    for chunk, tokens in cuts:
        for batch in (1, 7, 64):
            # A step of one chunk of 1 is slow for 300 tokens: the long prompts go once, with the whole batch.
            rows = list(range(len(prompts))) if batch == 64 else draw.sample(range(len(prompts)), batch)
            budget = SchedulerConfig(tokens, min(batch, 64), max_prefill_chunk=chunk, max_model_len=500)
            # Room for hardly more than the longest: with a batch, requests are pushed out and computed again.
            cache = 320 if batch == 7 else 8192
            engine = load(model, cache_tokens=cache, block_size=16, budget=budget, native=batch != 7)
            answers = engine.generate([prompts[i] for i in rows], how)
            for i, answer in zip(rows, answers, strict=True):
                assert answer.tokens == wanted[i], (chunk, batch, len(prompts[i]))
            again = engine.generate([prompts[i] for i in rows[:3]], how)  # their beginnings are in the cache now
            assert [a.tokens for a in again] == [wanted[i] for i in rows[:3]]
            assert engine.scheduler.pool.num_free == engine.scheduler.pool.count
    small = load(model, cache_tokens=320, block_size=16, budget=SchedulerConfig(64, 16, max_model_len=500))
    pushed = _count_preempted(small)
    short = [p for p in prompts if len(p) <= 40]
    late = load(model, budget=SchedulerConfig(64, 16, max_model_len=500)).generate(short, SamplingParams(20))
    assert [a.tokens for a in small.generate(short, SamplingParams(20))] == [a.tokens for a in late]
    assert sum(r.num_preemptions for r in pushed) > 0, "the cache was not small enough to try it"


def _count_preempted(engine: Any) -> list[Any]:
    requests: list[Any] = []
    add = engine.scheduler.add
    engine.scheduler.add = lambda r: (requests.append(r), add(r))[1]
    return requests
