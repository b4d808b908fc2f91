"""Activations, rotary embedding, softmax, evoformer attention, expert routing, token dropping: values, gradients, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_config.errors import KernelError
from ds_ops import attention, token_drop
from ds_ops.activation_functions import bias_gelu, geglu, swiglu
from ds_ops.all_ops import every_op
from ds_ops.attention import evoformer_attention, masked_softmax
from ds_ops.grouped import grouped_matmul
from ds_ops.moe_routing import permute, sort_slots, top_k_gating, unpermute
from ds_ops.rotary import rotary_tables, rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
few = settings(max_examples=25, deadline=None)


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=g).to(dtype).requires_grad_()


def agree(ours: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Values and gradients against fp64."""
    wide = [t.detach().double().requires_grad_() for t in inputs]
    a, b = ours(*inputs), exact(*wide)
    tolerance = TOLERANCE[a.dtype]
    assert a.dtype is inputs[0].dtype
    torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    upstream = torch.randn(a.shape, generator=torch.Generator().manual_seed(3)).to(a.dtype)
    a.backward(upstream)
    b.backward(upstream.double())
    for t, w in zip(inputs, wide, strict=True):
        assert t.grad is not None
        assert w.grad is not None
        scale = max(1.0, float(w.grad.abs().max()) if w.grad.numel() else 0.0)
        torch.testing.assert_close(t.grad.double(), w.grad, rtol=0.0, atol=8 * tolerance * scale)


@few
@given(st.integers(0, 5), st.integers(1, 40), st.sampled_from(DTYPES))
def test_activations(rows: int, n: int, dtype: torch.dtype) -> None:
    agree(swiglu, lambda g, u: functional.silu(g) * u, [make(rows, n, dtype=dtype), make(rows, n, dtype=dtype, seed=1)])
    agree(geglu, lambda g, u: functional.gelu(g) * u, [make(rows, n, dtype=dtype), make(rows, n, dtype=dtype, seed=1)])

    def tanh_gelu(x: Tensor, b: Tensor) -> Tensor:
        h = x + b
        return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))

    agree(bias_gelu, tanh_gelu, [make(rows, n, dtype=dtype), make(n, dtype=dtype, seed=2)])


@pytest.mark.parametrize("word", ["none", "tanh"])
def test_gelu_by_name_is_that_of_torch(word: str) -> None:
    def with_bias(a: Tensor, b: Tensor) -> Tensor:
        return functional.gelu(a + b, approximate=word)

    agree(lambda a, b: bias_gelu(a, b, approximate=word), with_bias, [make(5, 7), make(7, seed=1)])
    x = make(5, 7)
    assert not torch.equal(functional.gelu(x), functional.gelu(x, approximate="tanh"))
    up = make(5, 7, seed=2)
    agree(lambda g, u: geglu(g, u, approximate=word), lambda g, u: functional.gelu(g, approximate=word) * u, [x, up])


def test_gates_keep_their_inputs_only() -> None:
    kept: list[int] = []

    def note(t: Tensor) -> Tensor:
        kept.append(t.data_ptr())
        return t

    gate, up = make(8, 16), make(8, 16, seed=1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        swiglu(gate, up)
    assert set(kept) == {gate.data_ptr(), up.data_ptr()}


@few
@given(
    st.integers(0, 4), st.integers(1, 3), st.integers(1, 6), st.integers(0, 3), st.sampled_from(DTYPES), st.booleans()
)
def test_rotation_is_a_complex_product(
    tokens: int, heads: int, pairs: int, rest: int, dtype: torch.dtype, interleaved: bool
) -> None:
    cos, sin = rotary_tables(torch.arange(tokens) * 7, 2 * pairs)

    def exact(x: Tensor) -> Tensor:
        head = x[..., : 2 * pairs]
        a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :pairs], head[..., pairs:])
        turned = torch.complex(a, b) * torch.complex(cos.double(), sin.double())[:, None, :]
        parts = (turned.real, turned.imag)
        mixed = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        return torch.cat((mixed, x[..., 2 * pairs :]), -1)

    x = make(2, tokens, heads, 2 * pairs + rest, dtype=dtype)
    agree(lambda t: rotate(t, cos, sin, interleaved=interleaved), exact, [x])


