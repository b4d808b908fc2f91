"""Which blocks see which, and attention on what is seen against a dense softmax in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from ds_config.errors import KernelError
from ds_ops.sparse_attention import (
    Pattern,
    Sparsity,
    bigbird,
    block_mask,
    block_sparse_attention,
    bslongformer,
    dense,
    fixed,
    sliding_window,
    variable,
)


def drawn(layout: Tensor) -> list[str]:
    return ["".join(".#"[int(x)] for x in row) for row in layout[0]]


def test_fixed() -> None:
    """Windows of three, the last block of each seen by all; the short last window keeps its last block."""
    assert drawn(fixed(3, 1).layout(7)) == [
        "###..##",
        "###..##",
        "###..##",
        "..#####",
        "..#####",
        "..#####",
        "..#..##",
    ]
    assert drawn(fixed(2, 1, causal=True).layout(5)) == ["#....", "##...", ".##..", ".###.", ".#.##"]


def test_heads_may_have_other_blocks_that_all_see() -> None:
    layout = fixed(4, 1, shifts=2).layout(4, heads=3)
    columns = [layout[h].all(0).tolist() for h in range(3)]
    assert columns == [[True] * 4] * 3  # one window: all see all
    layout = fixed(2, 1, shifts=2).layout(4, heads=2)
    assert drawn(layout[:1]) == ["##.#", "##.#", ".###", ".###"]
    assert drawn(layout[1:]) == ["###.", "###.", "#.##", "#.##"]


def test_variable_windows_and_rows() -> None:
    assert drawn(variable((1, 2), ((4, 5),)).layout(5)) == ["#...#", ".##.#", ".##.#", "...##", "...##"]
    assert drawn(variable((1,), ((1, 2),), rows=True).layout(3)) == ["##.", "###", ".##"]


def test_windows_that_slide() -> None:
    assert drawn(sliding_window(3).layout(4)) == ["#...", "##..", ".##.", "..##"]
    assert drawn(bslongformer(3, ((0, 1),)).layout(4)) == ["####", "###.", "####", "#.##"]
    assert bool(dense().layout(5).all())
    assert torch.equal(dense(causal=True).layout(5)[0], torch.ones(5, 5).tril().bool())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 12), st.integers(0, 3), st.booleans(), st.integers(0, 99))
def test_bigbird_has_its_parts(blocks: int, random: int, causal: bool, seed: int) -> None:
    layout = bigbird(random, 3, 1, causal=causal).layout(blocks, seed=seed)[0]
    plain = bigbird(0, 3, 1, causal=causal).layout(blocks)[0]
    assert bool((layout | ~plain).all())
    assert int((layout & ~plain).sum(-1).max() if blocks else 0) <= random
    assert torch.equal(layout, bigbird(random, 3, 1, causal=causal).layout(blocks, seed=seed)[0])
    if causal:
        assert not bool(layout.triu(1).any())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Pattern(windows=(0,)),
        lambda: fixed(2, 3),
        lambda: fixed(4, 2, shifts=3),
        lambda: Pattern(random=-1),
        lambda: variable((4,), ((2, 2),)),
    ],
)
def test_patterns_that_mean_nothing(wrong: Callable[[], Pattern]) -> None:
    with pytest.raises(KernelError) as caught:
        wrong()
    assert caught.value.code == "sparse-pattern"


def exact(q: Tensor, k: Tensor, v: Tensor, s: Sparsity, key_mask: Tensor | None) -> Tensor:
    length = q.shape[2]
    place = torch.arange(length)
    seen = s.layout[:, place[:, None] // s.block, place[None, :] // s.block]
    if s.causal:
        seen = seen & (place[None, :] <= place[:, None])
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]
    weights = torch.exp(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])) * seen
    return (weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)) @ v


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(0, 21), st.integers(1, 5), st.data())
def test_values_and_gradients(batch: int, heads: int, length: int, block: int, data: st.DataObject) -> None:
    draws = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    blocks = -(-length // block)
    own = data.draw(st.sampled_from([1, heads]))
    layout = torch.rand(own, blocks, blocks, generator=draws) < 0.4
    sparsity = Sparsity(layout, block, data.draw(st.booleans()))
    mask = torch.rand(batch, length, generator=draws) < 0.8 if data.draw(st.booleans()) else None
    inputs = [torch.randn(batch, heads, length, 4, generator=draws).to(dtype).requires_grad_() for _ in range(3)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    ours, theirs = block_sparse_attention(*inputs, sparsity, key_mask=mask), exact(*wide, sparsity, mask)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
    upstream = torch.randn(ours.shape, generator=draws).to(dtype)
    ours.backward(upstream)
    theirs.backward(upstream.double())
    for t, w in zip(inputs, wide, strict=True):
        assert t.grad is not None
        assert w.grad is not None
        torch.testing.assert_close(t.grad.double(), w.grad, rtol=4 * tolerance, atol=4 * tolerance)


def test_the_block_mask_shows_the_same() -> None:
    sparsity = Sparsity(fixed(2, 1, shifts=2).layout(4, heads=2), 8, causal=True)
    mask = block_mask(sparsity, 32)
    assert torch.equal(mask.to_dense()[0].bool(), sparsity.layout.tril())
    place = torch.arange(32)
    shown = mask.mask_mod(torch.tensor(0), torch.arange(2)[:, None, None], place[:, None], place[None, :])
    zeros = torch.zeros(1, 2, 32, 1)
    seen = exact(zeros, zeros, torch.eye(32).expand(1, 2, 32, 32), sparsity, None) > 0
    assert torch.equal(shown, seen[0])


@pytest.mark.slow  # flex_attention imports the compiler: 6 s
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_takes_the_block_mask() -> None:
    sparsity = Sparsity(fixed(2, 1, shifts=2).layout(4, heads=2), 8, causal=True)
    q, k, v = (torch.randn(1, 2, 32, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    theirs = flex_attention(q, k, v, block_mask=block_mask(sparsity, 32))
    torch.testing.assert_close(theirs, block_sparse_attention(q, k, v, sparsity))


def test_only_visible_blocks_cost() -> None:
    """Bytes kept for the backward grow with what is seen, not with the square of the length."""

    def kept(length: int) -> int:
        sizes: list[int] = []

        def note(t: Tensor) -> Tensor:
            sizes.append(t.nbytes)
            return t

        q = torch.randn(1, 1, length, 8, requires_grad=True)
        layout = sliding_window(3).layout(length // 16)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            block_sparse_attention(q, q, q, Sparsity(layout, 16, causal=True))
        return sum(sizes)

    assert kept(1024) < 2.2 * kept(512)


def test_bad_arguments_are_typed_errors() -> None:
    q = torch.randn(2, 3, 8, 4)
    good = Sparsity(torch.ones(1, 2, 2, dtype=torch.bool), 4)
    for call in (
        lambda: block_sparse_attention(q, q[:, :2], q, good),
        lambda: block_sparse_attention(q, q.double(), q, good),
        lambda: block_sparse_attention(q.long(), q.long(), q.long(), good),
        lambda: block_sparse_attention(q, q, q, Sparsity(good.layout, 3)),
        lambda: block_sparse_attention(q, q, q, Sparsity(good.layout, 0)),
        lambda: block_sparse_attention(q, q, q, Sparsity(good.layout.float(), 4)),
        lambda: block_sparse_attention(q, q, q, good, key_mask=torch.ones(2, 9, dtype=torch.bool)),
    ):
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.code == "kernel-argument"
