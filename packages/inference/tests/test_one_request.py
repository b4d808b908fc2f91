"""One request's fault is that request's: refused before it is queued, or ended alone; everybody else's tokens stay what they are."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch

from ds_config.errors import PlanError
from ds_inference import SamplingParams, SchedulerConfig, load
from ds_inference.recovery import compute_apart
from ds_inference.requests import ScheduledChunk

transformers = pytest.importorskip("transformers")

POISON = 60
PROMPTS = [[1, 2, 3] * n + [n] for n in (1, 5, 9, 14, 2, 7, 3)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=61,
        max_position_embeddings=64,
        eos_token_id=None,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(0, 0.4)
    return made


class Numbers:
    """A token is its number and a space."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens) -> str:
        if POISON in tokens:
            raise LookupError("this tokenizer does not know the token")
        return "".join(f"{token} " for token in tokens)


def poisoned(engine) -> list[int]:
    """From now on a forward with a certain token raises. Returns a list that gets a number for each that did."""
    plain, raised = engine.decoder.forward, []

    def forward(batch, cache):
        if POISON in batch.tokens.tolist():
            raised.append(len(batch.tokens))
            raise IndexError("index out of range in self")
        return plain(batch, cache)

    engine.decoder.forward = forward
    return raised


# ---- before it is queued

WRONG = [
    ({"logit_bias": {61: 1.0}}, "logit_bias"),
    ({"logit_bias": {300: -100.0, 3: 1.0}}, "300"),
    ({"stop_token_ids": (61,)}, "stop_token_ids"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ({"logprobs": 62}, "61 log-probabilities"),
    ({"stop": ("a",)}, "no tokenizer"),
    ({"max_new_tokens": 61}, "may grow to 65 tokens"),
    ({"max_new_tokens": 61, "n": 3}, "may grow to 65 tokens"),
]


@pytest.mark.parametrize(("how", "words"), WRONG)
def test_what_no_step_could_compute_is_refused_at_once(model, how, words):
    engine = load(model)
    with pytest.raises(PlanError, match=words):
        engine.submit(PROMPTS[0], SamplingParams(**how))
    assert engine.idle


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"],
)
def test_numbers_that_are_none_are_refused(name, value):
    with pytest.raises(PlanError, match=name):
        SamplingParams(**{name: {3: value} if name == "logit_bias" else value})


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1.5: 1.0}}, "logit_bias"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": 10**5000}, "seed"),
        ({"max_new_tokens": 10**5000}, "max_new_tokens"),
        ({"n": 0}, "n >= 1"),
        ({"n": 1.5}, "whole numbers"),
        ({"max_new_tokens": "3"}, "whole numbers"),
        ({"stop_token_ids": (1.5,)}, "whole numbers"),
        ({"logprobs": True}, "whole numbers"),
        ({"seed": False}, "whole numbers"),
        ({"temperature": True}, "numbers in temperature"),
        ({"temperature": "1"}, "numbers in temperature"),
        ({"stop": "abc"}, "several strings in stop"),
        ({"logit_bias": [1]}, "mapping in logit_bias"),
    ],
)
def test_sampling_refuses(how, words):
    with pytest.raises(PlanError, match=words):
        SamplingParams(**how)


@pytest.mark.parametrize("prompt", [[1.5], ["a"], [None], [[1]], 5])
def test_prompts_of_no_tokens_are_refused(model, prompt):
    with pytest.raises(PlanError, match="no text and no tokens"):
        load(model).submit(prompt)
    tensors, integers = (load(model).generate([some], SamplingParams(4)) for some in (torch.tensor([1, 2]), [1, 2]))
    assert tensors[0].tokens == integers[0].tokens


@pytest.mark.parametrize("how", [{"top_p": 1e-320}, {"min_p": 1.0, "temperature": 1e-320}])
def test_the_smallest_numbers_leave_the_likeliest_token(model, how):
    engine = load(model)
    plain = engine.generate(PROMPTS, SamplingParams(6))
    drawn = engine.generate(PROMPTS, SamplingParams(6, **{"temperature": 1.0, "seed": 1, **how}))
    assert [a.tokens for a in drawn] == [a.tokens for a in plain]
    assert len(engine.generate(PROMPTS[:1], SamplingParams(6, temperature=1e308, min_p=0.1))[0].tokens) == 6


