"""Tokens of a batch whose rows are sampled in ways of their own: kernels equal plain torch, rows do not see each other, one read a step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_accel import streams
from ds_inference import SamplingParams, load
from ds_inference.batched_sampling import (
    SamplingRow,
    SequencePlace,
    _sample_torch,
    _sample_triton,
    _tables,
    gumbel_noise,
    sample_rows,
    sampling_row,
)
from ds_ops.triton_kernels import kernel_arguments

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw_rows(draw: random.Random, count: int, vocab: int) -> list[SamplingRow]:
    def one(i: int) -> SamplingRow:
        prompt, answer = ([draw.randrange(vocab) for _ in range(draw.randint(1, 6))] for _ in range(2))
        mask = torch.tensor([draw.random() < 0.7 for _ in range(vocab)])
        mask[draw.randrange(vocab)] = True
        how = SamplingParams(
            temperature=draw.choice([0.0, 0.3, 1.0, 2.5]),
            top_k=draw.choice([0, 0, 1, 3, vocab, 10 * vocab]),
            top_p=draw.choice([1.0, 1.0, 0.1, 0.5, 0.93]),
            min_p=draw.choice([0.0, 0.0, 0.05, 0.6]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.4]),
            presence_penalty=draw.choice([0.0, 0.7]),
            frequency_penalty=draw.choice([0.0, -0.3]),
            logit_bias=draw.choice([{}, {draw.randrange(vocab): 3.0}]),
            seed=draw.choice([-(1 << 63), 5, (1 << 64) - 1, draw.getrandbits(63)]),
            allowed_tokens=draw.choice([None, None, lambda _: mask]),
        )
        return sampling_row(i, how, SequencePlace([*prompt, *answer], len(prompt), (1,)), vocab)

    return [one(i) for i in range(count)]


def tokens_of(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab, count = draw.choice([3, 97, 1024, 5000]), draw.randint(1, 5)
    logits = (3 * torch.randn(count, vocab, generator=generator)).to(DEVICE)
    tables = _tables(draw_rows(draw, count, vocab), elsewhere=False)
    tables = tables if DEVICE.type == "cpu" else tables.to(DEVICE)
    wanted, changed, work = _sample_torch(reference := logits.clone(), tables), logits.clone(), logits.clone()
    found = _sample_triton(changed, tables)
    assert torch.allclose(changed, reference, rtol=1e-6, atol=1e-6)
    del work
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_drawn_batches(seed: int) -> None:
    pytest.importorskip("triton")
    tokens_of(seed)


@pytest.mark.slow
def test_two_hundred_drawn_batches() -> None:
    pytest.importorskip("triton")
    for seed in range(5, 200):
        tokens_of(seed)


def one_by_one(logits: Tensor, how: SamplingParams, noise: Tensor) -> int:
    """The rules for one row, written with sorted lists."""
    x = ((logits - logits.max()) / how.temperature).tolist()
    kept = set(range(len(x)))
    if 0 < how.top_k < len(x):
        kept = {i for i in kept if x[i] >= sorted(x, reverse=True)[how.top_k - 1]}
    shares = torch.softmax(torch.tensor([v if i in kept else -torch.inf for i, v in enumerate(x)]), -1).tolist()
    nucleus: set[int] = set()
    for i in sorted(kept, key=lambda i: -shares[i]):
        if sum(shares[j] for j in nucleus) < how.top_p:
            nucleus.add(i)
    kept = {i for i in nucleus if shares[i] >= how.min_p * max(shares)}
    return max(kept, key=lambda i: x[i] + noise[i].item())


@pytest.mark.parametrize("seed", range(5))
def test_rows_follow_the_rules_and_do_not_see_each_other(seed: int) -> None:
    draw, vocab = random.Random(seed), 31
    hows = [
        SamplingParams(
            temperature=draw.choice([0.4, 1.0]), top_k=draw.choice([0, 2, 9]), top_p=draw.choice([1.0, 0.6, 0.9]),
            min_p=draw.choice([0.0, 0.2]), seed=draw.getrandbits(60),
        )
        for _ in range(8)
    ]  # fmt: skip
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(seed))
    rows = [sampling_row(i, how, SequencePlace([1] * (i + 1), 1), vocab) for i, how in enumerate(hows)]
    together = [t.token for t in sample_rows(logits, rows).read()]
    alone = [sample_rows(logits, [row]).read()[0].token for row in rows]
    noise = gumbel_noise(_tables(rows, elsewhere=False).params, vocab)
    assert together == alone == [one_by_one(x, how, n) for x, how, n in zip(logits, hows, noise, strict=True)]


def test_noise_is_philox() -> None:
    """The known answer of Random123 for 7 rounds, all zeros; and nothing of two places in common."""
    assert kernel_arguments.PHILOX_ROUNDS == 7
    words = [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    uniform = (torch.tensor(words).float() + 0.5) * 2.0**-32
    zero = torch.zeros(1, 8, dtype=torch.int32)
    assert torch.equal(gumbel_noise(zero, 4), -(-torch.log1p(-uniform)).log()[None])
    rows = zero.repeat(4, 1)
    rows[1, 1] = rows[2, 2] = rows[3, 3] = 1
    assert len(gumbel_noise(rows, 1000).unique()) == 4000


def test_log_probabilities_come_with_the_tokens() -> None:
    logits = torch.randn(3, 20)
    hows = [SamplingParams(logprobs=2), SamplingParams(), SamplingParams(logprobs=0, temperature=1.0, seed=3)]
    rows = [sampling_row(2 - i, how, SequencePlace([1], 1), 20) for i, how in enumerate(hows)]
    first, second, third = sample_rows(logits, rows).read()
    logs = torch.log_softmax(logits, -1)
    values, at = logs[2].topk(2)
    assert first.top == dict(zip(at.tolist(), values.tolist(), strict=True))
    assert (first.logprob, third.logprob) == (values[0].item(), logs[0, third.token].item())
    assert (second.logprob, second.top, third.top) == (None, None, {})


class _Unlocked(streams.StreamsBackend):
    """Copies to a device on a host without one, which locks no pages."""

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_tables_come_to_a_device_whole(elsewhere: bool) -> None:
    """Rows that are those of the logits are not named: the copy was cut as if they were, an error of every step that drew."""
    rows = draw_rows(random.Random(5), 4, 97)
    tables = _tables(rows, elsewhere)
    with streams.use_backend(_Unlocked()):
        moved = tables.to(torch.device("cpu"))
    assert len(moved.numbers) == (4 if elsewhere else 0)
    for name in ("params", "entries", "numbers", "masks", "masked"):
        before, after = getattr(tables, name), getattr(moved, name)
        assert (before is None) == (after is None)
        assert before is None or torch.equal(before, after), name


class WaitCounter(streams.StreamsBackend):
    """Counts what the host waits for."""

    def __init__(self) -> None:
        self.events = self.waits = 0

    def new_event(self, module: Any) -> streams.DeviceEvent:
        self.events += 1
        event, backend = super().new_event(module), self

        class Counted:
            def synchronize(self) -> None:
                backend.waits += 1
                event.synchronize()

            def __getattr__(self, name: str) -> Any:
                return getattr(event, name)

        return Counted()  # type: ignore[return-value]


def test_a_step_reads_once_whatever_its_rows_ask_for(tiny: Any) -> None:
    """Sampling went row by row, with a read for each."""
    engine = load(tiny("llama"), native=False)
    for how in (
        SamplingParams(9),
        SamplingParams(9, temperature=1.0, top_p=0.9, seed=1, n=3),
        SamplingParams(9, temperature=0.7, top_k=4, repetition_penalty=1.2, logprobs=2, seed=4),
        SamplingParams(9, presence_penalty=0.5, logit_bias={3: 1.0}),
    ):
        engine.submit([5, 9, 2], how)
    with streams.use_backend(reads := WaitCounter()):
        steps = 0
        while not engine.idle:
            assert len(engine.step()) == 6
            steps += 1
    assert (reads.waits, steps) == (9, 9)
