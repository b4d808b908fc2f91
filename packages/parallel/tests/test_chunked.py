"""Chunked attention is attention: forward and gradients, and what lies on the device meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ds_config.errors import PlanError
from ds_parallel.sequence import Chunking, HostChunks, chunked_attention

BATCH, TOKENS, HEADS, GROUPS, SIZE = 2, 12, 4, 2, 8


def setting(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, BATCH, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn((HEADS + 2 * GROUPS) * SIZE, 16, dtype=dtype, requires_grad=True)
    return x, weight


def heads(weight: Tensor, part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    both = F.linear(part, weight).transpose(0, 1).unflatten(-1, (-1, SIZE))
    q, k, v = both.split([HEADS, GROUPS, GROUPS], 2)
    return q, k, v


def plain(x: Tensor, weight: Tensor, causal: bool, scale: float | None) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in heads(weight, x))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunks", [1, 2, 6])
def test_forward_and_gradients_are_those_of_attention(chunks: int, causal: bool, on_host: bool) -> None:
    x, weight = setting()
    how = Chunking(chunks, causal, 0.3, on_host)
    expected = plain(x, weight, causal, 0.3)
    out = chunked_attention(x, lambda part, index: heads(weight, part), [weight], how)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.manual_seed(1)
    dout = torch.randn_like(expected)
    want = torch.autograd.grad(expected, (x, weight), dout)
    found = torch.autograd.grad(out, (x, weight), dout)
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_in_bf16_it_is_as_exact_as_attention() -> None:
    x, weight = setting()
    exact = plain(x, weight, True, None)
    narrow, cut = x.detach().bfloat16(), weight.detach().bfloat16()
    out = chunked_attention(narrow, lambda part, index: heads(cut, part), [cut], Chunking(4))
    error = (out.double() - exact).abs().max()
    assert error < 2 * (plain(narrow, cut, True, None).double() - exact).abs().max() + 1e-3


def test_places_are_told_to_the_projection() -> None:
    x, weight = setting()
    seen: list[tuple[int, int]] = []

    def project(part: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
        seen.append((index, len(part)))
        return heads(weight, part)

    chunked_attention(x, project, [weight], Chunking(3)).sum().backward()
    assert seen == [(0, 4), (1, 4), (2, 4)] * 2


def test_the_next_chunk_comes_while_one_is_used_and_no_more() -> None:
    said: list[str] = []

    class Told(HostChunks):
        def _fetch(self, index: int) -> tuple[tuple[Tensor, ...], object]:
            said.append(f"fetch {index}")
            return super()._fetch(index)

    kept = Told(True)
    for index in range(3):
        kept.put(index, torch.full((1,), float(index)))
    for index, (tensor,) in kept.walk(range(3)):
        assert tensor.item() == index
        said.append(f"use {index}")
    assert said == ["fetch 0", "fetch 1", "use 0", "fetch 2", "use 1", "use 2"]
    assert list(kept.walk([])) == []


def test_chunks_must_divide_the_tokens() -> None:
    x, weight = setting()
    with pytest.raises(PlanError, match="12 tokens in 5 chunks"):
        chunked_attention(x, lambda part, index: heads(weight, part), [weight], Chunking(5))