def test_rotation_keeps_distances() -> None:
    """The product of a turned query and key depends on the difference of positions only."""
    q, k = make(1, 1, 16), make(1, 1, 16, seed=1)

    def score(i: int, j: int) -> float:
        turned = [rotate(t, *rotary_tables(torch.tensor([p]), 16)) for t, p in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum().item()

    assert score(5, 3) == pytest.approx(score(105, 103), abs=1e-4)
    assert score(5, 3) != pytest.approx(score(5, 4), abs=1e-4)


@few
@given(st.integers(0, 3), st.integers(1, 5), st.integers(0, 7), st.sampled_from(DTYPES), st.booleans(), st.booleans())
def test_masked_softmax(batch: int, queries: int, keys: int, dtype: torch.dtype, causal: bool, additive: bool) -> None:
    g = torch.Generator().manual_seed(batch + 10 * keys)
    seen = torch.rand(batch, 1, keys, generator=g) > 0.3
    mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf) if additive else seen
    allowed = seen.expand(batch, queries, keys)
    if causal:
        allowed = allowed & (torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries)

    def exact(s: Tensor) -> Tensor:
        e = torch.exp(s * 0.5) * allowed
        return e / e.sum(-1, keepdim=True).clamp(min=1e-300)

    agree(lambda s: masked_softmax(s, mask, scale=0.5, causal=causal), exact, [make(batch, queries, keys, dtype=dtype)])


@pytest.mark.parametrize("biases", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("forced", ["", "reference"])
def test_evoformer_attention(biases: tuple[bool, bool], forced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_OPS", forced)
    b, n, length, h, d = 2, 3, 9, 2, 8
    inputs = [make(b, n, length, h, d, seed=i) for i in range(3)]
    inputs += [make(b, n, 1, 1, length)] if biases[0] else []
    inputs += [make(b, 1, h, length, length)] if biases[1] else []

    def named(function: Callable[..., Tensor], *t: Tensor) -> Tensor:
        rest = list(t[3:])
        mask = rest.pop(0) if biases[0] else None
        return function(*t[:3], mask, rest.pop(0) if rest else None)

    def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pair: Tensor | None) -> Tensor:
        scores = torch.einsum("bnqhd,bnkhd->bnhqk", q, k) / math.sqrt(d)
        scores = scores + (mask if mask is not None else 0) + (pair if pair is not None else 0)
        return torch.einsum("bnhqk,bnkhd->bnqhd", torch.softmax(scores, -1), v)

    agree(lambda *t: named(evoformer_attention, *t), lambda *t: named(exact, *t), inputs)


@few
@given(st.integers(0, 12), st.integers(1, 9), st.data())
def test_gating_takes_the_largest_and_the_lowest_of_equals(tokens: int, experts: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, experts))
    g = torch.Generator().manual_seed(tokens)
    logits = torch.randint(0, 3, (tokens, experts), generator=g).float().requires_grad_()  # many ties
    gating = top_k_gating(logits, k, renormalize=True)
    for t in range(tokens):
        expected = sorted(range(experts), key=lambda e: (-logits[t, e].item(), e))[:k]
        assert gating.experts[t].tolist() == expected
    torch.testing.assert_close(gating.weights.sum(-1), torch.ones(tokens))
    assert gating.counts.tolist() == [int((gating.experts == e).sum()) for e in range(experts)]
    gating.weights.sum().backward()
    assert logits.grad is not None


@few
@given(st.integers(0, 12), st.integers(1, 5), st.integers(1, 3), st.sampled_from(DTYPES))
def test_experts_on_sorted_rows_equal_experts_on_tokens(tokens: int, experts: int, k: int, dtype: torch.dtype) -> None:
    k = min(k, experts)
    g = torch.Generator().manual_seed(tokens * experts)
    chosen = (
        torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(tokens)])
        if tokens
        else torch.zeros(0, k).long()
    )
    p = sort_slots(chosen, experts)
    assert p.ends.tolist()[-1] == tokens * k

    def ours(x: Tensor, w: Tensor, weights: Tensor) -> Tensor:
        return unpermute(grouped_matmul(permute(x, p), w, p.ends), p, weights)

    def exact(x: Tensor, w: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("tk,tn,tknm->tm", weights, x, w[chosen])

    inputs = [make(tokens, 6, dtype=dtype), make(experts, 6, 4, dtype=dtype), make(tokens, k, dtype=dtype)]
    agree(ours, exact, inputs)


def test_rows_of_an_expert_keep_the_order_of_tokens() -> None:
    p = sort_slots(torch.tensor([[1, 0], [1, 2], [0, 1]]), 4)
    assert p.slots.tolist() == [1, 4, 0, 2, 5, 3]
    assert p.ends.tolist() == [2, 5, 6, 6]
    assert p.rows.flatten()[p.slots].tolist() == list(range(6))


@few
@given(st.integers(1, 3), st.integers(1, 9), st.data())
def test_token_dropping(batch: int, length: int, data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, length))
    index = token_drop.sample_tokens(2, batch, length, keep, generator=torch.Generator().manual_seed(1))
    assert index.shape == (2, batch, keep)
    assert bool((index.diff(dim=-1) > 0).all())
    x, one = make(batch, length, 3), index[0]
    part = token_drop.gather_tokens(x, one)
    whole = token_drop.scatter_tokens(x, part * 2, one)
    doubled = torch.zeros(batch, length).scatter(1, one, 1.0).bool()
    torch.testing.assert_close(whole, torch.where(doubled[..., None], 2 * x, x))
    whole.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.where(doubled[..., None], 2.0, 1.0).expand_as(x))


