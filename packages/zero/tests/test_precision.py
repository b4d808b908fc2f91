"""Formats, and the loss scale's arithmetic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_config.errors import PlanError
from ds_zero.layout.dtypes_plan import LossScale, Precision, PrecisionRule, next_scale


def scales(rule, overflows):
    state, found = rule.start(), []
    for overflow in overflows:
        state = next_scale(rule, state, overflow)
        found.append(state.scale)
    return found


def test_halves_after_the_hysteresis_is_used_up():
    assert scales(LossScale(initial=16, hysteresis=2), [True, True, True]) == [16, 8, 4]


def test_doubles_after_a_window_of_clean_steps():
    assert scales(LossScale(initial=4, window=3), [False] * 8) == [4, 4, 4, 8, 8, 8, 16, 16]


def test_consecutive_refills_the_hysteresis_on_every_clean_step():
    pattern = [True, False, True, False, True]
    assert scales(LossScale(initial=16), pattern) == [16, 16, 8, 8, 4]
    assert scales(LossScale(initial=16, consecutive=True), pattern) == [16] * 5


def test_static_never_changes():
    assert scales(LossScale(static=128.0), [True, False] * 4) == [128.0] * 8


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_the_scale_stays_a_power_of_two_above_the_minimum(overflows, window, hysteresis, consecutive):
    rule = LossScale(initial=2.0**10, window=window, minimum=2.0, hysteresis=hysteresis, consecutive=consecutive)
    for scale in scales(rule, overflows):
        assert scale >= 2.0
        assert scale.hex().startswith("0x1.0000000000000p")


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        (None, torch.float32, [torch.float32] * 4),
        (None, torch.float64, [torch.float64] * 4),
        ("bf16", torch.float32, [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]),
        ("fp16", torch.float32, [torch.float16, torch.float16, torch.float32, torch.float32]),
        ("bf16", torch.int8, [torch.int8] * 4),
    ],
)
def test_recipes(name, dtype, expected):
    found = Precision.of(name).resolve(dtype)
    assert [found.param, found.reduce, found.accumulate, found.master] == expected


def test_an_unknown_recipe_is_named():
    with pytest.raises(PlanError, match="fp8"):
        Precision.of("fp8")


def test_the_states_format_is_the_rules_else_the_general_one():
    rule = PrecisionRule("head.*", state=torch.float32)
    found = Precision(param=torch.bfloat16, state=torch.bfloat16, rules=(rule,))
    assert found.resolve(torch.float32, "head.weight").state == torch.float32
    assert found.resolve(torch.float32, "body.weight").state == torch.bfloat16
    assert Precision.of("bf16").resolve(torch.float32).state is None


def test_gradients_are_summed_in_fp32_at_least_and_travel_in_the_format_asked_for_their_parameter():
    plain = Precision().resolve(torch.float32)
    assert (plain.accumulate, plain.same) == (torch.float32, True)
    half = Precision().resolve(torch.bfloat16)
    assert (half.accumulate, half.master, half.same) == (torch.float32, torch.float32, False)
    sums = Precision(accumulate=torch.bfloat16).resolve(torch.bfloat16)
    assert (sums.accumulate, sums.master) == (torch.bfloat16, torch.float32), "only sums are rounded"
    assert Precision().resolve(torch.float64).accumulate is torch.float64
    ruled = Precision(reduce=torch.float16, rules=(PrecisionRule("norm.*", param=torch.float32),))
    assert ruled.resolve(torch.bfloat16, "norm.weight").reduce is torch.float32
    assert ruled.resolve(torch.bfloat16, "linear.weight").reduce is torch.float16


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, "bfloat16"])
@pytest.mark.parametrize("role", ["param", "reduce", "accumulate", "master"])
@pytest.mark.parametrize("record", [Precision, lambda **keys: PrecisionRule("*", **keys)])
def test_formats_that_nothing_is_trained_in_are_refused(record, role, dtype):
    with pytest.raises(PlanError, match=f"{role} is") as caught:
        record(**{role: dtype})
    assert caught.value.code == "config-option"


@pytest.mark.parametrize("keys", [{"window": 0}, {"factor": 1.0}, {"initial": -1.0}, {"static": 0.0}, {"window": "3"}])
def test_scales_that_mean_nothing_are_refused(keys):
    with pytest.raises(PlanError, match="LossScale"):
        LossScale(**keys)