@pytest.mark.parametrize("name", ["banana", "cpu:x", *([] if torch.cuda.is_available() else ["cuda:0"])])
def test_a_device_that_cannot_be_used_is_named(model, name):
    with pytest.raises(PlanError, match=name) as caught:
        load(model, device=name)
    assert caught.value.code == "inference-device"


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("length", "cache"), [(64, 512), (1 << 20, 64)])
def test_several_samples_of_the_full_length(model, share, length, cache):
    """Prompt and limit fill a sequence, or the cache, to the last token."""
    prompt = [1 + i % 50 for i in range(48)]
    how = SamplingParams(16, temperature=1.0, seed=1, n=3)
    engine = load(
        model,
        budget=SchedulerConfig(32, 8, max_model_len=length),
        cache_tokens=cache,
        block_size=4,
        enable_prefix_caching=share,
    )
    found = engine.generate([prompt], how)
    assert [len(a.tokens) for a in found] == [16, 16, 16]
    assert [a.tokens for a in found] == [a.tokens for a in load(model, cache_tokens=1024).generate([prompt], how)]


def test_a_refusal_leaves_nothing_of_its_call(model):
    engine = load(model)
    with pytest.raises(PlanError, match="tokens"):
        engine.generate([*PROMPTS, [61]], SamplingParams(4))
    assert engine.idle
    assert len(engine.generate(PROMPTS, SamplingParams(4))) == len(PROMPTS)


# ---- in a step


def never(answer):
    raise ZeroDivisionError("a grammar that fails")


def late(answer):
    if len(answer) == 3:
        raise ZeroDivisionError("a grammar that fails")


FAULTS = [
    SamplingParams(8, allowed_tokens=never),
    SamplingParams(8, allowed_tokens=late),
    SamplingParams(8, stop=("x",), logit_bias={POISON: 1e6}),
]


@pytest.mark.parametrize("fault", range(len(FAULTS)))
@pytest.mark.parametrize("samples", [1, 3])
def test_what_one_request_raises_ends_it_alone(model, fault, samples):
    wanted = [a.tokens for a in load(model).generate(PROMPTS, SamplingParams(8))]
    engine, failed = load(model, budget=SchedulerConfig(16, 8), tokenizer=Numbers()), {}
    engine.on_failure = lambda identity, error: failed.update({identity: type(error)})
    said = {}
    for prompt in PROMPTS[:4]:
        said[engine.submit(prompt, SamplingParams(8))[0]] = []
    bad = engine.submit([5, 6], replace(FAULTS[fault], n=samples))
    for prompt in PROMPTS[4:]:
        said[engine.submit(prompt, SamplingParams(8))[0]] = []
    for event in engine.stream():
        if event.request in said:
            said[event.request].append(event.token)
    assert list(said.values()) == wanted
    assert failed == dict.fromkeys(bad, LookupError if fault == 2 else ZeroDivisionError)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.count


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("place", range(5))
def test_a_batch_that_fails_is_halved_until_the_culprit_is_alone(model, place, speculate):
    prompts = PROMPTS[:4]
    wanted = [a.tokens for a in load(model).generate(prompts, SamplingParams(8))]
    bad = [5, 6, POISON]
    engine, failed = load(model, budget=SchedulerConfig(64, 8), num_speculative_tokens=speculate), []
    raised = poisoned(engine)
    engine.on_failure = lambda identity, error: failed.append((identity, type(error)))
    numbers = [engine.submit(p, SamplingParams(8))[0] for p in [*prompts[:place], bad, *prompts[place:]]]
    said = {number: [] for number in numbers}
    for event in engine.stream():
        said[event.request].append(event.token)
    assert [tokens for number, tokens in said.items() if number != numbers[place]] == wanted
    assert failed == [(numbers[place], IndexError)]
    assert 2 <= len(raised) <= 4
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.count
    assert [a.tokens for a in engine.generate(prompts, SamplingParams(8))] == wanted


def test_two_culprits_and_one_that_fails_late(model):
    wanted = [a.tokens for a in load(model).generate(PROMPTS[:3], SamplingParams(8))]
    engine, failed = load(model, budget=SchedulerConfig(64, 8)), []
    poisoned(engine)
    engine.on_failure = lambda identity, error: failed.append(identity)
    first, *rest = engine.submit(PROMPTS[3], SamplingParams(8, logit_bias={POISON: 1e6}, n=2))
    bad = engine.submit([POISON, 5], SamplingParams(8))[0]
    said = {engine.submit(p, SamplingParams(8))[0]: [] for p in PROMPTS[:3]}
    for event in engine.stream():
        if event.request in said:
            said[event.request].append(event.token)
    assert list(said.values()) == wanted
    assert sorted(failed) == sorted([first, *rest, bad])


