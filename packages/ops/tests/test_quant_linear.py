"""Products with quantized weights: every format, few and many tokens, experts, gradients, any number of threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_config.errors import KernelError
from ds_ops import quant_linear
from ds_ops.formats import FP4_E2M1, FP6_E3M2, FP8_E4M3, INT4, INT8, Format
from ds_ops.quant import dequantize
from ds_ops.quant_linear import quantize_weight, quantized_grouped_matmul, quantized_linear

FORMATS = [
    (INT8, True),
    (INT8, False),
    (INT4, True),
    (INT4, False),
    (FP8_E4M3, True),
    (FP6_E3M2, True),
    (FP4_E2M1, True),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.mark.parametrize("forced", ["", "reference"])
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from([0, 1, 2, 3, 7, 8, 13, 16, 17, 40]),
    st.integers(0, 9),
    st.sampled_from([0, 1, 15, 64, 100, 700]),
    st.sampled_from(list(TOLERANCE)),
)
def test_values_and_gradients(
    forced: str, spec: tuple[Format, bool], tokens: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    kind, symmetric = spec
    weight = quantize_weight(made(outputs, inputs), kind, group=32, symmetric=symmetric)
    numbers = dequantize(weight).double()
    x, bias = made(tokens, inputs, dtype=dtype).requires_grad_(), made(outputs, dtype=dtype, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_OPS", forced)
        y = quantized_linear(x, weight, bias)
        up = made(tokens, outputs, dtype=dtype, seed=2)
        (dx,) = torch.autograd.grad(y, x, up)
    assert y.dtype is dtype
    for found, exact in (
        (y, x.detach().double() @ numbers.t() + bias.double()),
        (dx, up.double() @ numbers),
    ):
        scale = max(1.0, float(exact.abs().max()) if exact.numel() else 0.0)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=4 * TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("tokens", [1, 5])
def test_the_same_bits_on_any_number_of_threads(tokens: int) -> None:
    weight, x = quantize_weight(made(333, 500), INT4, group=64), made(tokens, 500)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(quantized_linear(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], r) for r in results)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("sizes", [[3, 0, 25], [0, 0, 0], [1, 1, 1]])
def test_experts(sizes: list[int], dtype: torch.dtype) -> None:
    weights = quantize_weight(made(3, 6, 40), INT8, group=16)
    numbers = dequantize(weights).double()
    x, ends = made(sum(sizes) + 2, 40, dtype=dtype).requires_grad_(), torch.tensor(sizes).cumsum(0)
    y = quantized_grouped_matmul(x, weights, ends)
    parts = x.detach().double().split([*sizes, 2])
    exact = torch.cat([a @ w.t() for a, w in zip(parts[:-1], numbers, strict=True)] + [torch.zeros(2, 6).double()])
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=16 * TOLERANCE[dtype])
    (dx,) = torch.autograd.grad(y.float().sum(), x)
    assert not dx[sum(sizes) :].any()


def test_panels_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = quantize_weight(made(200, 64), INT8), made(50, 64).requires_grad_()
    whole = quantized_linear(x, weight)
    monkeypatch.setattr(quant_linear, "_PANEL", 64)
    cut = quantized_linear(x, weight)
    torch.testing.assert_close(cut, whole)
    torch.testing.assert_close(torch.autograd.grad(cut.sum(), x)[0], torch.autograd.grad(whole.sum(), x)[0])


def test_one_node_of_a_compiled_model() -> None:
    torch.compiler.reset()
    weight, experts = quantize_weight(made(8, 64), INT8), quantize_weight(made(2, 8, 64), INT4)
    x, ends = made(3, 64).requires_grad_(), torch.tensor([1, 3])

    def model(t: Tensor) -> Tensor:
        return quantized_linear(t * 2, weight) + quantized_grouped_matmul(t, experts, ends)

    found, wanted = torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(wanted.sum(), x)[0])


def test_refusals() -> None:
    weight, experts = quantize_weight(made(6, 32), INT8), quantize_weight(made(2, 6, 32), INT8)
    x, ends = made(3, 32), torch.tensor([1, 3])
    for call in (
        lambda: quantize_weight(made(3)),
        lambda: quantized_linear(made(3, 31), weight),
        lambda: quantized_linear(x.double(), weight),
        lambda: quantized_linear(x, experts),
        lambda: quantized_linear(x, weight, made(5)),
        lambda: quantized_grouped_matmul(x, weight, ends),
        lambda: quantized_grouped_matmul(x, experts, ends.float()),
        lambda: quantized_grouped_matmul(x, experts, torch.tensor([1, 4])),
    ):
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.code == "kernel-argument"
