"""Norms against their definition and torch's own, forward and backward, over shapes and dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_config.errors import KernelError
from ds_ops.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
quiet = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
pytestmark = pytest.mark.usefixtures("backend")

shapes = st.one_of(
    st.tuples(st.integers(0, 5), st.integers(1, 40)),
    st.tuples(st.integers(1, 3), st.integers(0, 3), st.sampled_from([1, 511, 512, 513, 1100])),
    st.tuples(st.sampled_from([63, 64, 65, 130]), st.integers(1, 20)),
    st.tuples(st.integers(1, 30)),
)


def make(shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
    numel = torch.Size(shape).numel()
    g = torch.Generator().manual_seed(numel + offset)
    flat = torch.randn(numel + offset, generator=g)
    flat = (flat + 0.5 * flat.sign() + 0.1).to(dtype)  # away from zero: rows of one element divide by their own size
    return flat[offset:].view(shape).detach().requires_grad_()


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def check(ours: list[Tensor], exact: list[Tensor], inputs: list[Tensor], wide: list[Tensor]) -> None:
    """Outputs and gradients of all inputs, against fp64."""
    # Few elements can be nearly equal: layer norm then multiplies rounding errors by up to 1 / sqrt(eps).
    condition = 320 if inputs[0].shape[-1] < 8 else 1
    for a, b in zip(ours, exact, strict=True):
        tolerance = condition * TOLERANCE[a.dtype]
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    g = torch.Generator().manual_seed(5)
    upstream = [torch.randn(a.shape, generator=g).to(a.dtype) for a in ours]
    torch.autograd.backward(ours, upstream)
    torch.autograd.backward(exact, [u.double() for u in upstream])
    coarsest = max(TOLERANCE[t.dtype] for t in inputs)
    for t, w in zip(inputs, wide, strict=True):
        assert t.grad is not None
        assert w.grad is not None
        assert t.grad.dtype == t.dtype
        largest = float(w.grad.abs().max()) if w.grad.numel() else 0.0
        atol = 3 * condition * coarsest * max(largest, 1.0)
        torch.testing.assert_close(t.grad.double(), w.grad, rtol=0.0, atol=atol)


@quiet
@given(shapes, st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 3))
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype, offset: int) -> None:
    inputs = [make(shape, dtype, offset), make(shape[-1:], weight_dtype), make(shape[-1:], weight_dtype, 1)]
    wide = copies(inputs)
    check([layer_norm(*inputs)], [functional.layer_norm(wide[0], shape[-1:], *wide[1:])], inputs, wide)


@quiet
@given(shapes, st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 3))
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype, offset: int) -> None:
    inputs = [make(shape, dtype, offset), make(shape[-1:], weight_dtype)]
    wide = copies(inputs)
    check([rms_norm(*inputs)], [functional.rms_norm(wide[0], shape[-1:], wide[1], 1e-6)], inputs, wide)


@quiet
@given(shapes, st.sampled_from(DTYPES))
def test_with_a_residual(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for center in (False, True):
        inputs = [make(shape, dtype), make(shape, dtype), make(shape[-1:], torch.float32)]
        wide = copies(inputs)
        rounded = (inputs[0] + inputs[1]).detach().double()
        total = wide[0] + wide[1] + (rounded - (wide[0] + wide[1])).detach()
        if center:
            ours = add_layer_norm(inputs[0], inputs[1], inputs[2])
            exact = functional.layer_norm(total, shape[-1:], wide[2])
        else:
            ours = add_rms_norm(inputs[0], inputs[1], inputs[2])
            exact = functional.rms_norm(total, shape[-1:], wide[2], 1e-6)
        assert torch.equal(ours[1].double(), rounded)
        check(list(ours), [exact, total], inputs, wide)


def test_without_weights_and_without_gradients() -> None:
    x = make((3, 50), torch.float32).detach()
    torch.testing.assert_close(layer_norm(x), functional.layer_norm(x, (50,)))
    torch.testing.assert_close(rms_norm(x, eps=1e-3), functional.rms_norm(x, (50,), eps=1e-3))
    assert not layer_norm(x).requires_grad


def test_other_strides_are_copied() -> None:
    x = make((50, 3), torch.float32)
    torch.testing.assert_close(layer_norm(x.t()), functional.layer_norm(x.t(), (50,)))
    rms_norm(x.t()).sum().expand(2).sum().backward()  # an expanded gradient, too
    assert x.grad is not None


def test_fp64_through_torch() -> None:
    x = make((3, 50), torch.float64)
    torch.testing.assert_close(rms_norm(x), functional.rms_norm(x, (50,), eps=1e-6))
    assert torch.autograd.gradcheck(lambda t: add_layer_norm(t, t * 0.5), (x,))


def test_bad_arguments_are_typed_errors() -> None:
    x = make((3, 50), torch.float32)
    for call in (
        lambda: rms_norm(x, torch.ones(49)),
        lambda: layer_norm(x, torch.ones(50), torch.ones(50, dtype=torch.int64)),
        lambda: add_rms_norm(x, x[:2]),
        lambda: add_layer_norm(x, x.bfloat16()),
        lambda: rms_norm(torch.ones(3, dtype=torch.int32)),
        lambda: rms_norm(torch.tensor(1.0)),
    ):
        with pytest.raises(KernelError, match="expected") as caught:
            call()
        assert caught.value.code == "kernel-argument"


def test_threads_do_not_change_a_bit() -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            x, w = make((200, 700), torch.bfloat16), make((700,), torch.float32)
            y, total = add_rms_norm(x, x * 2, w)
            torch.autograd.backward([y, total], [y.detach(), total.detach()])
            results.append((y, x.grad, w.grad))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True) if a is not None and b is not None)


def test_compiles_without_a_break() -> None:
    compiled = torch.compile(add_rms_norm, backend="aot_eager", fullgraph=True)
    x, w = make((4, 32), torch.float32), make((32,), torch.float32)
    for a, b in zip(compiled(x, x, w), add_rms_norm(x, x, w), strict=True):
        torch.testing.assert_close(a, b)