def test_states_are_not_counted_twice():
    """A recurrent model: what was tried before the culprit was found is computed from the beginning again."""
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=61, state_size=4, eos_token_id=None, bos_token_id=None
    )
    mamba = transformers.MambaForCausalLM(config).eval()
    with torch.no_grad():
        for name, param in mamba.named_parameters():
            if "A_log" not in name and "dt_proj.bias" not in name:
                param.normal_(0, 0.3)
    prompts = [[3, 4], [5, 6, 7], [8, 9]]
    wanted = [a.tokens for a in load(mamba).generate(prompts, SamplingParams(8))]
    engine, failed = load(mamba), []
    plain = engine.decoder.forward
    engine.on_failure = lambda identity, error: failed.append(identity)

    def forward(batch, cache):
        logits = plain(batch, cache)  # the states have gone on
        if POISON in batch.tokens.tolist():
            raise IndexError("after its states were written")
        return logits

    engine.decoder.forward = forward
    said = {engine.submit(p, SamplingParams(8))[0]: [] for p in prompts}
    for _ in range(3):
        for event in engine.step():
            said[event.request].append(event.token)
    bad = engine.submit([7, POISON], SamplingParams(8))[0]
    for event in engine.stream():
        said[event.request].append(event.token)
    assert failed == [bad]
    assert list(said.values()) == wanted


def test_without_a_listener_the_step_raises_and_the_others_go_on(model):
    wanted = [a.tokens for a in load(model).generate(PROMPTS, SamplingParams(8))]
    engine = load(model)
    said = {engine.submit(p, SamplingParams(8))[0]: [] for p in PROMPTS}
    engine.submit([5], SamplingParams(8, allowed_tokens=late))
    errors = 0
    while not engine.idle:
        try:
            for event in engine.step():
                said.setdefault(event.request, []).append(event.token)
        except ZeroDivisionError:
            errors += 1
    assert errors == 1
    assert list(said.values())[: len(PROMPTS)] == wanted


def test_an_engine_goes_on_after_a_call_that_failed(model):
    engine = load(model)
    with pytest.raises(ZeroDivisionError):
        engine.generate(
            PROMPTS, [SamplingParams(8, allowed_tokens=late if i == 2 else None) for i in range(len(PROMPTS))]
        )
    assert engine.idle
    wanted = [a.tokens for a in load(model).generate(PROMPTS, SamplingParams(8))]
    assert [a.tokens for a in engine.generate(PROMPTS, SamplingParams(8))] == wanted


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_step_is_taken_back(model, error):
    wanted = [a.tokens for a in load(model).generate(PROMPTS, SamplingParams(8, n=2))]
    engine = load(model, block_size=4)
    plain = engine.decoder.forward
    said = {i: [] for p in PROMPTS for i in engine.submit(p, SamplingParams(8, n=2))}
    for number in range(200):
        if engine.idle:
            break

        def forward(batch, cache, number=number):
            if number in (1, 3, 4):
                raise error
            return plain(batch, cache)

        engine.decoder.forward = forward
        try:
            for event in engine.step():
                said[event.request].append(event.token)
        except error:
            pass
    assert list(said.values()) == wanted
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.count


def test_a_broken_engine_says_its_first_error():
    def compute(chunks, again):
        raise ValueError(f"{len(chunks)} chunks")

    def probe():
        raise RuntimeError("nothing works")

    chunks = [ScheduledChunk(i, (1,), 0, (0,), 1) for i in range(5)]
    with pytest.raises(ValueError, match="5 chunks"):
        compute_apart(chunks, compute, probe)
    results, failures = compute_apart(chunks, compute, lambda: None)
    assert not results
    assert {number: str(error) for number, error in failures.items()} == dict.fromkeys(range(5), "1 chunks")


# ---- one of several samples is cancelled


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_cancelling_one_sample_leaves_the_others(model, which, steps):
    how = SamplingParams(6, temperature=1.0, seed=3, n=3)
    wanted = [a.tokens for a in load(model).generate([PROMPTS[3]], how)]
    engine = load(model, block_size=4, budget=SchedulerConfig(16, 8))
    numbers = engine.submit(PROMPTS[3], how)
    said = {number: [] for number in numbers}
    for _ in range(steps):
        for event in engine.step():
            said[event.request].append(event.token)
    before = len(said[numbers[which]])
    assert engine.cancel(numbers[which])
    assert not engine.cancel(numbers[which])
    for event in engine.stream():
        said[event.request].append(event.token)
    assert len(said[numbers[which]]) == before
    assert [t for n, t in said.items() if n != numbers[which]] == [t for i, t in enumerate(wanted) if i != which]
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.count


