"""Steps that one rank says to the others are integers, and few of them while requests generate."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ds_inference import SchedulerConfig
from ds_inference.blocks import BlockPool
from ds_inference.rank_worker import PlanDecoder, PlanEncoder
from ds_inference.requests import Request, StepOutcome
from ds_inference.scheduler import Scheduler


@pytest.mark.parametrize("seed", range(5))
def test_plans_come_as_they_were(seed: int) -> None:
    """With cut prompts, preemption, forks whose last block is copied, and cancellation."""
    draw, encoder, decoder = random.Random(seed), PlanEncoder(), PlanDecoder()
    scheduler = Scheduler(BlockPool(draw.choice([12, 40]), 4), SchedulerConfig(16, 5, max_model_len=40))
    first = 1 << 31 if seed == 0 else 0  # a server's identities grow for ever
    copies, identities = 0, iter(range(first, first + 10**6))
    for _ in range(60):
        if draw.random() < 0.4:
            tokens = [draw.randrange(1 << 17) for _ in range(draw.randint(1, 25))]
            scheduler.add(Request(next(identities), tokens, draw.randint(1, 10)))
        running = [r for r in scheduler.requests.values() if r.blocks and r.num_computed_tokens]
        if running and draw.random() < 0.3:
            scheduler.fork(draw.choice(running), next(identities))
        if running and draw.random() < 0.1:
            scheduler.cancel(draw.choice(running).request_id)
        plan = scheduler.schedule()
        copies += len(plan.copies)
        plan = replace(plan, likeliest=draw.random() < 0.5)
        found = decoder.decode(encoder.encode(plan))
        for one, other in zip(plan.chunks, found.chunks, strict=True):
            assert (one.tokens, one.start, one.blocks, one.outputs) == (
                other.tokens, other.start, other.blocks, other.outputs,
            )  # fmt: skip
        assert (found.copies, found.likeliest) == (plan.copies, plan.likeliest)
        scheduler.update({c.request: StepOutcome((draw.randrange(1 << 17),)) for c in plan.chunks if c.outputs})
    assert copies


def test_a_request_that_generates_adds_seven_integers() -> None:
    encoder = PlanEncoder()
    scheduler = Scheduler(BlockPool(4096, 16), SchedulerConfig(1 << 16, 64))
    for i in range(32):
        scheduler.add(Request(i, [5] * 1000, 500))
    lengths = []
    for _ in range(10):
        plan = scheduler.schedule()
        lengths.append(len(encoder.encode(plan)))
        scheduler.update({c.request: StepOutcome((7,)) for c in plan.chunks})
    assert set(lengths[1:9]) == {3 + 32 * 7}
    assert lengths[9] == 3 + 32 * 8  # each begins a block
