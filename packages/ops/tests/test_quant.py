"""Quantizers: native against the reference to the bit, errors within the formats' spacing, what stays zero, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_config.errors import KernelError, UnsupportedError
from ds_ops.fake_quant import fake_quantize
from ds_ops.formats import (
    FP4_E2M1,
    FP6_E2M3,
    FP6_E3M2,
    FP8_E4M3,
    FP8_E5M2,
    INT4,
    INT8,
    Draw,
    QuantSpec,
    QuantTensor,
    Rounding,
    Swizzle,
)
from ds_ops.fp_quant import FPQuantizer
from ds_ops.quant import dequantize, quantize, quantize_with_feedback, reduce, reduce_quantized
from ds_ops.reference import quant as reference

FORMATS = [INT8, INT4, FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, FP4_E2M1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
quiet = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def numbers(rows: int, cols: int, dtype: torch.dtype, *, offset: int = 0, scale: float = 1.0) -> Tensor:
    """Unaligned if offset is odd; with zeros, one large element, and equal elements in places."""
    g = torch.Generator().manual_seed(rows * 1000 + cols)
    x = torch.randn(rows * cols + offset, generator=g) * scale
    x[::7] = 0
    x[5:9] = 3 * scale
    return x.to(dtype)[offset:].view(rows, cols)


@st.composite
def specs(draw: st.DrawFn) -> QuantSpec:
    f = draw(st.sampled_from(FORMATS))
    group = 4 * draw(st.sampled_from([1, 2, 16, 64, 127, 128, 129, 300]))
    return QuantSpec(f, group, f.is_float or draw(st.booleans()), draw(st.sampled_from(list(Rounding))))


shapes = st.tuples(st.integers(1, 4), st.one_of(st.integers(0, 70), st.sampled_from([511, 512, 513, 1025, 2500])))


@quiet
@given(specs(), shapes, st.sampled_from(DTYPES), st.integers(0, 3), st.sampled_from(DTYPES))
def test_native_equals_reference_to_the_bit(
    native: None, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype, offset: int, out_dtype: torch.dtype
) -> None:
    x = numbers(*shape, dtype, offset=offset)
    draw = Draw(seed=3, offset=2**32 - 100)  # the counter crosses 32 bits
    ours = quantize(x, spec, rows=shape[0], draw=draw)
    theirs = QuantTensor.empty(spec, *shape, like=x)
    reference.quantize(theirs, x, None, draw)
    assert torch.equal(ours.codes, theirs.codes)
    assert torch.equal(ours.params, theirs.params)
    expected = torch.empty(shape, dtype=out_dtype)
    reference.dequantize(theirs, None, expected)
    assert torch.equal(dequantize(ours, dtype=out_dtype), expected)


@quiet
@given(specs(), shapes, st.integers(1, 4), st.sampled_from(DTYPES), st.integers(1, 3))
def test_reductions_equal_the_reference_to_the_bit(
    native: None, spec: QuantSpec, shape: tuple[int, int], sources: int, dtype: torch.dtype, times: int
) -> None:
    q = quantize(numbers(shape[0] * sources, shape[1], torch.float32), spec, rows=shape[0] * sources)
    expected = torch.empty(shape, dtype=dtype)
    reference.reduce(q, sources, 0.3, expected)
    assert torch.equal(reduce(q, sources, factor=0.3, dtype=dtype), expected)
    again = QuantSpec(INT8, spec.group * times, rounding=spec.rounding)
    theirs = QuantTensor.empty(again, *shape, like=q.wire)
    reference.reduce_quantized(q, sources, 0.3, theirs, Draw(5))
    ours = reduce_quantized(q, sources, factor=0.3, spec=again, draw=Draw(5))
    assert torch.equal(ours.wire[:, : ours.layout.code_bytes], theirs.codes)
    assert torch.equal(ours.params, theirs.params)


def spacing(spec: QuantSpec, q: QuantTensor, values: Tensor) -> Tensor:
    """The distance to the next representable value, at each of `values`."""
    scale = q.params[..., 0].repeat_interleave(spec.group, dim=1)[:, : q.cols]
    if not spec.format.is_float:
        return scale
    f = spec.format
    exponent = torch.floor(torch.log2((values.abs() / scale).clamp(min=2.0 ** (1 - f.bias))))
    return scale * torch.exp2(exponent - f.mantissa)


@pytest.mark.usefixtures("backend")
@quiet
@given(specs(), shapes, st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_errors_are_within_the_spacing_and_zero_is_exact(spec: QuantSpec, shape: tuple[int, int], scale: float) -> None:
    x = numbers(*shape, torch.float32, scale=scale)
    q = quantize(x, spec, rows=shape[0])
    error = (dequantize(q) - x).abs()
    share = 0.5 if spec.rounding is Rounding.NEAREST else 1.0
    assert bool((error <= spacing(spec, q, x) * share * (1 + 1e-5)).all())
    assert bool((dequantize(q)[x == 0] == 0).all())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("spec", [QuantSpec(f, 64) for f in FORMATS] + [QuantSpec(INT4, 64, symmetric=False)])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_group_that_is_not_finite_comes_back_as_nan(spec: QuantSpec, bad: float) -> None:
    x = numbers(2, 300, torch.float32)
    x[1, 70] = bad
    back = dequantize(quantize(x, spec, rows=2))
    poisoned = back.isnan()
    assert bool(poisoned[1, 64:128].all())
    assert int(poisoned.sum()) == 64
    reduced = reduce(quantize(x, spec, rows=2), 2)
    assert bool(reduced[0, 64:128].isnan().all())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("spec", [QuantSpec(f, 64) for f in FORMATS] + [QuantSpec(INT8, 64, symmetric=False)])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e38, -3e38])
def test_extreme_groups_are_finite(spec: QuantSpec, value: float) -> None:
    x = torch.full((1, 100), value)
    back = dequantize(quantize(x, spec))
    assert bool(torch.isfinite(back).all())
    torch.testing.assert_close(back, x, rtol=1e-6, atol=1.2e-38)


def test_fp8_codes_are_torchs(native: None) -> None:
    """All finite values of the format, unscaled because the largest is among them."""
    for f, dtype in ((FP8_E4M3, torch.float8_e4m3fn), (FP8_E5M2, torch.float8_e5m2)):
        codes = torch.arange(f.max_code + 1, dtype=torch.uint8)
        values = codes.view(dtype).float()
        q = quantize(torch.cat((values, -values)), QuantSpec(f, 512))
        assert torch.equal(q.codes[0, : len(codes)], codes)
        assert torch.equal(q.codes[0, len(codes) :], codes | 0x80)
        g = torch.Generator().manual_seed(0)
        x = torch.randn(4000, generator=g) * 30
        x[0] = f.maximum
        quantizer = FPQuantizer(4000)
        mine = quantizer.to_float8(quantizer.quantize(x, 8, f.mantissa))
        assert torch.equal(mine.view(torch.uint8)[0], x.to(dtype).view(torch.uint8))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("f", FORMATS)
def test_stochastic_rounding_is_right_on_average(f: object) -> None:
    assert isinstance(f, type(INT8))
    spec = QuantSpec(f, 64, rounding=Rounding.STOCHASTIC)
    x = torch.full((1, 64), 0.3)
    x[0, 0] = 1.0
    x[0, 1::2] *= -1
    rounds = 400
    total = torch.zeros_like(x)
    for seed in range(rounds):
        total += dequantize(quantize(x, spec, draw=Draw(seed)))
    q = quantize(x, spec)
    standard_error = spacing(spec, q, x)[0, 5] / 2 / math.sqrt(rounds * 31)
    for part in (total[0, 2::2], total[0, 1::2]):
        assert abs(float(part.mean() / rounds) - math.copysign(0.3, float(part[0]))) < 5 * float(standard_error)


@pytest.mark.usefixtures("backend")
def test_draws_depend_on_seed_and_place_only() -> None:
    spec = QuantSpec(INT4, 64, rounding=Rounding.STOCHASTIC)
    x = numbers(8, 128, torch.float32)
    whole = quantize(x, spec, rows=8, draw=Draw(11))
    shard = quantize(x[3:5], spec, rows=2, draw=Draw(11, offset=3 * 128))
    assert torch.equal(whole.wire[3:5], shard.wire)
    assert torch.equal(quantize(x, spec, rows=8, draw=Draw(11)).wire, whole.wire)
    assert not torch.equal(quantize(x, spec, rows=8, draw=Draw(12)).wire, whole.wire)
    swizzled = quantize(x, spec, rows=Swizzle(2, 2, 2), draw=Draw(11))
    assert torch.equal(swizzled.wire[torch.tensor(Swizzle(2, 2, 2).order())], whole.wire)


@pytest.mark.usefixtures("backend")
@quiet
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 200))
def test_hierarchical_all_to_all(nodes: int, local: int, cols: int) -> None:
    """qgZ acted out in one process: what each rank ends with is the mean, up to two roundings."""
    world = nodes * local
    spec = QuantSpec(INT8, 64)
    grads = [numbers(world, cols, torch.float32, scale=1 + rank) for rank in range(world)]
    wires = [quantize(g, spec, rows=Swizzle(nodes, local)).wire.view(local, nodes, -1) for g in grads]
    sums = []
    for node in range(nodes):
        for index in range(local):
            received = torch.cat([wires[node * local + peer][index] for peer in range(local)])
            sums.append(reduce_quantized(QuantTensor(received, spec, cols, (len(received), cols)), local))
    for node in range(nodes):
        for index in range(local):
            received = torch.stack([sums[peer * local + index].wire[node] for peer in range(nodes)])
            q = QuantTensor(received, spec, cols, (nodes, cols))
            mine = reduce(q, nodes, factor=1 / world)[0]
            expected = torch.stack([g[node * local + index] for g in grads]).mean(0)
            largest = max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)
            assert float((mine - expected).abs().max() if cols else 0) <= 1.01 * largest / 127


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
def test_selected_rows(dtype: torch.dtype) -> None:
    x = numbers(6, 130, dtype)
    q = quantize(x, QuantSpec(INT4, 32, symmetric=False), rows=6)
    rows = torch.tensor([4, 0, 4])
    assert torch.equal(dequantize(q, rows=rows), dequantize(q)[rows])
    assert dequantize(q, rows=rows[:0]).shape == (0, 130)
    with pytest.raises(KernelError, match=r"outside 0\.\.5"):
        dequantize(q, rows=torch.tensor([6]))
    with pytest.raises(KernelError, match=r"rows: expected dtype torch\.int64"):
        dequantize(q, rows=torch.tensor([1], dtype=torch.int32))


@pytest.mark.usefixtures("backend")
def test_out_is_reused_and_checked() -> None:
    x = numbers(2, 64, torch.float32)
    q = quantize(x, rows=2)
    assert quantize(x * 2, rows=2, out=q) is q
    out = torch.empty(128)
    assert dequantize(q, out=out) is out
    assert torch.equal(out, dequantize(q).view(-1))
    with pytest.raises(KernelError, match="out: expected 2 rows of 64"):
        quantize(x, QuantSpec(INT4), rows=2, out=q)
    with pytest.raises(KernelError, match="out: expected 128 elements"):
        dequantize(q, out=out[:100])


@pytest.mark.usefixtures("backend")
def test_bad_tensors_are_typed_errors() -> None:
    x = numbers(4, 30, torch.float32)
    for bad, message in ((x.t(), "contiguous"), (x.double(), "dtype"), (x.int(), "dtype")):
        with pytest.raises(KernelError, match=message) as caught:
            quantize(bad)
        assert caught.value.code == "kernel-argument"
    with pytest.raises(KernelError, match="equal rows"):
        quantize(x, rows=7)
    q = quantize(x, rows=4)
    for sources in (0, 3, -1):
        with pytest.raises(KernelError, match="sources"):
            reduce(q, sources)
    with pytest.raises(KernelError, match="whole old ones") as caught:
        reduce_quantized(q, 2, spec=QuantSpec(INT8, 100))
    assert caught.value.code == "quant-spec"


@pytest.mark.usefixtures("backend")
def test_feedback_makes_the_sum_right() -> None:
    """Constant input, coarse codes: without feedback the error repeats, with it the running mean converges."""
    x = numbers(1, 200, torch.float32)
    spec = QuantSpec(INT4, 64)
    error, total, plain = torch.zeros_like(x), torch.zeros_like(x), dequantize(quantize(x, spec))
    for _ in range(50):
        total += dequantize(quantize_with_feedback(x, error, spec))
    assert float((total / 50 - x).abs().max()) < 0.1 * float((plain - x).abs().max())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_quantization_has_a_straight_through_gradient(dtype: torch.dtype) -> None:
    x = numbers(3, 50, dtype).requires_grad_()
    spec = QuantSpec(INT4, 32)
    y = fake_quantize(x, spec, rows=3)
    assert torch.equal(y, dequantize(quantize(x, spec, rows=3)))
    gradient = torch.randn(3, 50).to(dtype)
    y.backward(gradient)
    assert x.grad is not None
    assert torch.equal(x.grad, gradient)


@pytest.mark.usefixtures("backend")
def test_fp_quantizer() -> None:
    w = numbers(6, 700, torch.bfloat16)
    quantizer = FPQuantizer(512)
    for bits, mantissa, tolerance in ((8, 3, 0.07), (8, 2, 0.13), (6, 2, 0.13), (6, 3, 0.07), (4, 1, 0.26)):
        q = quantizer.quantize(w, bits, mantissa)
        back = quantizer.dequantize(q)
        assert (back.shape, back.dtype) == (w.shape, w.dtype)
        largest = float(w.abs().max())
        torch.testing.assert_close(back.float(), w.float(), rtol=tolerance, atol=largest * tolerance)
        assert torch.equal(quantizer.selective_dequantize(q, torch.tensor([5, 1])), back[[5, 1]])
        assert quantizer.get_scales(q).shape == (6, 2)
    assert q.nbytes < w.numel() * 0.52
    with pytest.raises(UnsupportedError, match="no float format of 12 bits") as caught:
        quantizer.quantize(w, 12, 7)
    assert caught.value.code == "quant-format"
    with pytest.raises(UnsupportedError, match="no dtype"):
        quantizer.to_float8(q)


def test_threads_do_not_change_a_bit(native: None) -> None:
    x = numbers(3, 40_000, torch.float32)
    spec = QuantSpec(INT4, 128, rounding=Rounding.STOCHASTIC)
    before = torch.get_num_threads()
    wires = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            q = quantize(x, spec, rows=3)
            wires.append((q.wire, reduce(q, 3), reduce_quantized(q, 3).wire))
    finally:
        torch.set_num_threads(before)
    for other in wires[1:]:
        assert all(torch.equal(a, b) for a, b in zip(wires[0], other, strict=True))
