"""Grouped products: values and gradients of two orders, every layout; one node for a compiler; nothing read from a device."""

from __future__ import annotations

import itertools
import os
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_config.errors import KernelError
from ds_ops import grouped, registry
from ds_ops.grouped import grouped_matmul, grouped_outer

few = settings(max_examples=40, deadline=None)
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def ends_of(sizes: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(sizes, dtype=dtype).cumsum(0).to(dtype)


def made(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def dense(x: Tensor, weights: Tensor, sizes: list[int], bias: Tensor | None, transpose: bool) -> Tensor:
    """The definition: a matrix a row."""
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64))
    w = weights.transpose(1, 2) if transpose else weights
    y = torch.einsum("tk,tkn->tn", x[: len(group)], w[group])
    y = y if bias is None else y + bias[group]
    return torch.cat((y, y.new_zeros(len(x) - len(group), y.shape[1])))


sizes_drawn = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@few
@given(sizes_drawn, st.integers(0, 2), st.sampled_from(list(TOLERANCE)), st.booleans(), st.booleans())
def test_values_and_gradients(sizes: list[int], rest: int, dtype: torch.dtype, transpose: bool, biased: bool) -> None:
    e, k, n = len(sizes), 6, 4
    shapes = [(sum(sizes) + rest, k), (e, n, k) if transpose else (e, k, n), *([(e, n)] if biased else [])]
    ours = [made(*s, dtype=dtype, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    exact = [t.detach().double().requires_grad_() for t in ours]
    bias = (ours[2], exact[2]) if biased else (None, None)
    a = grouped_matmul(ours[0], ours[1], ends_of(sizes), transpose=transpose, bias=bias[0])
    b = dense(exact[0], exact[1], sizes, bias[1], transpose)
    up = made(*b.shape, seed=9).to(dtype)
    found = [a, *torch.autograd.grad(a, ours, up)]
    wanted = [b, *torch.autograd.grad(b, exact, up.double())]
    for f, w in zip(found, wanted, strict=True):
        scale = max(1.0, float(w.detach().abs().max()) if w.numel() else 0.0)
        torch.testing.assert_close(f.double(), w, rtol=0, atol=4 * TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("transpose", [False, True])
def test_gradients_of_gradients(transpose: bool) -> None:
    sizes = [2, 0, 3]
    weights = made(3, 3, 4) if transpose else made(3, 4, 3)
    inputs = [t.requires_grad_() for t in (made(6, 4), weights, made(3, 3))]

    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return grouped_matmul(x, w, ends_of(sizes), transpose=transpose, bias=b)

    torch.autograd.gradcheck(call, inputs)
    torch.autograd.gradgradcheck(call, inputs)


@few
@given(sizes_drawn, st.booleans(), st.booleans())
def test_out_and_accumulate(sizes: list[int], transpose: bool, accumulate: bool) -> None:
    e, rows = len(sizes), sum(sizes) + 1
    x, bias, ends = made(rows, 6), made(e, 4), ends_of(sizes, torch.int64)
    w = made(e, 4, 6) if transpose else made(e, 6, 4)
    out, before = made(rows, 4, seed=5), made(rows, 4, seed=5)
    y = grouped_matmul(x, w, ends, transpose=transpose, bias=bias, out=out, accumulate=accumulate)
    assert y is out
    torch.testing.assert_close(out, dense(x, w, sizes, bias, transpose) + (before if accumulate else 0))
    kept = torch.ones(e, 6, 4, dtype=torch.float32)
    grouped_outer(x.float(), y.float(), ends, out=kept, accumulate=accumulate)
    parts = zip(x.split([*sizes, 1]), y.split([*sizes, 1]), strict=True)
    expected = torch.stack([a.t() @ b for a, b in parts][:-1]).float() + (1 if accumulate else 0)
    torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-5)


def test_a_gradient_in_fp32_of_rows_in_16_bit() -> None:
    x, y, ends = made(40, 8, dtype=torch.bfloat16), made(40, 8, dtype=torch.bfloat16), ends_of([13, 27])
    out = torch.zeros(2, 8, 8)
    for _ in range(2):
        grouped_outer(x, y, ends, out=out, accumulate=True)
    exact = torch.stack(
        [a.t() @ b for a, b in zip(x.double().split([13, 27]), y.double().split([13, 27]), strict=True)]
    )
    torch.testing.assert_close(out.double(), 2 * exact, rtol=1e-6, atol=1e-5)


def test_strides_of_weights_do_not_matter() -> None:
    x, w, ends = made(9, 6), made(3, 4, 6).transpose(1, 2), ends_of([4, 0, 5])
    torch.testing.assert_close(grouped_matmul(x, w, ends), grouped_matmul(x, w.contiguous(), ends))


@pytest.mark.parametrize("transpose", [False, True])
def test_one_node_of_a_compiled_model(transpose: bool) -> None:
    """No break in the graph, the same gradients, and shapes that change between calls."""
    torch.compiler.reset()
    w, b = made(3, 6, 6).requires_grad_(), made(3, 6).requires_grad_()

    def model(x: Tensor, ends: Tensor) -> Tensor:
        return (grouped_matmul(torch.relu(x), w, ends, transpose=transpose, bias=b) * 2).square().sum()

    step = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for sizes in ([2, 0, 3], [4, 1, 3]):
        x = made(sum(sizes), 6).requires_grad_()
        ours = torch.autograd.grad(step(x, ends_of(sizes)), [x, w, b])
        theirs = torch.autograd.grad(model(x, ends_of(sizes)), [x, w, b])
        for f, t in zip(ours, theirs, strict=True):
            torch.testing.assert_close(f, t)


def test_the_custom_ops_are_well_formed() -> None:
    x, w, b, ends = made(5, 4).requires_grad_(), made(2, 4, 3).requires_grad_(), made(2, 3), ends_of([2, 3])
    torch.library.opcheck(torch.ops.ds_ops.grouped_matmul, (x, w, ends, b, False))
    torch.library.opcheck(torch.ops.ds_ops.grouped_outer, (x, made(5, 2), ends))


@few
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 2), st.booleans(), st.booleans())
def test_what_runs_on_a_device(sizes: list[int], rest: int, transpose: bool, biased: bool) -> None:
    """The backend of CUDA, with torch's own loop of the CPU in place of its kernel."""
    e, rows = len(sizes), sum(sizes) + rest
    x, ends = made(rows, 16, dtype=torch.bfloat16), ends_of(sizes)
    w = made(e, 8, 16, dtype=torch.bfloat16) if transpose else made(e, 16, 8, dtype=torch.bfloat16)
    bias = made(e, 8, dtype=torch.bfloat16) if biased else None
    job = grouped._GroupedProduct(transpose)
    theirs = grouped._torch_matmul(x, w, ends, bias, None, job)
    torch.testing.assert_close(theirs, grouped_matmul(x, w, ends, transpose=transpose, bias=bias), rtol=2e-2, atol=5e-2)
    y = made(rows, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(
        grouped._torch_outer(x, y, ends, None, False), grouped_outer(x, y, ends), rtol=2e-2, atol=5e-2
    )


def test_refusals() -> None:
    x, w, ends = made(3, 4), made(2, 4, 4), ends_of([1, 2])
    for call in (
        lambda: grouped_matmul(x, w, ends.float()),
        lambda: grouped_matmul(x, w, ends[:1]),
        lambda: grouped_matmul(x, w.float(), ends),
        lambda: grouped_matmul(x, w[0], ends),
        lambda: grouped_matmul(x, made(2, 5, 4), ends),
        lambda: grouped_matmul(x, w, ends_of([1, 3])),
        lambda: grouped_matmul(x, w, torch.tensor([2, 1])),
        lambda: grouped_matmul(x, w, ends, bias=made(2, 3)),
        lambda: grouped_matmul(x, w, ends, accumulate=True),
        lambda: grouped_matmul(x, w, ends, out=made(3, 5)),
        lambda: grouped_matmul(x, w.clone().requires_grad_(), ends, out=made(3, 4)),
        lambda: grouped_outer(x, made(4, 4), ends),
        lambda: grouped_outer(x, x, ends, accumulate=True),
        lambda: grouped_outer(x, x, ends, out=made(2, 4, 4).half()),
    ):
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.code == "kernel-argument"


def test_why_torch_does_not_run_it() -> None:
    for dtype, device in itertools.product((torch.float32, torch.bfloat16), ("cpu", "cuda")):
        reason = grouped._no_grouped_mm(device, dtype) if (device, dtype) != ("cuda", torch.bfloat16) else "sm"
        assert reason
    with (
        mock.patch.dict(os.environ, DS_OPS="reference"),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
    ):
        assert not grouped._no_grouped_mm("cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "dtype", "sizes", "reason"),
    [
        ((9, 0), torch.bfloat16, (32, 64), ""),
        ((10, 3), torch.bfloat16, (32, 64), ""),
        ((8, 0), torch.bfloat16, (32, 64), "compute capability 9 and 10"),
        ((8, 9), torch.bfloat16, (32, 64), "compute capability 9 and 10"),
        ((12, 0), torch.bfloat16, (32, 64), "compute capability 9 and 10"),
        ((9, 0), torch.float32, (32, 64), "torch.float32"),
        ((9, 0), torch.bfloat16, (36, 64), "16 bytes"),
    ],
)
def test_which_devices_need_the_host_for_groups(
    capability: tuple[int, int], dtype: torch.dtype, sizes: tuple[int, int], reason: str
) -> None:
    """torch's product of groups reads their ends on the host but for two generations of devices: no CUDA graph holds it elsewhere."""
    registry._choose.cache_clear()
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability), FakeTensorMode():
        told = grouped.why_host_is_told(torch.empty(4, *sizes, dtype=dtype, device="cuda"))
    registry._choose.cache_clear()
    assert reason in told if reason else told == ""
