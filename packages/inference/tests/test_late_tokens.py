"""On a device whose work comes late: the indices of a step go there, its tokens come back, and the next step takes them where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_inference import SamplingParams, load
from ds_inference.batched_sampling import SampledRows
from ds_inference.paged_attention import index_chunks, to_batch
from ds_inference.requests import ScheduledChunk
from ds_testing.late_device import LateEvent, drawn_orders, late_device

PROMPTS = [[1, 2, 3], [7]]
HOWS = {
    "greedy": SamplingParams(3),
    "drawn": SamplingParams(3, temperature=1.0, top_k=20, top_p=0.9, seed=3),
    "with log-probabilities": SamplingParams(3, temperature=0.7, seed=5, logprobs=2),
}


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native kernels would run at once on memory of the device."""
    monkeypatch.setenv("DS_OPS", "reference")


def answers(model: Any, how: SamplingParams) -> list[tuple[list[int], list[float]]]:
    engine = load(model, native=False, lookahead=True, cache_tokens=256)
    return [(answer.tokens, answer.logprobs) for answer in engine.generate(PROMPTS, how)]


@pytest.mark.parametrize("name", list(HOWS))
@drawn_orders
def test_tokens_of_steps_that_are_launched_ahead(order: int, name: str, tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    expected = answers(model, HOWS[name])
    with late_device(order) as device:
        found = answers(model, HOWS[name])
    assert device.copies > 0
    assert found == expected


@drawn_orders
def test_indices_of_a_step(order: int) -> None:
    chunks = [ScheduledChunk(i, tuple(range(i + 1)), 2 * i, (3 * i, 3 * i + 1, 3 * i + 2), 1) for i in range(4)]
    expected = [to_batch(index_chunks(chunks, 4)[0], torch.device("cpu")) for _ in range(3)]
    with late_device(order) as device:  # where copies go is the late device's own affair
        found = [to_batch(index_chunks(chunks, 4)[0], torch.device("cuda")) for _ in range(3)]
    assert device.copies == 3
    for one, other in zip(found, expected, strict=True):
        for name in ("tokens", "positions", "slots", "outputs", "cu_seqlens_q", "seqlens_k", "block_table"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_read_without_their_event_tokens_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateEvent, "synchronize", lambda event: None)
    wrong = 0
    for order in range(5):
        with late_device(order):
            tokens = torch.arange(6) * 2 + 1
            rows: Any = [None] * 6
            wrong += [row.token for row in SampledRows(tokens, rows, None).read()] != [1, 3, 5, 7, 9, 11]
    assert wrong > 0
