"""Every op with a native kernel, on every device there is, against its reference on the CPU.

On the CPU this is a sample of what other files test in depth; on a CUDA device (`nox -s gpu`) it is the test of the
CUDA module. The kernels' arithmetic is the same, so wherever the CPU's results are exact the device's are.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ds_config.errors import KernelError
from ds_ops import (
    UpdateRule,
    UpdateSpec,
    UpdateTensors,
    convert,
    fill,
    lamb_apply,
    lamb_moments,
    registry,
    sum_squares,
    update,
)
from ds_ops.all_ops import every_op
from ds_ops.formats import (
    FP4_E2M1,
    FP6_E3M2,
    FP8_E4M3,
    FP8_E5M2,
    INT4,
    INT8,
    Draw,
    Format,
    QuantSpec,
    QuantTensor,
    Rounding,
    Swizzle,
)
from ds_ops.norms import add_rms_norm, rms_norm
from ds_ops.quant import dequantize, quantize, reduce, reduce_quantized
from ds_ops.reference import norms as norms_reference
from ds_ops.reference import quant as quant_reference
from ds_ops.reference import update as update_reference
from ds_ops.stream import differs_from_cast
from ds_ops.update_rules import AdamHyper, adam_coefficients, lamb_coefficients, lion_coefficients, sgd_coefficients

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HYPER = AdamHyper(1e-2, (0.9, 0.99), 1e-8, 0.1)
SIZES = [0, 1, 5, 8191, 8193, 0]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device whose native backend runs; skipped, with the registry's reason, where it does not."""
    kind: str = request.param
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    (op,) = [op for op in every_op().ops if op.name == "update"]
    choice = registry.choose(op, kind, torch.float32)
    if choice.backend.name != kind:
        pytest.skip("; ".join(f"{name}: {why}" for name, why in choice.rejected))
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def lists(dtype: torch.dtype, device: torch.device) -> UpdateTensors:
    def row(seed: int, of: torch.dtype) -> list[Tensor]:
        values = [make(n, seed=seed) for n in SIZES]
        return [(v.abs() if seed == 3 else v).to(of).to(device) for v in values]

    return UpdateTensors(
        row(0, dtype), row(1, torch.bfloat16), (row(2, torch.float32), row(3, torch.float32)), row(4, torch.float16)
    )


def agree(ours: UpdateTensors, expected: UpdateTensors) -> None:
    for a, b in zip(
        (*ours.params, *ours.grads, *(t for s in ours.states for t in s), *ours.copies),
        (*expected.params, *expected.grads, *(t for s in expected.states for t in s), *expected.copies),
        strict=True,
    ):
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[a.dtype]
        torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [UpdateRule.ADAM, UpdateRule.LION, UpdateRule.SGD])
def test_updates(device: torch.device, rule: UpdateRule, dtype: torch.dtype) -> None:
    coefficients = {
        UpdateRule.ADAM: adam_coefficients(HYPER, 3),
        UpdateRule.LION: lion_coefficients(1e-2, (0.9, 0.99), 0.1),
        UpdateRule.SGD: sgd_coefficients(1e-2, 0.9, 0.1, 0.1),
    }[rule]
    spec = UpdateSpec(rule, coefficients, 0.5, zero_grad=True)
    ours, expected = lists(dtype, device), lists(dtype, torch.device("cpu"))
    if rule is not UpdateRule.ADAM:
        ours, expected = (replace(t, states=t.states[:1]) for t in (ours, expected))
    update(spec, ours)
    update_reference.update(spec, expected)
    agree(ours, expected)
    update(spec, replace(ours, params=[], grads=[], states=tuple([] for _ in ours.states), copies=[]))


@pytest.mark.parametrize("inside", [False, True])
def test_lamb(device: torch.device, inside: bool) -> None:
    spec = UpdateSpec(UpdateRule.LAMB_MOMENTS, lamb_coefficients(HYPER, 2, eps_inside_sqrt=inside), 0.5)
    ours, expected = lists(torch.float32, device), lists(torch.float32, torch.device("cpu"))
    sums = lamb_moments(spec, replace(ours, copies=()))
    torch.testing.assert_close(
        sums.cpu(), update_reference.lamb_moments(spec, replace(expected, copies=())), rtol=1e-5, atol=1e-9
    )
    ratios = torch.linspace(0.5, 2.0, len(SIZES))
    lamb_apply(replace(spec, rule=UpdateRule.LAMB_APPLY), ours, ratios)
    update_reference.lamb_apply(replace(spec, rule=UpdateRule.LAMB_APPLY), expected, ratios)
    agree(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 4097, 70_001])
