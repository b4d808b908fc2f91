"""Ring and zigzag attention, alone and inside Ulysses, equal attention of one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ds_comm import Mesh, MeshSpec, world_group
from ds_config.errors import PlanError, set_place
from ds_parallel.sequence import DistributedAttention, RingAttention, plan_ring
from ds_testing import world

DOCUMENTS = [0.3, 0.35, 0.8]  # where documents end, as shares of the sequence


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Tensor | None) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    at = torch.arange(q.shape[2])
    seen = at[:, None] >= at if causal else torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
    seen = seen.expand(q.shape[0], 1, *seen.shape)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None])[:, None]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


def inputs(length: int, heads: tuple[int, int]) -> tuple[list[Tensor], Tensor, Tensor]:
    torch.manual_seed(3)
    qkv = [
        torch.randn(2, length, n, 4, dtype=torch.float64, requires_grad=True) for n in (heads[0], heads[1], heads[1])
    ]
    ends = torch.tensor([int(share * length) for share in DOCUMENTS])
    documents = (torch.arange(length)[:, None] >= ends).sum(1).expand(2, length)
    return qkv, torch.randn(2, length, heads[0], 4, dtype=torch.float64), documents


def check(layout: str, length: int, heads: tuple[int, int], mask: str) -> None:
    ranks, rank = world_group().size, world_group().rank
    qkv, weight, documents = inputs(length, heads)
    packed = documents if mask == "packed" else None
    causal = mask != "full"
    wanted = reference(*qkv, causal, packed)
    (wanted * weight).sum().backward()
    if layout == "2d":
        mesh = Mesh.build(MeshSpec.fit(ranks, sequence=2))  # two ranks exchange heads, the ring goes over the others
        inside, across = mesh["sequence"], mesh["data"]
        plan = plan_ring(length, across.size)
        outer = [t.detach() for t in (*qkv, weight)]
        outer = [plan.part(t, across.rank, 1) for t in outer]
        sizes = [stop - start for start, stop in _spread(outer[0].shape[1], inside.size)]
        ring = RingAttention(plan, across, causal=causal)
        layer = DistributedAttention(ring, inside, scatter_idx=2, gather_idx=1)

        def part(t: Tensor) -> Tensor:
            return plan.part(t, across.rank, 1).split(sizes, 1)[inside.rank]

        mine = [part(t.detach()).clone().requires_grad_() for t in qkv]
        found = layer(*mine, 0, None, packed, lengths=sizes)
    else:
        plan = plan_ring(length, ranks, zigzag=layout == "zigzag")

        def part(t: Tensor) -> Tensor:
            return plan.part(t, rank, 1)

        mine = [part(t.detach()).clone().requires_grad_() for t in qkv]
        found = RingAttention(plan, world_group(), causal=causal)(*mine, packed)
    torch.testing.assert_close(found, part(wanted), atol=1e-9, rtol=1e-9)
    (found * part(weight)).sum().backward()
    for own, whole in zip(mine, qkv, strict=True):
        torch.testing.assert_close(own.grad, part(whole.grad), atol=1e-9, rtol=1e-9)
    set_place("")


def _spread(length: int, ranks: int) -> tuple[tuple[int, int], ...]:
    return tuple(chunk[0] for chunk in plan_ring(length, ranks, zigzag=False).chunks)


@pytest.mark.parametrize("mask", ["causal", "full", "packed"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "2d"])
@world(4)
def test_four_ranks(layout: str, mask: str) -> None:
    check(layout, 97, (6, 2) if layout != "2d" else (8, 2), mask)


@pytest.mark.parametrize("length", [1, 8, 13])
@world(2)
def test_two_ranks_short_sequences(length: int) -> None:
    for layout in ("contiguous", "zigzag"):
        for heads in ((4, 4), (5, 5), (8, 2)):
            check(layout, length, heads, "causal")


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "full", "packed"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 5)], ids=str)
@pytest.mark.parametrize("length", [8, 13, 97, 1024])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "2d"])
@world(4)
def test_grid(layout: str, length: int, heads: tuple[int, int], mask: str) -> None:
    check(layout, length, heads, mask)


@world(2)
def test_parts_of_another_length_are_refused() -> None:
    ring = RingAttention(plan_ring(8, 2), world_group())
    x = torch.zeros(1, 3, 2, 4)
    with pytest.raises(PlanError, match="by the plan 4"):
        ring(x, x, x)
    with pytest.raises(PlanError, match="a ring of 3 parts"):
        RingAttention(plan_ring(8, 3), world_group())


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 8), st.booleans())
def test_every_pair_is_seen_once(length: int, ranks: int, zigzag: bool) -> None:
    plan = plan_ring(length, ranks, zigzag=zigzag)
    seen = torch.zeros(length, length, dtype=torch.int)
    for rank in range(ranks):
        for source in range(ranks):
            for pair in plan.pairs(rank, source, causal=True):
                block = seen[slice(*pair.queries_at), slice(*pair.keys_at)]
                block += torch.ones_like(block).tril() if pair.causal else torch.ones_like(block)
    assert torch.equal(seen, torch.ones_like(seen).tril())
    whole = torch.arange(length)
    assert torch.equal(plan.whole([plan.part(whole, rank, 0) for rank in range(ranks)], 0), whole)


def test_zigzag_is_balanced() -> None:
    plain, zigzag = (plan_ring(1024, 8, zigzag=z) for z in (False, True))
    work = [plain.work(rank, causal=True) for rank in range(8)]
    assert max(work) > 10 * min(work)
    work = [zigzag.work(rank, causal=True) for rank in range(8)]
    assert max(work) < 1.01 * min(work)
