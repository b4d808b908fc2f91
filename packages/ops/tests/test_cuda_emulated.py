"""The CUDA kernels on a machine without a GPU: the kernels themselves, run by the emulator, against the CPU's and the references.

Every bit counts for updates, passes and quantizers; norms add up in another order. What the hardware adds (its own conversions, races
between warps) is left to `nox -s gpu`; orders of blocks and warps are drawn here, too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_ops import apply_update, cuda_norms, cuda_quant, cuda_stream
from ds_ops.cuda_launch import divisor
from ds_ops.formats import (
    FP4_E2M1,
    FP6_E2M3,
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
)
from ds_ops.reference import norms as norms_reference
from ds_ops.reference import quant as quant_reference
from ds_ops.reference import update as update_reference
from ds_ops.update_rules import (
    AdamHyper,
    UpdateRule,
    UpdateSpec,
    UpdateTensors,
    adam_coefficients,
    lamb_coefficients,
    lion_coefficients,
    sgd_coefficients,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = [INT8, INT4, FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, FP4_E2M1]


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def test_divisors_divide() -> None:
    generator = torch.Generator().manual_seed(1)
    for d in [1, 2, 3, 7, 64, 1000, 4097, 1 << 20, (1 << 31) - 1]:
        factor, shift = divisor(d)
        assert factor < 1 << 32
        for a in [0, d - 1, d, (1 << 31) - 1, *torch.randint(0, 1 << 31, (200,), generator=generator).tolist()]:
            assert min(a, (1 << 31) - 1) * factor >> shift == min(a, (1 << 31) - 1) // d


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits, NaN for NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


# ---- quantizers ------------------------------------------------------------------------------------------------------


def check_quantizers(spec: QuantSpec, x: Tensor, draw: Draw) -> None:
    """Check that codes, numbers and sums of both are those of the reference, to the bit."""
    rows, cols = x.shape
    ours, expected = (QuantTensor.empty(spec, rows, cols, like=x) for _ in range(2))
    ours.wire.fill_(0xA5)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    cuda_quant.quantize(ours, x, order, draw)
    quant_reference.quantize(expected, x, order.tolist(), draw)
    assert torch.equal(ours.wire, expected.wire)
    for dtype in DTYPES:
        dense = torch.empty(rows, cols, dtype=dtype)
        quant_reference.dequantize(expected, None, dense)
        out = torch.full((rows, cols), 5.0, dtype=dtype)
        cuda_quant.dense(expected, None, 1, 1.0, out)
        assert same(out, dense)
        index = torch.tensor([rows - 1, 0, rows, -1])
        few = torch.zeros(4, cols, dtype=dtype)
        cuda_quant.dense(expected, index, 1, 1.0, few)
        assert same(few[:2], dense[[rows - 1, 0]])
        assert bool(few[2:].isnan().all())
    if rows % 2 == 0:
        total, want = torch.zeros(rows // 2, cols), torch.zeros(rows // 2, cols)
        cuda_quant.dense(expected, None, 2, 0.3, total)
        quant_reference.reduce(expected, 2, 0.3, want)
        assert same(total, want)
        wide = QuantSpec(INT8, 2 * spec.group, symmetric=spec.symmetric)
        a, b = (QuantTensor.empty(wide, rows // 2, cols, like=x) for _ in range(2))
        cuda_quant.requantize(expected, 2, 0.3, a, Draw(3))
        quant_reference.reduce_quantized(expected, 2, 0.3, b, Draw(3))
        assert torch.equal(a.wire, b.wire)


def specs() -> list[QuantSpec]:
    forms = [(f, True) for f in FORMATS] + [(INT8, False), (INT4, False)]
    return [QuantSpec(f, 128, symmetric, rounding) for f, symmetric in forms for rounding in Rounding]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spec", specs(), ids=lambda s: f"{s.format.name}-{'zero' * (not s.symmetric)}-{s.rounding.value}"
)
def test_quantizers_at_aligned_addresses(emulated: object, spec: QuantSpec, dtype: torch.dtype) -> None:
    x = make(4, 1024, dtype=dtype)
    x[1, :256] *= 1e-3
    x[2, 5] = torch.inf
    x[3, 128:256] = 0.0
    x[3, 700] = 1e-30  # a subnormal scale is not one
    check_quantizers(spec, x, Draw(1, 2**32 - 99))


@pytest.mark.parametrize(
    ("f", "group", "cols"),
    [
        (INT8, 32, 96),
        (INT8, 2048, 4096),
        (INT4, 512, 1536),
        (FP8_E4M3, 1024, 1200),
        (FP6_E3M2, 64, 160),
        (FP4_E2M1, 256, 1040),
    ],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_groups_and_short_last_groups(emulated: object, f: Format, group: int, cols: int) -> None:
    for dtype in DTYPES[:2]:
        check_quantizers(QuantSpec(f, group), make(6, cols, dtype=dtype), Draw())


@pytest.mark.parametrize("f", FORMATS, ids=lambda f: f.name)
def test_any_row_at_any_address(emulated: object, f: Format) -> None:
    for group, cols in ((12, 7), (256, 257), (100, 700)):
        for symmetric in (True,) if f.is_float else (True, False):
            x = make(2 * cols + 1, dtype=torch.bfloat16)[1:].view(2, cols)
            check_quantizers(QuantSpec(f, group, symmetric), x, Draw(2))


@pytest.mark.parametrize("f", FORMATS, ids=lambda f: f.name)
def test_every_code_decodes(emulated: object, f: Format) -> None:
    """Codes that no quantizer writes, too: those of files."""
    spec = QuantSpec(f, 256)
    q = QuantTensor.empty(spec, 2, 256, like=torch.empty(0))
    codes = torch.arange(256)[None].expand(2, -1) % 2**f.bits
    q.codes.copy_(quant_reference.pack(codes, f.bits))
    q.params.copy_(torch.tensor([[[0.75]], [[2.0**-100]]]))
    dense, out = torch.empty(2, 256), torch.empty(2, 256)
    quant_reference.dequantize(q, None, dense)
    cuda_quant.dense(q, None, 1, 1.0, out)
    assert torch.equal(out, dense)


# ---- updates and passes -------------------------------------------------------------------------------------------------

HYPER = AdamHyper(1e-2, (0.9, 0.99), 1e-8, 0.1)
SIZES = [0, 1, 5, 8191, 8193, 0, 1024]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", [UpdateRule.ADAM, UpdateRule.LION, UpdateRule.SGD, UpdateRule.ADAM_UNDO])
def test_updates_have_the_bits_of_the_cpu(emulated: object, native: None, rule: UpdateRule, dtype: torch.dtype) -> None:
    coefficients = {
        UpdateRule.ADAM: adam_coefficients(HYPER, 3),
        UpdateRule.ADAM_UNDO: (*adam_coefficients(HYPER, 3), 1 / 0.9, 1 / 0.99, 1.001)[:11],
        UpdateRule.LION: lion_coefficients(1e-2, (0.9, 0.99), 0.1),
        UpdateRule.SGD: sgd_coefficients(1e-2, 0.9, 0.1, 0.1),
    }[rule]
    states = 2 if rule in (UpdateRule.ADAM, UpdateRule.ADAM_UNDO) else 1
    state_dtype = dtype if dtype is torch.bfloat16 else torch.float32

    def lists() -> UpdateTensors:
        def row(seed: int, of: torch.dtype) -> list[Tensor]:
            values = [make(n, seed=seed) for n in SIZES]
            return [(v.abs() if seed == 3 else v).to(of) for v in values]

        return UpdateTensors(
            row(0, dtype),
            row(1, torch.bfloat16),
            tuple(row(2 + i, state_dtype) for i in range(states)),
            row(4, torch.float16),
        )

    dither = 0.31 if rule is UpdateRule.ADAM and state_dtype is torch.bfloat16 else 0.0
    spec = UpdateSpec(rule, coefficients, 0.5, zero_grad=True, dither=dither)
    ours, expected = lists(), lists()
    apply_update.cuda_step(spec, ours)
    apply_update.update(spec, expected)
    for a, b in zip(
        (*ours.params, *ours.grads, *(t for s in ours.states for t in s), *ours.copies),
        (*expected.params, *expected.grads, *(t for s in expected.states for t in s), *expected.copies),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_lamb(emulated: object) -> None:
    spec = UpdateSpec(UpdateRule.LAMB_MOMENTS, lamb_coefficients(HYPER, 2), torch.tensor([0.5]))

    def lists() -> UpdateTensors:
        rows = [[make(n, seed=k) for n in SIZES] for k in range(4)]
        return UpdateTensors(rows[0], rows[1], (rows[2], [r.abs() for r in rows[3]]))

    ours, expected = lists(), lists()
    sums = apply_update.cuda_lamb_moments(spec, ours)
    plain = UpdateSpec(spec.rule, spec.coefficients, 0.5)
    torch.testing.assert_close(sums, update_reference.lamb_moments(plain, expected), rtol=1e-5, atol=1e-9)
    ratios = torch.linspace(0.5, 2.0, len(SIZES))
    apply_update.cuda_lamb_apply(UpdateSpec(UpdateRule.LAMB_APPLY, spec.coefficients, 0.5), ours, ratios)
    update_reference.lamb_apply(UpdateSpec(UpdateRule.LAMB_APPLY, spec.coefficients, 0.5), expected, ratios)
    for a, b in zip(ours.params, expected.params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_prepared_update_is_one_launch(emulated: object) -> None:
    """Small tensors: addresses are collected once, the step afterwards compares them and launches."""
    values = [[make(n, seed=k).abs() for n in [64] * 40] for k in range(4)]
    tensors = UpdateTensors(values[0], values[1], (values[2], values[3]))
    again = UpdateTensors(
        *([t.clone() for t in v] for v in values[:2]), tuple([t.clone() for t in v] for v in values[2:])
    )
    prepared = apply_update.prepare_cuda(tensors)
    spec = UpdateSpec(UpdateRule.ADAM, adam_coefficients(HYPER, 1))
    emulated.launches()  # type: ignore[attr-defined]
    assert prepared.run(spec, tensors)
    (launch,) = emulated.launches()  # type: ignore[attr-defined]
    assert launch == ("ds_update_adam", 40, 256)
    apply_update.update(spec, again)
    assert all(torch.equal(a, b) for a, b in zip(tensors.params, again.params, strict=True))
    moved = UpdateTensors([t.clone() for t in tensors.params], tensors.grads, tensors.states)
    assert not prepared.run(spec, moved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 4097, 70_001])
def test_passes(emulated: object, dtype: torch.dtype, n: int) -> None:
    x = make(n + 1, dtype=dtype)[1:]
    assert float(cuda_stream.sum_squares(x)) == pytest.approx(float(x.double().square().sum()), rel=1e-12)
    for other in DTYPES:
        assert torch.equal(cuda_stream.convert(torch.empty(n, dtype=other), x, 0.5), (x.float() * 0.5).to(other))
    assert bool((cuda_stream.fill(x, 2.0) == 2.0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 4097, 70_001])
def test_one_element_that_differs_from_its_cast(emulated: object, dtype: torch.dtype, n: int) -> None:
    x = make(n + 1, dtype=dtype)[1:]
    for other in DTYPES:
        out = x.to(other)
        assert not cuda_stream.differs_from_cast(out, x)
        for at in {0, n // 2, n - 1} if n else ():
            changed = out.clone()
            changed[at] = torch.nextafter(changed[at], torch.tensor(torch.inf, dtype=other))
            emulated.launches()  # type: ignore[attr-defined]
            assert cuda_stream.differs_from_cast(changed, x)
            assert len(emulated.launches()) == 1  # type: ignore[attr-defined]  # one pass over both
            changed[at] = torch.nan
            assert cuda_stream.differs_from_cast(changed, x)


def test_zeros_equal_whatever_their_sign_and_nan_differs(emulated: object) -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, -1e-40, 6e-8, 65504.0, 65520.0, 3.4e38])
    for dtype in DTYPES:
        assert not cuda_stream.differs_from_cast(special.to(dtype), special)
        assert not cuda_stream.differs_from_cast(-special.to(dtype)[:2], special[:2])
        nan = torch.full((1,), torch.nan)
        assert cuda_stream.differs_from_cast(nan.to(dtype), nan)


# ---- norms --------------------------------------------------------------------------------------------------------------

COLS = [8, 768, 1000, 2048, 4096, 8192, 16384, 7, 1023]


def norm_case(cols: int, dtype: torch.dtype, centre: bool, extra: bool, rows: int = 5) -> None:
    """Check a norm and its gradients against autograd of the reference."""
    x, other, dy = (make(rows, cols, dtype=dtype, seed=s) for s in range(3))
    weight_dtype = dtype if cols % 3 else torch.float32
    weight, bias = make(cols, seed=3).to(weight_dtype), make(cols, seed=4).to(weight_dtype)
    n = cuda_norms.NormInput(x, other if extra else None, weight, bias if centre else None, 1e-5, centre)
    y, h, mean, rstd = cuda_norms.norm(n)
    total = (x + other if extra else x).float().requires_grad_()
    w, b = weight.float().requires_grad_(), bias.float().requires_grad_()
    want = norms_reference.layer_norm(total, w, b, 1e-5) if centre else norms_reference.rms_norm(total, w, 1e-5)
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert torch.equal(h.float(), total.detach())
    torch.testing.assert_close(y.float(), want, rtol=tolerance, atol=tolerance)
    back = cuda_norms.NormInput(h, None, weight, None, 1e-5, centre)
    dx, dweight, dbias = cuda_norms.norm_grad(back, dy, other if extra else None, (mean, rstd), (True, centre))
    grads = torch.autograd.grad(want, (total, w, b) if centre else (total, w), dy.float())
    expected = grads[0] + other.float() if extra else grads[0]
    torch.testing.assert_close(dx.float(), expected, rtol=tolerance, atol=4 * tolerance)
    torch.testing.assert_close(dweight, grads[1], rtol=1e-4, atol=1e-4)
    if centre:
        torch.testing.assert_close(dbias, grads[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", COLS)
def test_norms(emulated: object, cols: int, dtype: torch.dtype, centre: bool, extra: bool) -> None:
    norm_case(cols, dtype, centre, extra)


def test_many_rows_and_none(emulated: object) -> None:
    norm_case(64, torch.bfloat16, True, False, rows=700)
    norm_case(64, torch.bfloat16, False, True, rows=0)


def test_orders_of_blocks_and_warps(emulated: object) -> None:
    """A device promises none: results may not depend on it."""
    runs: list[Callable[[], None]] = [
        lambda: norm_case(1024, torch.bfloat16, True, True, rows=9),
        lambda: check_quantizers(QuantSpec(INT4, 256), make(4, 1024, dtype=torch.bfloat16), Draw()),
    ]
    for seed in (1, 2, 3):
        emulated.driver.fake_seed(seed * 0x9E3779B97F4A7C15 % 2**64)  # type: ignore[attr-defined]
        for run in runs:
            run()
