"""Partial attention: against softmax in fp64, merged over parts, gradients of parts from merged results."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_config.errors import KernelError
from ds_ops.partial_attention import View, _no_flash, merge_partial, partial_attention, partial_attention_grad
from ds_ops.sparse_attention import Sparsity

few = settings(max_examples=30, deadline=None)
TOLERANCE = {torch.float32: 4e-6, torch.float64: 1e-9, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def visible(view: View, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """Floats [B, H, Lq, Lk] to add to scores."""
    add = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    mask = view.mask
    if isinstance(mask, Sparsity):
        for h in range(heads):
            for i in range(queries):
                for j in range(keys):
                    if not mask.layout[h % len(mask.layout), i // mask.block, j // mask.block]:
                        add[:, h, i, j] = -torch.inf
    elif mask is not None:
        add = add.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else add + mask.double()
    if view.causal:
        add = add.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1), -torch.inf)
    return add


def exact(q: Tensor, k: Tensor, v: Tensor, view: View) -> tuple[Tensor, Tensor]:
    per = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(per, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if view.scale is None else view.scale)
    scores = scores + visible(view, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    blind = (scores == -torch.inf).all(-1)
    p = torch.softmax(scores.masked_fill(blind[..., None], 0), -1).masked_fill(blind[..., None], 0)
    return p @ v, scores.masked_fill(blind[..., None], 0).logsumexp(-1).masked_fill(blind, -torch.inf)


@st.composite
def views(draw: st.DrawFn, heads: int, queries: int, keys: int) -> View:
    kind = draw(st.sampled_from(["none", "bool", "float", "blocks"]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    mask: Tensor | Sparsity | None = None
    if kind == "bool":
        mask = torch.rand(1, 1, queries, keys, generator=g) > 0.4
    elif kind == "float":
        mask = torch.randn(heads, queries, keys, generator=g)
    elif kind == "blocks":
        size = draw(st.integers(1, 4))
        mask = Sparsity(torch.rand(1, -(-queries // size), -(-keys // size), generator=g) > 0.4, size)
    return View(draw(st.booleans()), mask, draw(st.sampled_from([None, 0.3])))


@pytest.mark.parametrize("forced", ["", "reference"])
@few
@given(st.integers(0, 2), st.integers(1, 2), st.integers(1, 3), st.integers(0, 7), st.integers(0, 7), st.data())
def test_values_and_gradients(
    forced: str, batch: int, groups: int, per: int, queries: int, keys: int, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    view = data.draw(views(groups * per, queries, keys))
    shapes = [(batch, groups * per, queries, 8), *[(batch, groups, keys, 8)] * 2]
    ours = [made(*s, dtype=dtype, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    wide = [t.detach().double().requires_grad_() for t in ours]
    theirs = exact(*wide, view) if keys else (wide[0] * 0, wide[0].sum(-1) * 0 - torch.inf)
    ups = [made(*t.shape, seed=7 + i) for i, t in enumerate(theirs)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_OPS", forced)
        found = partial_attention(*ours, view)
        both = data.draw(st.booleans())  # a gradient that reaches lse too
        seen = theirs[1].detach() > -torch.inf
        losses = [
            (o.double() * u).sum() + ((ls.double() * w)[seen].sum() if both else 0)
            for (o, ls), (u, w) in ((found, ups), (theirs, ups))
        ]
        grads = torch.autograd.grad(losses[0], ours)
    tolerance = TOLERANCE[dtype]
    assert found[1].dtype is torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found[0].double(), theirs[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1].double(), theirs[1], rtol=tolerance, atol=tolerance)
    wanted = torch.autograd.grad(losses[1], wide, allow_unused=True, materialize_grads=True)
    for f, w in zip(grads, wanted, strict=True):
        scale = max(1.0, float(w.abs().max()) if w.numel() else 0.0)
        torch.testing.assert_close(f.double(), w, rtol=0, atol=8 * tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_a_ring_over_parts_is_the_whole(causal: bool, dtype: torch.dtype) -> None:
    """What ring attention does on one rank: merge over parts, then the gradient of each part from merged results."""
    part, steps, rank = 6, 3, 1
    q = made(2, 4, part, 8, dtype=dtype)
    k, v = (made(2, 2, part * steps, 8, dtype=dtype, seed=i) for i in (1, 2))
    whole = torch.arange(part)[:, None] + rank * part >= torch.arange(part * steps)
    view = View(mask=whole) if causal else View()
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    out_exact, lse_exact = exact(*wide, view)
    keys = [(k[:, :, s * part : (s + 1) * part], v[:, :, s * part : (s + 1) * part]) for s in range(steps)]
    seen = [s for s in range(steps) if not causal or s <= rank]
    out, lse = torch.zeros(2, 4, part, 8), torch.full((2, 4, part), -torch.inf)
    for s in seen:
        out, lse = merge_partial(out, lse, *partial_attention(q, *keys[s], View(causal=causal and s == rank)))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), out_exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), lse_exact, rtol=tolerance, atol=tolerance)
    dout = made(*out.shape, dtype=dtype, seed=5)
    dq, dk, dv = torch.zeros_like(q, dtype=torch.float32), torch.zeros_like(k), torch.zeros_like(v)
    for s in seen:
        step = View(causal=causal and s == rank)
        a, b, c = partial_attention_grad(dout, (q, *keys[s]), out.to(dtype), lse, step)
        dq += a
        dk[:, :, s * part : (s + 1) * part], dv[:, :, s * part : (s + 1) * part] = b, c
    for f, w in zip((dq, dk, dv), torch.autograd.grad(out_exact, wide, dout.double()), strict=True):
        torch.testing.assert_close(f.double(), w, rtol=0, atol=16 * tolerance)


def test_strides_do_not_matter() -> None:
    """Torch's kernel for CPUs takes features that do not lie side by side for ones that do."""
    q, k, v, up = (made(2, 3, 8, 8, seed=i).transpose(-1, -2).requires_grad_() for i in range(4))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    found, wanted = partial_attention(q, k, v)[0], exact(*wide, View())[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    for f, w in zip(
        torch.autograd.grad(found, [q, k, v], up), torch.autograd.grad(wanted, wide, up.double()), strict=True
    ):
        torch.testing.assert_close(f.double(), w, rtol=1e-5, atol=1e-5)


def test_merging_is_differentiable_and_ignores_what_saw_nothing() -> None:
    q, k, v = made(1, 2, 4, 8), made(1, 2, 6, 8, seed=1), made(1, 2, 6, 8, seed=2)
    inputs = [t.double().requires_grad_() for t in (q, k, v)]

    def halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        one, two = (partial_attention(q, k[:, :, s], v[:, :, s]) for s in (slice(0, 2), slice(2, 6)))
        return merge_partial(*one, *two)[0]

    up = made(1, 2, 4, 8, seed=3).double()
    for f, w in zip(
        torch.autograd.grad(halves(*inputs), inputs, up),
        torch.autograd.grad(exact(*inputs, View())[0], inputs, up),
        strict=True,
    ):
        torch.testing.assert_close(f, w)
    out, lse = partial_attention(q, k, v)
    nothing = (torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    for merged in (merge_partial(out, lse, *nothing), merge_partial(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        torch.testing.assert_close(merged[1], lse)
    assert torch.equal(merge_partial(*nothing, *nothing)[1], nothing[1])
    assert torch.equal(merge_partial(*nothing, *nothing)[0], nothing[0])


def test_no_table_of_scores_on_the_cpu() -> None:
    """What is kept for the backward is inputs and results only."""
    sizes: list[int] = []

    def note(t: Tensor) -> Tensor:
        sizes.append(t.numel())
        return t

    q = made(1, 1, 300, 8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        partial_attention(q, q, q, View(causal=True))
    assert max(sizes) == q.numel()


def test_one_node_of_a_compiled_model() -> None:
    torch.compiler.reset()
    q, k = made(1, 4, 5, 8).requires_grad_(), made(1, 2, 5, 8).requires_grad_()

    def model(q: Tensor, k: Tensor) -> Tensor:
        out, lse = partial_attention(q * 2, k, k, View(causal=True))
        return out.square().sum() + lse.sum()

    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    for f, w in zip(torch.autograd.grad(step(q, k), [q, k]), torch.autograd.grad(model(q, k), [q, k]), strict=True):
        torch.testing.assert_close(f, w)


def test_the_custom_ops_are_well_formed() -> None:
    q, k = made(1, 4, 5, 8).requires_grad_(), made(1, 2, 5, 8).requires_grad_()
    torch.library.opcheck(torch.ops.ds_ops.partial_attention, (q, k, k.detach().clone(), None, True, 0.3))


def test_refusals() -> None:
    q, k = made(1, 4, 5, 8), made(1, 2, 6, 8)
    out, lse = partial_attention(q, k, k)
    for call in (
        lambda: partial_attention(q, k, k[:, :1]),
        lambda: partial_attention(q, made(1, 3, 6, 8), made(1, 3, 6, 8)),
        lambda: partial_attention(q, k.double(), k),
        lambda: partial_attention(q, k, k, View(mask=torch.ones(5, 5))),
        lambda: partial_attention(q, k, k, View(mask=torch.ones(5, 6, dtype=torch.int64))),
        lambda: partial_attention(q, k, k, View(mask=torch.ones(5, 6, requires_grad=True))),
        lambda: (
            partial_attention(q, k, k, View(mask=Sparsity(torch.ones(1, 2, 2, dtype=torch.bool), 4)))
            and partial_attention(q, k, k, View(mask=Sparsity(torch.ones(1, 1, 2, dtype=torch.bool), 4)))
        ),
        lambda: partial_attention_grad(out, (q, k, k), out, lse[:, :2]),
        lambda: partial_attention_grad(out.double(), (q, k, k), out, lse),
        lambda: merge_partial(out, lse, out, lse[..., None]),
    ):
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.code == "kernel-argument"


def test_an_older_card_has_no_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flash kernels raise there ("only supports Ampere GPUs or newer"); the reference runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, runs in (((7, 5), False), ((8, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        assert (_no_flash("cuda", torch.float16) == "") is runs
    assert _no_flash("cpu", torch.float32) == ""
