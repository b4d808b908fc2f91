"""A step that is launched before the tokens of the last one are known gives the same tokens; the host waits once a step, a step late."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ds_accel import streams
from ds_inference import LLMEngine, SamplingParams, SchedulerConfig, load
from ds_inference.requests import RequestState


def requests_of(seed: int) -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(seed)

    def how() -> SamplingParams:
        return SamplingParams(
            draw.randint(1, 14),
            temperature=draw.choice([0.0, 0.8]),
            top_p=draw.choice([1.0, 0.8]),
            seed=draw.getrandbits(40),
            stop_token_ids=tuple(draw.sample(range(97), 12)),
            logprobs=draw.choice([None, 2]),
            n=draw.choice([1, 1, 1, 3]),
            logit_bias=draw.choice([{}, {7: 2.0}]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.0, 1.3]),
        )

    return [([draw.randrange(97) for _ in range(draw.randint(1, 30))], how()) for _ in range(draw.randint(1, 7))]


def events_of(engine: LLMEngine, seed: int) -> dict[int, list[tuple[int, float | None, str | None]]]:
    """Requests that arrive and are cancelled while others run: what each request gave, whenever it came."""
    draw = random.Random(seed)
    waiting = requests_of(seed)
    given: dict[int, list[tuple[int, float | None, str | None]]] = {}
    while waiting or not engine.idle:
        if waiting and (engine.idle or draw.random() < 0.4):
            prompt, how = waiting.pop()
            given.update((identity, []) for identity in engine.submit(prompt, how))
        for event in engine.step():
            given[event.request].append((event.token, event.logprob, event.reason))
    return given


def agree(model: Any, seed: int, native: bool = False) -> None:
    draw = random.Random(seed)
    options = {
        "native": native,
        "cache_tokens": draw.choice([64, 96, 2048]),
        "block_size": draw.choice([4, 16]),
        "budget": SchedulerConfig(draw.choice([6, 32]), draw.choice([2, 6])),
    }
    wanted, ahead = (events_of(load(model, lookahead=flag, **options), seed) for flag in (False, True))
    for identity, events in wanted.items():
        tokens, logs = ([e[i] for e in events] for i in (0, 1))
        assert [e[0] for e in ahead[identity]] == tokens, (seed, identity)
        assert ahead[identity][-1][2] == events[-1][2]
        for one, other in zip(logs, (e[1] for e in ahead[identity]), strict=True):
            assert one == other or abs(one - other) < 1e-4  # batches differ, and so do the roundings of products


@pytest.mark.parametrize("seed", range(4))
def test_the_same_tokens(seed: int, tiny: Any) -> None:
    agree(tiny("llama"), seed, native=seed % 2 == 0)


@pytest.mark.slow
def test_the_same_tokens_for_two_hundred_courses(tiny: Any) -> None:
    for seed in range(4, 200):
        agree(tiny("llama"), seed, native=seed % 2 == 0)


class Course(streams.StreamsBackend):
    """Writes down what the host does: launches of forwards, and waits for tokens, each with the number of the step."""

    def __init__(self, engine: LLMEngine) -> None:
        self.log: list[tuple[str, int]] = []
        self.events = self.launches = 0
        forward = engine.decoder.forward

        def launch(*arguments: Any) -> Any:
            self.launches += 1
            self.log.append(("launch", self.launches))
            return forward(*arguments)

        engine.decoder.forward = launch

    def new_event(self, module: Any) -> streams.DeviceEvent:
        self.events += 1
        number, log = self.events, self.log

        class Event(streams.CompletedEvent):
            def synchronize(self) -> None:
                log.append(("wait", number))

        return Event()


def test_a_step_waits_once_and_for_the_step_before(tiny: Any) -> None:
    for ahead in (False, True):
        engine = load(tiny("llama"), native=False, lookahead=ahead)
        for n in (6, 6):
            engine.submit([5, 9, 2], SamplingParams(n))
        with streams.use_backend(course := Course(engine)):
            assert sum(1 for _ in engine.stream()) == 12
        if ahead:
            steps = [
                ("launch", 1),
                *(step for n in range(1, 6) for step in (("launch", n + 1), ("wait", n))),
                ("wait", 6),
            ]
        else:
            steps = [step for n in range(1, 7) for step in (("launch", n), ("wait", n))]
        assert course.log == steps


def test_a_row_that_ended_is_dropped(tiny: Any) -> None:
    """A stop token, known when the next step is under way: its row there is for nobody, and its blocks are free."""
    model = tiny("llama")
    long = load(model, native=False).generate([[5, 9, 2]], SamplingParams(12))[0].tokens
    engine = load(model, native=False, lookahead=True, cache_tokens=64)
    how = SamplingParams(12, stop_token_ids=(long[3],))
    stop = long.index(long[3])
    (ended,) = engine.submit([5, 9, 2], how)
    engine.submit([1, 2], SamplingParams(12))
    events = list(engine.stream())
    assert [e.token for e in events if e.request == ended] == long[: stop + 1]
    assert len([e for e in events if e.request != ended]) == 12
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.count


def test_cancelled_under_way_and_new_weights(tiny: Any) -> None:
    model = tiny("llama")
    wanted = load(model, native=False).generate([[5, 9, 2]], SamplingParams(9))[0].tokens
    engine = load(model, native=False, lookahead=True)
    (first,), (second,) = (engine.submit([5, 9, 2], SamplingParams(9)) for _ in range(2))
    events = [*engine.step(), *engine.step()]
    assert engine._flight is not None
    assert engine.cancel(first)
    events += engine.step()
    engine.weights_changed(4)
    assert engine._flight is None
    events += engine.stream()
    assert [e.token for e in events if e.request == second] == wanted
    assert len([e for e in events if e.request == first]) == 2
    engine.submit([5, 9, 2], SamplingParams(9))
    engine.step()
    assert all(engine.cancel(identity) for identity in list(engine._asks))
    assert engine.idle
    assert engine.step() == []
    assert engine.generate([[5, 9, 2]], SamplingParams(9))[0].tokens == wanted


@pytest.mark.parametrize("failing", [2, 4])
def test_a_launch_ahead_that_fails_is_made_again(failing: int, tiny: Any) -> None:
    """Its error is that of the step when it is due, if it comes then, too."""
    model, prompts = tiny("llama"), [[5, 9, 2], [4]]
    wanted = [a.tokens for a in load(model, native=False).generate(prompts, SamplingParams(9))]
    engine = load(model, native=False, lookahead=True)
    forward, calls = engine.decoder.forward, []

    def breaks(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == failing:
            raise RuntimeError("once")
        return forward(*arguments)

    engine.decoder.forward = breaks
    assert [a.tokens for a in engine.generate(prompts, SamplingParams(9))] == wanted
    assert len(calls) == 10


def test_an_error_while_two_steps_are_under_way_leaves_known_tokens(tiny: Any) -> None:
    model = tiny("llama")
    wanted = load(model, native=False).generate([[5, 9, 2]], SamplingParams(9))[0].tokens
    engine = load(model, native=False, lookahead=True)
    (identity,) = engine.submit([5, 9, 2], SamplingParams(9))
    events = [*engine.step(), *engine.step()]
    commit = engine._commit
    engine._commit = lambda flight: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine._commit = commit  # type: ignore[method-assign]
    request = engine.scheduler.requests[identity]
    assert (request.num_pending, request.state, request.sampled) == (0, RequestState.WAITING, [e.token for e in events])
    events += engine.stream()
    assert [e.token for e in events] == wanted


def test_tokens_that_are_not_known_come_from_the_step_before() -> None:
    from ds_inference.flights import feed_tokens, point_to_rows
    from ds_inference.paged_attention import make_batch
    from ds_inference.requests import ScheduledChunk

    chunks = [ScheduledChunk(i, tokens, 1, (i,), 1) for i, tokens in ((3, (-1,)), (4, (8, 9)), (5, (-1,)))]
    batch, _ = make_batch(point_to_rows(chunks, {5: 0, 3: 2}), 4, torch.device("cpu"))
    assert feed_tokens(batch, torch.tensor([40, 41, 42])).tokens.tolist() == [42, 40, 8, 9]
