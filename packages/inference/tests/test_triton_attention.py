"""The Triton kernel of paged attention equals the gather for drawn shapes; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from ds_inference.paged_attention import BatchIndices, _attend_by_gather, alibi_slopes, keep, make_batch
from ds_inference.requests import ScheduledChunk
from ds_inference.spec import Alibi, AttentionSpec
from ds_ops.triton_kernels.triton_support import triton_obstacle

triton = pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MANY = 200


@dataclass
class Case:
    q: torch.Tensor
    cache: tuple[torch.Tensor, ...]
    batch: BatchIndices
    spec: AttentionSpec
    extra: tuple[torch.Tensor | None, torch.Tensor | None]


def drawn(seed: int, kind: str | None = None) -> Case:
    """A batch of drawn shapes: prompts, chunks after a beginning, decode rows and drafts, over a cache of shuffled blocks."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 4, 7])
    width = draw.choice([16, 32, 64, 80, 96, 128])
    value_width, latent = draw.choice([width, width, 48]), draw.random() < 0.15
    size = draw.choice([4, 16, 32])
    form = kind or draw.choice(["plain", "plain", "window", "softcap", "alibi", "falcon", "sinks", "everything"])
    half = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter multiplies no matrices of bf16
    dtype = draw.choice([torch.float32, torch.float32, half])
    stored = draw.choice([None, None, torch.int8, torch.float8_e4m3fn])
    if latent:
        kv_heads, group, width, value_width, stored = 1, draw.choice([4, 16, 20]), 576, 512, None
    lengths, chunks, next_block = [], [], 0
    for i in range(draw.randint(1, 4)):
        count = draw.choice([1, 1, 1, 3, draw.randint(2, 40)])
        start = draw.choice([0, draw.randint(0, 90)]) if count > 1 else draw.randint(0, 120)
        used = -(-(start + count) // size)
        lengths.append(start + count)
        chunks.append((i, count, start, used))
        next_block += used
    numbers = list(range(next_block + 3))
    draw.shuffle(numbers)
    plan = []
    for i, count, start, used in chunks:
        blocks, numbers = tuple(numbers[:used]), numbers[used:]
        plan.append(ScheduledChunk(i, (0,) * count, start, blocks, 1))
    batch, _ = make_batch(plan, size, DEVICE)
    heads = kv_heads * group
    window = draw.choice([1, 5, 33]) if form in ("window", "everything") else None
    softcap = 2.5 if form in ("softcap", "everything") else None
    sinks = form in ("sinks", "everything")
    alibi = {"alibi": Alibi(0.3), "falcon": Alibi(0.25, rounded=True)}.get(form)
    if alibi and alibi.rounded:
        dtype = torch.float32
    scale = width**-0.5 * draw.choice([1.0, 3.0])
    spec = AttentionSpec(
        heads, kv_heads, width, value_width, scale, window=window, softcap=softcap, alibi=alibi, sinks=sinks
    )

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    q = normal(len(batch.tokens), heads, width).to(dtype)
    count = next_block + 3
    keys, values = normal(count, size, kv_heads, width), normal(count, size, kv_heads, value_width)
    if latent:
        cache: tuple[torch.Tensor, ...] = (keys.to(dtype), keys.to(dtype)[..., :value_width])
    elif stored is None:
        cache = (keys.to(dtype), values.to(dtype))
    else:
        slots = torch.arange(count * size, device=DEVICE)
        codes = [torch.zeros(t.shape, device=DEVICE).to(stored) for t in (keys, values)]
        scales = [torch.zeros(t.shape[:-1], device=DEVICE) for t in (keys, values)]
        for new, place, by in zip((keys, values), codes, scales, strict=True):
            keep(new.flatten(0, 1), slots, place, by)
        cache = (*codes, *scales)
    slopes = None if alibi is None else alibi_slopes(heads, alibi.rounded).to(DEVICE)
    return Case(q, cache, batch, spec, (slopes, normal(heads).to(dtype) if sinks else None))


def compare(case: Case, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    from ds_inference.paged_attention import _attend_triton
    from ds_ops.triton_kernels import triton_attention

    monkeypatch.setattr(triton_attention, "multiprocessors", lambda _: room)
    wanted = _attend_by_gather(case.q, case.cache, case.batch, case.spec, case.extra)
    found = _attend_triton(case.q, case.cache, case.batch, case.spec, case.extra)
    exact = case.q.dtype == torch.float32
    # Of bf16 and codes, probabilities and dequantized values are rounded in another order.
    tolerance = 2e-5 if exact and len(case.cache) == 2 else 2e-3 if exact else 3e-2
    assert torch.allclose(found.float(), wanted.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("seed", range(5))
def test_drawn_shapes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(drawn(seed), monkeypatch, random.Random(seed).choice([1, 6, 40]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, MANY))
def test_two_hundred_drawn_shapes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(drawn(seed), monkeypatch, random.Random(seed).choice([1, 6, 40]))


@pytest.mark.parametrize("form", ["window", "softcap", "falcon", "sinks", "everything"])
def test_every_kind_of_score(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(drawn(1000, form), monkeypatch, 40)


def test_an_obstacle_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_OPS", raising=False)
    assert "cuda tensors only" in triton_obstacle("cpu", torch.float32)
    assert "does not take" in triton_obstacle("cuda", torch.int8)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("DS_OPS", "triton")
    assert triton_obstacle("cpu", torch.float32) == ""
