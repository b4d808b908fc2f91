"""Sorting with drops, capacity, chunks re-ordered: against lists in Python; and nothing is read from a device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_config.errors import KernelError
from ds_ops.capacity import padded_rows, within_capacity
from ds_ops.moe_routing import permute, pulls_of, regroup, sort_slots, unpermute
from ds_ops.row_ops import gather_rows, gather_sum

few = settings(max_examples=40, deadline=None)


def choices(tokens: int, experts: int, k: int) -> Tensor:
    g = torch.Generator().manual_seed(tokens * 7 + experts)
    return torch.rand(tokens, experts, generator=g).argsort(-1)[:, :k]


@pytest.mark.parametrize("forced", ["", "reference"])
@few
@given(st.integers(0, 9), st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_sorting_with_drops(forced: str, tokens: int, experts: int, k: int, dropping: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_OPS", forced)
        chosen = choices(tokens, experts, min(k, experts))
        keep = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(1)) > 0.4 if dropping else None
        p = sort_slots(chosen, experts, keep=keep)
    flat = chosen.flatten().tolist()
    alive = [True] * len(flat) if keep is None else keep.flatten().tolist()
    wanted = sorted(range(len(flat)), key=lambda s: (flat[s] if alive[s] else experts, s))
    assert p.slots.tolist() == wanted
    assert p.rows.flatten().tolist() == [wanted.index(s) for s in range(len(flat))]
    counts = [sum(a and e == x for e, a in zip(flat, alive, strict=True)) for x in range(experts)]
    assert p.counts.tolist() == counts
    assert p.ends.tolist() == [sum(counts[: e + 1]) for e in range(experts)]


@few
@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.booleans(), st.booleans())
def test_capacity(tokens: int, experts: int, k: int, capacity: int, scored: bool, first: bool) -> None:
    chosen = choices(tokens, experts, min(k, experts))
    g = torch.Generator().manual_seed(2)
    scores = torch.randint(0, 4, chosen.shape, generator=g).float() if scored else None  # with ties
    kept = within_capacity(chosen, experts, capacity, scores=scores, first_choices=first)
    slots = [(t, c) for t in range(tokens) for c in range(chosen.shape[1])]
    slots = sorted(slots, key=lambda s: (s[1], s[0]) if first else s)
    slots = sorted(slots, key=lambda s: -float(scores[s]) if scores is not None else 0.0)
    taken, wanted = [0] * experts, torch.zeros(chosen.shape, dtype=torch.bool)
    for t, c in slots:
        e = int(chosen[t, c])
        wanted[t, c] = taken[e] < capacity
        taken[e] += 1
    assert torch.equal(kept, wanted)
    p = sort_slots(chosen, experts, keep=kept)
    index, valid = padded_rows(p.ends, capacity)
    assert valid.sum(-1).tolist() == p.counts.tolist()
    assert index[valid].tolist() == list(range(int(kept.sum())))


@few
@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_rows_go_to_their_experts_and_home(ranks: int, local: int, data: st.DataObject) -> None:
    """Every row of every rank is taken once, by its expert's rank, and its result comes home to its place."""
    counts = [[data.draw(st.integers(0, 3)) for _ in range(ranks * local)] for _ in range(ranks)]
    rows = [[(r, e, i) for e in range(ranks * local) for i in range(row[e])] for r, row in enumerate(counts)]
    plans = [pulls_of(torch.tensor(counts), rank, 100) for rank in range(ranks)]
    held = [[rows[at // 100][at % 100] for at in plan.inward.tolist()] for plan in plans]
    for rank, plan in enumerate(plans):
        assert plan.source.tolist() == [100 * source for source, _, _ in held[rank]]
        experts = [expert for _, expert, _ in held[rank]]
        assert experts == sorted(experts)
        assert plan.ends.tolist() == [sum(e <= rank * local + x for e in experts) for x in range(local)]
        assert [held[at // 100][at % 100] for at in plan.home.tolist()] == rows[rank]
    assert sorted(row for part in held for row in part) == sorted(row for part in rows for row in part)


def test_a_row_that_is_not_there_is_refused() -> None:
    x = torch.zeros(3, 4)
    for bad in (-1, 3):
        with pytest.raises(KernelError, match="outside of the 3 rows"):
            gather_rows(x, torch.tensor([0, bad]))
        with pytest.raises(KernelError, match="outside of the 3 rows"):
            gather_sum(x, torch.tensor([[0, bad]]))
    with pytest.raises(KernelError, match="outside of the 3 rows"):
        gather_rows(x, torch.tensor([6]), per=2)


@pytest.mark.parametrize("forced", ["", "reference"])
def test_room_that_does_not_suffice_is_refused(forced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_OPS", forced)
    for room, counts in ((3, [[2, 2], [0, 0]]), (3, [[2, 0], [2, 0]]), (9, [[-1, 0], [0, 0]])):
        with pytest.raises(KernelError, match="room"):
            pulls_of(torch.tensor(counts), 0, room)


@few
@given(st.integers(0, 4), st.integers(0, 4), st.data())
def test_chunks_by_source_become_chunks_by_expert(sources: int, experts: int, data: st.DataObject) -> None:
    sizes = [[data.draw(st.integers(0, 3)) for _ in range(experts)] for _ in range(sources)]
    counts = torch.tensor(sizes, dtype=torch.int64).view(sources, experts)
    x = torch.arange(int(counts.sum()), dtype=torch.float32)[:, None]
    p = regroup(counts, len(x))
    chunks = x.split([n for row in sizes for n in row])
    wanted = [chunks[s * experts + e] for e in range(experts) for s in range(sources)]
    moved = permute(x, p)
    torch.testing.assert_close(moved, torch.cat(wanted) if wanted else x)
    assert p.counts.tolist() == counts.sum(0).tolist()
    torch.testing.assert_close(unpermute(moved, p), x)


def test_dropped_slots_add_nothing() -> None:
    from ds_ops.grouped import grouped_matmul

    chosen, x = choices(6, 3, 2), torch.randn(6, 4, requires_grad=True)
    keep = within_capacity(chosen, 3, 2)
    p = sort_slots(chosen, 3, keep=keep)
    w, gates = torch.randn(3, 4, 4, requires_grad=True), torch.rand(6, 2, requires_grad=True)
    y = unpermute(grouped_matmul(permute(x, p), w, p.ends), p, gates)
    exact = torch.einsum("tk,tn,tknm->tm", gates * keep, x, w[chosen])
    torch.testing.assert_close(y, exact)
    for a, b in zip(
        torch.autograd.grad(y.square().sum(), [x, w, gates]),
        torch.autograd.grad(exact.square().sum(), [x, w, gates]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_refusals() -> None:
    chosen = choices(4, 3, 2)
    for call in (
        lambda: sort_slots(chosen, 3, keep=torch.ones(4, 2)),
        lambda: sort_slots(chosen, 3, keep=torch.ones(4, 1, dtype=torch.bool)),
        lambda: sort_slots(chosen, 3, keep=torch.ones(4, 2, dtype=torch.bool, device="meta")),
        lambda: within_capacity(chosen, 3, -1),
        lambda: within_capacity(chosen[0], 3, 1),
        lambda: within_capacity(chosen, 3, 1, scores=torch.ones(4)),
        lambda: padded_rows(torch.ones(3), 1),
        lambda: regroup(torch.ones(3, 2), 3),
        lambda: regroup(torch.ones(3, dtype=torch.int64), 3),
    ):
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.code == "kernel-argument"


@few
@given(
    st.integers(0, 9),
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_weighted_sums_and_their_gradients(tokens: int, k: int, width: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(tokens + 10 * k + width)
    p = sort_slots(choices(tokens, 3, k), 3)
    y = torch.randn(tokens * k, width, generator=g).to(dtype).requires_grad_()
    weights = torch.rand(tokens, k, generator=g).requires_grad_()
    grad = torch.randn(tokens, width, generator=g).to(dtype)
    wanted = (y.double()[p.rows] * weights.double()[..., None]).sum(1)
    of_y, of_weights = torch.autograd.grad(wanted, (y, weights), grad.double())
    out = unpermute(y, p, weights)
    near = {"atol": 1e-6, "rtol": 1e-6} if dtype is not torch.bfloat16 else {"atol": 1e-2, "rtol": 2**-7}
    torch.testing.assert_close(out, wanted.to(dtype), **near)
    found = torch.autograd.grad(out, (y, weights), grad)
    torch.testing.assert_close(found[0], of_y, **near)
    torch.testing.assert_close(found[1], of_weights, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gather_sum(y.detach(), p.rows), y.detach().double()[p.rows].sum(1).to(dtype), **near)


@pytest.mark.parametrize("weighted", [True, False])
def test_the_reference_of_sums_makes_no_tensor_of_all_choices(weighted, monkeypatch):
    monkeypatch.setenv("DS_OPS", "reference")
    largest = [0]

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest[0] = max(largest[0], out.numel() * out.element_size() if isinstance(out, torch.Tensor) else 0)
            return out

    rows, index = torch.randn(40, 16, dtype=torch.bfloat16), torch.randint(0, 40, (64, 8))
    weights = torch.rand(64, 8) if weighted else None
    with Sizes():
        out = gather_sum(rows, index, weights)
    factors = torch.ones(64, 8) if weights is None else weights
    expected = (rows.double()[index] * factors.double()[..., None]).sum(1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)
    assert largest[0] <= 64 * 16 * 4  # it was 8 times that
