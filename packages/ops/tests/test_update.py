"""Every rule against its reference, over shapes, dtypes and fusions; levels and threads do not change a bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_ops import UpdateRule, UpdateSpec, UpdateTensors, _native, foreach, lamb_apply, lamb_moments, reference, update
from ds_ops.update_rules import (
    AdamHyper,
    adagrad_coefficients,
    adam_coefficients,
    adam_undo_coefficients,
    dither_of,
    lamb_coefficients,
    lion_coefficients,
    sgd_coefficients,
    sgd_plain_coefficients,
)

pytestmark = pytest.mark.usefixtures("native")
HYPER = AdamHyper(1e-2, (0.9, 0.99), 1e-8, 0.1)
RULES: dict[UpdateRule, tuple[tuple[float, ...], int]] = {
    UpdateRule.ADAM: (adam_coefficients(HYPER, 3), 2),
    UpdateRule.ADAM_UNDO: (adam_undo_coefficients(HYPER, 3), 2),
    UpdateRule.LION: (lion_coefficients(1e-2, (0.9, 0.99), 0.1), 1),
    UpdateRule.ADAGRAD: (adagrad_coefficients(1e-2, 1e-10, 0.1), 1),
    UpdateRule.SGD: (sgd_coefficients(1e-2, 0.9, 0.1, 0.1), 1),
    UpdateRule.SGD_PLAIN: (sgd_plain_coefficients(1e-2, 0.1), 0),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One operation of each formula may round once more in torch (its square root is not correctly rounded).
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def clone(t: UpdateTensors) -> UpdateTensors:
    def copies(row: list[Tensor]) -> list[Tensor]:
        return [x.clone() for x in row]

    return UpdateTensors(
        copies(list(t.params)),
        copies(list(t.grads)),
        tuple(copies(list(s)) for s in t.states),
        copies(list(t.copies)),
    )


def problem(sizes: list[int], dtypes: tuple[torch.dtype, ...], num_states: int, offset: int = 0) -> UpdateTensors:
    generator = torch.Generator().manual_seed(sum(sizes) + 1)

    def make(n: int, dtype: torch.dtype, positive: bool = False) -> Tensor:
        x = torch.randn(n + offset, generator=generator).to(dtype)[offset:]
        return x.abs() if positive else x

    p, g, s, c = dtypes
    states = tuple([make(n, s, positive=i == num_states - 1) for n in sizes] for i in range(num_states))
    return UpdateTensors([make(n, p) for n in sizes], [make(n, g) for n in sizes], states, [make(n, c) for n in sizes])


def close(a: UpdateTensors, b: UpdateTensors) -> None:
    for x, y in zip((a.params, a.grads, *a.states, a.copies), (b.params, b.grads, *b.states, b.copies), strict=True):
        for u, v in zip(x, y, strict=True):
            tolerance = TOLERANCE[u.dtype]
            torch.testing.assert_close(u, v, rtol=tolerance, atol=tolerance)


sizes = st.lists(st.one_of(st.integers(0, 70), st.sampled_from([2047, 2048, 2049, 5000])), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from(list(RULES)), st.tuples(*[st.sampled_from(DTYPES)] * 4), st.integers(0, 3), st.booleans())
def test_native_equals_reference(
    lengths: list[int], rule: UpdateRule, dtypes: tuple[torch.dtype, ...], offset: int, zero: bool
) -> None:
    coefficients, num_states = RULES[rule]
    spec = UpdateSpec(rule, coefficients, 0.5, zero)
    ours = problem(lengths, dtypes, num_states, offset)
    theirs = clone(ours)
    update(spec, ours)
    reference.update.update(spec, theirs)
    close(ours, theirs)
    if zero:
        assert all(bool((g == 0).all()) for g in ours.grads)


DITHERED = {UpdateRule.ADAM: 1, UpdateRule.ADAGRAD: 0, UpdateRule.LAMB_MOMENTS: 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", list(DITHERED))
@pytest.mark.parametrize("by", ["native", "torch"])
def test_dithered_states_equal_the_reference(by: str, rule: UpdateRule, dtype: torch.dtype) -> None:
    """To the bit of what is stored, from numbers below the smallest to infinite ones; other states are rounded to nearest."""
    coefficients = lamb_coefficients(HYPER, 2) if rule is UpdateRule.LAMB_MOMENTS else RULES[rule][0]
    moments = {"native": lamb_moments, "torch": foreach.lamb_moments}[by]
    run = moments if rule is UpdateRule.LAMB_MOMENTS else {"native": update, "torch": foreach.update}[by]
    expect = reference.update.lamb_moments if rule is UpdateRule.LAMB_MOMENTS else reference.update.update
    for dither in (-0.5, -0.3, 0.0, 0.2, 0.49):
        spec = UpdateSpec(rule, coefficients, 1.0, False, dither)
        ours = problem([777], (dtype, dtype, dtype, torch.float32), DITHERED[rule] + 1)
        ours = replace(ours, copies=())
        second = ours.states[DITHERED[rule]][0]
        second.copy_(torch.logspace(-9, 4, 777))
        second[:3] = torch.tensor([0.0, float("inf"), float("nan")])
        theirs, plain = clone(ours), clone(ours)
        run(spec, ours)
        expect(spec, theirs)
        expect(replace(spec, dither=0.0), plain)
        for a, b, c in zip(ours.states, theirs.states, plain.states, strict=True):
            torch.testing.assert_close(a[0], b[0], rtol=2.0**-10 if by == "torch" else 0.0, atol=0.0, equal_nan=True)
            if a is not ours.states[DITHERED[rule]]:
                torch.testing.assert_close(b[0], c[0], rtol=0.0, atol=0.0, equal_nan=True)
        assert torch.equal(ours.states[DITHERED[rule]][0][3:], plain.states[DITHERED[rule]][0][3:]) == (dither == 0.0)
        assert not bool(torch.isinf(ours.states[DITHERED[rule]][0][3:]).any())


def test_dithers_fill_the_interval() -> None:
    for start in (1, 10**6, 2**31):
        found = torch.tensor([dither_of(step) for step in range(start, start + 1000)], dtype=torch.float64)
        assert -0.5 <= float(found.min()) < -0.49
        assert 0.49 < float(found.max()) < 0.5
        edges = torch.linspace(-0.5, 0.5, 1001, dtype=torch.float64)
        counts = torch.searchsorted(found.sort().values, edges) - torch.arange(1001)
        assert int(counts.abs().max()) <= 5  # discrepancy: a random thousand has about 40


@settings(max_examples=20, deadline=None)
@given(sizes, st.sampled_from(DTYPES), st.integers(1, 3))
def test_lamb_equals_reference(lengths: list[int], dtype: torch.dtype, threads: int) -> None:
    spec = UpdateSpec(UpdateRule.LAMB_MOMENTS, lamb_coefficients(HYPER, 2), 0.5)
    ours = problem(lengths, (dtype, dtype, torch.float32, torch.bfloat16), 2)
    theirs = clone(ours)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        sums = lamb_moments(replace(spec), replace(ours, copies=()))
    finally:
        torch.set_num_threads(before)
    expected = reference.update.lamb_moments(spec, replace(theirs, copies=()))
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-9)
    ratios = torch.linspace(0.5, 2.0, len(lengths))
    apply = replace(spec, rule=UpdateRule.LAMB_APPLY)
    lamb_apply(apply, ours, ratios)
    reference.update.lamb_apply(apply, theirs, ratios)
    close(ours, theirs)


def test_undo_takes_a_step_back() -> None:
    step = problem([5000], (torch.float32, torch.float32, torch.float32, torch.bfloat16), 2)
    before = clone(step)
    update(UpdateSpec(UpdateRule.ADAM, adam_coefficients(HYPER, 3)), step)
    assert not torch.equal(step.params[0], before.params[0])
    update(UpdateSpec(UpdateRule.ADAM_UNDO, adam_undo_coefficients(HYPER, 3)), step)
    torch.testing.assert_close(step.params[0], before.params[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(step.states[0][0], before.states[0][0], rtol=1e-5, atol=1e-6)


def test_undo_of_an_overflowed_step_is_finite() -> None:
    step = problem([40], (torch.float32,) * 4, 2)
    step.grads[0][3] = float("inf")
    update(UpdateSpec(UpdateRule.ADAM, adam_coefficients(HYPER, 3)), step)
    update(UpdateSpec(UpdateRule.ADAM_UNDO, adam_undo_coefficients(HYPER, 3)), step)
    for t in (step.params[0], step.states[0][0], step.states[1][0]):
        assert bool(torch.isfinite(t).all())


def test_huge_second_moment_stops_the_step_instead_of_poisoning_it() -> None:
    step = problem([33], (torch.float32,) * 4, 2)
    step.grads[0].fill_(1e25)
    before = clone(step)
    update(UpdateSpec(UpdateRule.ADAM, adam_coefficients(replace(HYPER, weight_decay=0.0), 3)), step)
    reference.update.update(UpdateSpec(UpdateRule.ADAM, adam_coefficients(replace(HYPER, weight_decay=0.0), 3)), before)
    assert torch.equal(step.params[0], before.params[0])


def test_copy_is_the_cast_of_the_stored_parameter(ulps: Callable[[Tensor, Tensor], int]) -> None:
    for dtype in DTYPES:
        step = problem([10_007], (torch.float32, torch.bfloat16, torch.float32, dtype), 2, offset=1)
        update(UpdateSpec(UpdateRule.ADAM, adam_coefficients(HYPER, 3)), step)
        assert ulps(step.copies[0], step.params[0].to(dtype)) == 0


PROGRAM = """
import hashlib, sys, torch
from ds_ops import UpdateRule, UpdateSpec, UpdateTensors, sum_squares, update, convert
from ds_ops.update_rules import AdamHyper, adam_coefficients
g = torch.Generator().manual_seed(3)
h = hashlib.sha256()
torch.set_num_threads(int(sys.argv[1]))
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    t = [torch.randn(70_001, generator=g).to(dtype) for _ in range(2)] + [torch.rand(70_001, generator=g) for _ in range(2)]
    copy = torch.empty(70_001, dtype=torch.float16)
    for step in range(1, 4):
        spec = UpdateSpec(UpdateRule.ADAM, adam_coefficients(AdamHyper(1e-2, (0.9, 0.99), 1e-8, 0.1), step))
        update(spec, UpdateTensors([t[0]], [t[1]], ([t[2]], [t[3]]), [copy]))
    for x in (*t, copy):
        h.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    h.update(str(sum_squares(t[0])).encode())
print(h.hexdigest())
"""


@pytest.mark.slow
def test_the_lowest_level_gives_the_same_bits() -> None:
    """Another process with the lowest level and another thread count; the C++ tests compare all levels."""
    module = _native.load("_cpu").module
    assert module is not None
    lowest = module.isa_supported().split(",")[-1]
    programs = [(lowest, "2"), ("", "1")]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, threads],
            env=os.environ | {"DS_CPU_ISA": level, "DS_OPS": ""},
            stdout=subprocess.PIPE,
            text=True,
        )
        for level, threads in programs
    ]
    digests = [run.communicate(timeout=200)[0].strip() for run in runs]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 64
