"""The scheduler on drawn work: never stuck, never over budget, no block lost, nobody overtaken, the same tokens as alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_config.errors import PlanError
from ds_inference.blocks import BlockPool, block_hashes
from ds_inference.scheduler import Request, RequestState, Scheduler, SchedulerConfig, SchedulerOutput, StepOutcome


class Model:
    """Says what comes next from all tokens before it, and has a cache that knows only what was put into it."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.cache = pool, {}

    @staticmethod
    def next(tokens: list[int]) -> int:
        return (sum(tokens) * 31 + len(tokens)) % 50

    def run(self, plan: SchedulerOutput, over: frozenset[int] = frozenset()) -> dict[int, StepOutcome]:
        size, found = self.pool.size, {}
        before = {(b, i): self.cache.get((a, i)) for a, b in plan.copies for i in range(size)}
        self.cache.update(before)
        for chunk in plan.chunks:
            for i, token in enumerate(chunk.tokens):
                at = chunk.start + i
                self.cache[chunk.blocks[at // size], at % size] = token
        for chunk in plan.chunks:  # attention reads the whole sequence from the cache
            seen = [self.cache[chunk.blocks[at // size], at % size] for at in range(chunk.start + len(chunk.tokens))]
            if chunk.outputs:
                accepted = []
                for i in range(chunk.outputs):
                    upto = len(seen) - chunk.outputs + 1 + i
                    accepted.append(self.next(seen[:upto]))
                    if upto < len(seen) and seen[upto] != accepted[-1]:
                        break
                found[chunk.request] = StepOutcome(tuple(accepted), chunk.request in over)
        return found


def alone(prompt: list[int], limit: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(Model.next(tokens))
    return tokens


@st.composite
def work(draw: st.DrawFn) -> tuple[BlockPool, SchedulerConfig, list[tuple[list[int], int, int]], random.Random]:
    size = draw(st.integers(1, 5))
    pool = BlockPool(draw(st.integers(4, 16)), size)
    tokens = draw(st.integers(1, 24))
    budget = SchedulerConfig(tokens, draw(st.integers(1, tokens)), draw(st.none() | st.integers(1, 8)))
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    most = pool.count * size
    base = [rng.randrange(4) for _ in range(most)]
    jobs = []
    for _ in range(draw(st.integers(1, 12))):
        length = rng.randint(1, most - 1)
        shared = rng.randint(0, length)
        prompt = base[:shared] + [rng.randrange(4) for _ in range(length - shared)]
        jobs.append((prompt, rng.randint(1, min(12, most - length)), rng.choice([0, 0, 0, 1])))
    return pool, budget, jobs, rng


@settings(max_examples=150, deadline=None)
@given(work(), st.booleans(), st.booleans())
def test_drawn_work_ends_as_each_request_alone(drawn, share, speculate) -> None:
    run(drawn, share=share, speculate=speculate)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(work(), st.booleans(), st.booleans())
def test_ten_thousand(drawn, share, speculate) -> None:
    run(drawn, share=share, speculate=speculate)


def run(drawn, *, share: bool, speculate: bool) -> None:
    pool, budget, jobs, rng = drawn
    scheduler, model = Scheduler(pool, budget, enable_prefix_caching=share), Model(pool)
    pending = list(enumerate(jobs))
    requests: dict[int, Request] = {}
    cancelled: set[int] = set()
    first_started: list[tuple[int, int]] = []
    steps = 0
    while pending or not scheduler.idle:
        steps += 1
        assert steps < 5000, "it goes on for ever"
        while pending and (scheduler.idle or rng.random() < 0.4):
            identity, (prompt, limit, priority) = pending.pop(0)
            requests[identity] = Request(identity, list(prompt), limit, priority)
            scheduler.add(requests[identity])
        drafts = {
            i: tuple(rng.choice([Model.next(r.tokens), 7]) for _ in range(rng.randint(0, 3)))
            for i, r in requests.items()
            if speculate
        }
        plan = scheduler.schedule(drafts)
        assert plan.chunks, "nothing is done though there is something to do"
        assert plan.num_tokens <= budget.max_num_batched_tokens
        assert len(plan.chunks) <= budget.max_num_seqs
        held = [b for c in plan.chunks for b in c.blocks[c.start // pool.size :]]
        assert len(held) == len(set(held)), "two requests write one block"
        for chunk in plan.chunks:
            if chunk.request not in {i for _, i in first_started}:
                first_started.append((requests[chunk.request].priority, chunk.request))
        if rng.random() < 0.05:
            victim = rng.choice(plan.chunks).request
            scheduler.cancel(victim)
            cancelled.add(victim)
        if rng.random() < 0.03:
            scheduler.clear_prefix_cache()
        scheduler.update(model.run(plan))
    assert pool.num_free == pool.count, "blocks were lost"
    assert not any(map(pool.ref_count, range(pool.count)))
    for identity, request in requests.items():
        if identity in cancelled:
            assert request.state in (RequestState.CANCELLED, RequestState.FINISHED)
        else:
            assert request.state is RequestState.FINISHED
            assert request.tokens == alone(jobs[identity][0], jobs[identity][1]), identity
    # Of one priority, nobody starts before an earlier one.
    for priority in (0, 1):
        order = [i for p, i in first_started if p == priority]
        assert order == sorted(order)


def test_one_token_for_each_that_generates_and_the_rest_for_prompts() -> None:
    """The rule of SplitFuse: the budget is used up while prompts are there."""
    pool = BlockPool(100, 4)
    scheduler, model = Scheduler(pool, SchedulerConfig(16, 8)), Model(pool)
    scheduler.add(Request(0, [1] * 5, 9))
    scheduler.update(model.run(scheduler.schedule()))
    scheduler.add(Request(1, [2] * 40, 9))
    sizes = []
    for _ in range(3):
        plan = scheduler.schedule()
        sizes.append([(c.request, len(c.tokens), c.outputs) for c in plan.chunks])
        scheduler.update(model.run(plan))
    assert sizes == [[(0, 1, 1), (1, 15, 0)], [(0, 1, 1), (1, 15, 0)], [(0, 1, 1), (1, 10, 1)]]


def test_a_shared_prompt_is_computed_once() -> None:
    pool = BlockPool(100, 4)
    scheduler, model = Scheduler(pool, SchedulerConfig(64, 8)), Model(pool)
    for identity in (0, 1):
        scheduler.add(Request(identity, [3] * 22, 1))
        plan = scheduler.schedule()
        assert plan.num_tokens == (22 if identity == 0 else 2)
        scheduler.update(model.run(plan))


def test_another_salt_shares_nothing() -> None:
    assert block_hashes([1, 2, 3, 4], 2) != block_hashes([1, 2, 3, 4], 2, b"adapter")
    assert block_hashes([1, 2, 3, 4], 2)[0] == block_hashes([1, 2, 9, 9], 2)[0]
    assert block_hashes([1, 2, 3, 4], 2)[1] != block_hashes([9, 2, 3, 4], 2)[1]


def test_forks_share_what_is_computed_and_go_their_own_way() -> None:
    pool = BlockPool(20, 4)
    scheduler, model = Scheduler(pool, SchedulerConfig(32, 8)), Model(pool)
    parent = Request(0, [1, 2, 3, 4, 5, 6], 8)
    scheduler.add(parent)
    plan = scheduler.schedule()
    scheduler.update({0: StepOutcome((9,))})
    child = scheduler.fork(parent, 1)
    child.tokens[-1] = 8  # another sample of the first token
    model.run(plan)
    while not scheduler.idle:
        plan = scheduler.schedule()
        scheduler.update(model.run(plan))
    assert parent.tokens == alone([1, 2, 3, 4, 5, 6, 9], 7)
    assert child.tokens == alone([1, 2, 3, 4, 5, 6, 8], 7)
    assert pool.num_free == pool.count


def test_blocks_of_a_fork_are_known_by_its_own_tokens() -> None:
    scheduler = Scheduler(BlockPool(9, 4), SchedulerConfig())
    parent = Request(0, [1] * 7, limit=8)
    scheduler.add(parent)
    scheduler.schedule()
    scheduler.update({0: StepOutcome((2,))})  # fills the parent's second block, as far as tokens are known
    child = scheduler.fork(parent, 1)
    child.tokens[7:] = [3]
    scheduler.cancel(0)
    scheduler.schedule()
    scheduler.update({1: StepOutcome((4,))})
    scheduler.cancel(1)
    for identity, token, found in ((2, 2, 4), (3, 3, 8)):
        scheduler.add(Request(identity, [*[1] * 7, token, 5], limit=1))
        scheduler.schedule()
        assert scheduler.requests[identity].num_cached_tokens == found
        scheduler.cancel(identity)
        scheduler.update({})


def test_what_never_fits_is_refused_at_once() -> None:
    scheduler = Scheduler(BlockPool(4, 4), SchedulerConfig(8, 4))
    with pytest.raises(PlanError, match="may grow to 17 tokens") as caught:
        scheduler.add(Request(0, [1] * 10, 7))
    assert caught.value.code == "inference-too-long"
    scheduler.add(Request(1, [1], 1))
    with pytest.raises(PlanError, match="one of that identity"):
        scheduler.add(Request(1, [1], 1))


def test_steps_are_planned_and_committed_in_turn() -> None:
    scheduler = Scheduler(BlockPool(4, 4), SchedulerConfig(8, 4))
    with pytest.raises(PlanError, match="without a step"):
        scheduler.update({})
    scheduler.add(Request(0, [1], 3))
    scheduler.schedule()
    with pytest.raises(PlanError, match="outcome is not known"):
        scheduler.schedule()
    with pytest.raises(PlanError, match="outcomes of requests"):
        scheduler.update({})