def test_bad_arguments_are_typed_errors() -> None:
    x = make(3, 4)
    cos, sin = rotary_tables(torch.arange(3), 4)
    for call in (
        lambda: bias_gelu(x, make(3)),
        lambda: bias_gelu(x, make(4), approximate="erf"),
        lambda: geglu(x, x, approximate="exact"),
        lambda: swiglu(x, make(3, 5)),
        lambda: rotary_tables(torch.arange(3), 3),
        lambda: rotate(make(2, 1, 8), cos, sin),
        lambda: masked_softmax(make(3)),
        lambda: evoformer_attention(x, x, x),
        lambda: attention.evoformer_attention(*[make(1, 2, 3, 1, 4)] * 3, mask_bias=make(1, 2, 3)),
        lambda: top_k_gating(x, 5),
        lambda: sort_slots(torch.tensor([[0, 3]]), 3),
        lambda: sort_slots(torch.tensor([[0.0]]), 3),
        lambda: token_drop.gather_tokens(make(1, 3, 4), torch.tensor([[0, 3]])),
        lambda: grouped_matmul(x, make(2, 5, 4), torch.tensor([1, 3])),
        lambda: grouped_matmul(x, make(2, 4, 4), torch.tensor([2, 4])),
        lambda: grouped_matmul(x, make(2, 4, 4), torch.tensor([4, 3])),
        lambda: token_drop.sample_tokens(1, 1, 3, 4),
        lambda: token_drop.gather_tokens(x, torch.zeros(3, 1)),
        lambda: token_drop.scatter_tokens(make(1, 3, 4), make(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64)),
    ):
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.code == "kernel-argument"


def test_every_model_op_says_why_it_has_no_kernel() -> None:
    ops = {op.name: op for op in every_op().ops}
    for name in ("bias_gelu", "gated_activation", "rotate", "masked_softmax", "unpermute", "grouped_matmul"):
        first = ops[name].backends[0]
        assert first.obstacle("cpu", torch.float32).startswith("not written: ")
        with pytest.raises(KernelError, match="does not exist"):
            first.run()


def compiled_ops() -> dict[str, Callable[[Tensor], Tensor]]:
    """Ops that must be one graph with what stands around them; `x` is [4, 8]."""
    other, row, weights = make(4, 8, seed=1).detach(), make(8).detach(), torch.full((4, 2), 0.5)
    p = sort_slots(torch.tensor([[0, 1], [1, 2], [0, 2], [1, 0]]), 3)
    cos, sin = rotary_tables(torch.arange(4), 8)
    index = torch.tensor([[0, 2]])
    return {
        "bias_gelu": lambda x: bias_gelu(x, row),
        "swiglu": lambda x: swiglu(x, other),
        "masked_softmax": lambda x: masked_softmax(x, causal=True),
        "top_k_gating": lambda x: top_k_gating(x, 2).weights,
        "sort_slots": lambda x: permute(x, sort_slots(top_k_gating(x, 2).experts, 8)),
        "permute": lambda x: permute(x, p),
        "unpermute": lambda x: unpermute(torch.cat((x, x)), p, weights),
        "rotate": lambda x: rotate(x[:, None], cos, sin),
        "gather_tokens": lambda x: token_drop.gather_tokens(x[None], index),
        "scatter_tokens": lambda x: token_drop.scatter_tokens(x[None], x[None, :2] * 2, index),
        "evoformer_attention": lambda x: evoformer_attention(*[x.view(1, 1, 4, 2, 4)] * 3),
    }


@pytest.mark.parametrize(
    "name", ["top_k_gating", *(pytest.param(n, marks=pytest.mark.slow) for n in compiled_ops() if n != "top_k_gating")]
)
def test_compiles_without_a_break(name: str) -> None:
    torch.compiler.reset()  # it compiles one piece of code a few times only
    op = compiled_ops()[name]
    x = make(4, 8)
    ours = torch.compile(lambda t: op(t * 2) + 1, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(ours, op(x * 2) + 1)