# ---- the worker of a server


def test_whoever_waits_when_the_engine_ends_is_told(model):
    """Those under way, those whose order nobody has taken yet, and those who come later."""
    from ds_inference.serve.worker import Worker

    engine = load(model)
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def forward(batch, cache):
        begun.set()
        go.wait(20)
        raise IndexError("the device is lost")

    engine.decoder.forward = forward
    worker = Worker(engine, ended.set)

    async def ask():
        async for _ in worker.answer([1, 2], SamplingParams(4)):
            pass

    async def all_of():
        first = asyncio.ensure_future(ask())
        await asyncio.to_thread(begun.wait, 20)
        others = [asyncio.ensure_future(ask()) for _ in range(20)]
        await asyncio.sleep(0.05)
        go.set()
        found = await asyncio.wait_for(asyncio.gather(first, *others, return_exceptions=True), 20)
        await asyncio.to_thread(ended.wait, 20)
        return [*found, *await asyncio.gather(ask(), return_exceptions=True)]

    found = asyncio.run(all_of())
    assert all(isinstance(error, RuntimeError) and "the device is lost" in str(error) for error in found)
    assert ended.is_set()
    worker.close()


def test_a_client_whose_loop_is_closed_ends_no_engine(model):
    """A second interrupt closes the loop of a server while its requests are under way."""
    from ds_inference.serve.worker import Worker

    engine = load(model)
    worker = Worker(engine)

    async def first():
        async for _ in worker.answer([1, 2], SamplingParams(60)):
            return  # the rest comes to nobody: the generator is not closed before the loop is

    loop = asyncio.new_event_loop()
    loop.run_until_complete(first())
    loop.close()

    async def other():
        return [event.token async for event in worker.answer([1, 2], SamplingParams(8))]

    assert len(asyncio.run(other())) == 8
    worker.close()
    assert worker.failure is None


def test_orders_that_come_with_the_end_are_told(model):
    from ds_inference.serve.worker import Worker

    worker = Worker(load(model))

    async def ask():
        async for _ in worker.answer([1, 2], SamplingParams(4)):
            pass

    async def all_of():
        closing = asyncio.ensure_future(asyncio.to_thread(worker.close))
        asks = []
        for _ in range(50):
            asks.append(asyncio.ensure_future(ask()))
            await asyncio.sleep(0)
        await closing
        asks.append(asyncio.ensure_future(ask()))
        return await asyncio.wait_for(asyncio.gather(*asks, return_exceptions=True), 20)

    found = asyncio.run(all_of())
    assert "shutting down" in str(found[-1])
    assert all(error is None or "shutting down" in str(error) for error in found)


def test_one_clients_fault_reaches_no_other(model):
    """Many at once, some of whose requests raise in a step: each gets its own error, the others their tokens."""
    from ds_inference.serve.worker import Worker

    prompts = [p for p in PROMPTS if POISON not in load(model).generate([p], SamplingParams(8))[0].tokens]
    wanted = [a.tokens for a in load(model).generate(prompts, SamplingParams(8))]
    engine = load(model, budget=SchedulerConfig(64, 16))
    poisoned(engine)
    worker = Worker(engine)

    async def ask(prompt, how):
        return [event.token async for event in worker.answer(prompt, how)]

    async def all_of():
        bad = [
            ask([5, POISON], SamplingParams(8)),
            ask([5], SamplingParams(8, allowed_tokens=late)),
            ask([6], SamplingParams(9, allowed_tokens=never)),
        ]
        work = [*bad, *(ask(p, SamplingParams(8)) for p in prompts)]
        return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 60)

    found = asyncio.run(all_of())
    assert [type(error) for error in found[:3]] == [RuntimeError] * 3
    assert found[3:] == wanted
    assert worker.failure is None
    end = time.monotonic() + 150
    while not engine.idle and time.monotonic() < end:
        time.sleep(0.01)
    worker.close()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.count


def test_results_of_a_step_do_not_wait_for_the_garbage_collector() -> None:
    class Part:
        pass

    parts: list[weakref.ref[Part]] = []

    def compute(chunks: object, again: bool) -> Part:
        del chunks, again
        part = Part()
        parts.append(weakref.ref(part))
        return part

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        results, _ = compute_apart([None], compute, lambda: None)  # type: ignore[list-item]
        del results
        assert [part() for part in parts] == [None]
    finally:
        if was_enabled:
            gc.enable()