def test_passes(device: torch.device, dtype: torch.dtype, n: int) -> None:
    x = make(n + 1, dtype=dtype)[1:]
    there = x.to(device)
    assert sum_squares(there) == pytest.approx(float(x.double().square().sum()), rel=1e-12)
    for other in DTYPES:
        out = torch.empty(n, dtype=other, device=device)
        assert torch.equal(convert(out, there, scale=0.5).cpu(), (x.float() * 0.5).to(other))
        cast = there.to(other, copy=True)
        assert not differs_from_cast(cast, there)
        if n:
            cast[n // 2] += 1
            assert differs_from_cast(cast, there)
    assert bool((fill(there, 2.0) == 2.0).all())


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("f", [INT8, INT4, FP8_E4M3, FP8_E5M2, FP6_E3M2, FP4_E2M1])
def test_quantizers(device: torch.device, f: Format, rounding: Rounding) -> None:
    for symmetric in (True,) if f.is_float else (True, False):
        for dtype, cols in zip(DTYPES, (1, 300, 1023), strict=True):
            spec = QuantSpec(f, 64, symmetric, rounding)
            x, swizzle = make(8, cols, dtype=dtype), Swizzle(2, 2, 2)
            ours = quantize(x.to(device), spec, rows=swizzle, draw=Draw(1, 2**32 - 99))
            expected = QuantTensor.empty(spec, 8, cols, like=x)
            quant_reference.quantize(expected, x, swizzle.order(), Draw(1, 2**32 - 99))
            assert torch.equal(ours.wire.cpu(), expected.wire)
            dense = torch.empty(8, cols, dtype=dtype)
            quant_reference.dequantize(expected, None, dense)
            assert torch.equal(dequantize(ours).cpu(), dense)
            rows = torch.tensor([5, 0])
            assert torch.equal(dequantize(ours, rows=rows.to(device)).cpu(), dense[rows])
            total = torch.empty(2, cols)
            quant_reference.reduce(expected, 4, 0.25, total)
            assert torch.equal(reduce(ours, 4, factor=0.25).cpu(), total)
            again = QuantTensor.empty(QuantSpec(INT8, 128), 2, cols, like=x)
            quant_reference.reduce_quantized(expected, 4, 0.25, again, Draw())
            assert torch.equal(reduce_quantized(ours, 4, factor=0.25, spec=again.spec).wire.cpu(), again.wire)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (2, 3, 1000)])
def test_norms(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual, weight = make(*shape, dtype=dtype), make(*shape, dtype=dtype, seed=1), make(shape[-1], seed=2)
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]

    def run(where: torch.device, plain: bool) -> list[Tensor]:
        a, b, w = (t.detach().to(where).requires_grad_() for t in (x, residual, weight))
        if plain:
            total = a + b
            y, single = norms_reference.rms_norm(total, w, 1e-6), norms_reference.rms_norm(a, w, 1e-6)
        else:
            (y, total), single = add_rms_norm(a, b, w), rms_norm(a, w)
        grads = torch.autograd.grad(
            (y, total, single), (a, b, w), (torch.ones_like(y), torch.ones_like(y), 2 * torch.ones_like(y))
        )
        return [t.detach().cpu() for t in (y, total, single, *grads)]

    for a, b in zip(run(device, False), run(torch.device("cpu"), True), strict=True):
        scale = max(1.0, float(b.abs().max()) if b.numel() else 0.0)
        torch.testing.assert_close(a.float(), b.float(), rtol=4 * tolerance, atol=4 * tolerance * scale)


def test_tensors_of_two_devices_are_refused(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a second device")
    q = quantize(make(4, 8).to(device), rows=4)
    with pytest.raises(KernelError, match="expected device"):
        dequantize(q, out=torch.empty(32))
    with pytest.raises(KernelError, match="expected device"):
        dequantize(q, rows=torch.tensor([0]))
