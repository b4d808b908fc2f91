"""Quantisers, masks and schedules against the same formulas written with Python numbers."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.compression_schedules import Bits, dense_share, fall, mixed_ratio, new_mask_at
from ds_compress.masks import (
    block_scores,
    expand_blocks,
    head_scores,
    learnt_mask,
    num_kept,
    row_scores,
    snip_update,
    top_mask,
)
from ds_compress.quantizers import QuantGrid, grid_of, quantize, straight_through
from ds_config.errors import PlanError


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def round_half_even(value: float) -> int:
    return round(value)  # Python's rounds as IEEE does


def by_hand(row: list[float], bits: int, symmetry: str, noise: list[float] | None = None) -> list[float]:
    """One group, in Python."""
    noise = noise or [0.0] * len(row)
    if bits == 1:
        mean = fmean(abs(v) for v in row)
        return [math.copysign(mean, v) if v else 0.0 for v in row]
    if bits == 2:
        threshold = 0.7 * fmean(abs(v) for v in row)
        large = [abs(v) for v in row if abs(v) > threshold]
        return [math.copysign(fmean(large), v) if abs(v) > threshold else 0.0 for v in row]
    if symmetry == "symmetric":
        scale = 2 * max(abs(v) for v in row) / 2**bits
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        return [min(max(round_half_even(v / scale + n), low), high) * scale for v, n in zip(row, noise, strict=True)]
    scale = (max(row) - min(row)) / 2**bits
    zero = round_half_even(min(row) / scale) * scale
    return [
        min(max(round_half_even((v - zero) / scale + n), 0), 2**bits - 1) * scale + zero
        for v, n in zip(row, noise, strict=True)
    ]


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("symmetry", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_quantisers_equal_their_formulas(bits: int, symmetry: str, groups: int) -> None:
    if bits <= 2 and symmetry == "asymmetric":
        with pytest.raises(PlanError, match="symmetric only"):
            grid_of(24, QuantGrid(bits, groups, symmetry), "w")
        return
    x = drawn(6, 4, seed=bits)
    wanted = [by_hand(row, bits, symmetry) for row in x.reshape(groups, -1).tolist()]
    found = quantize(x, QuantGrid(bits, groups, symmetry))
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=x.dtype).view(6, 4), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("symmetry", ["symmetric", "asymmetric"])
def test_stochastic_rounding_adds_the_noise_and_has_the_right_mean(symmetry: str) -> None:
    x = drawn(4, 8)
    noise = torch.rand(4, 8, generator=torch.Generator().manual_seed(1), dtype=x.dtype) - 0.5
    rows = zip(x.reshape(2, -1).tolist(), noise.reshape(2, -1).tolist(), strict=True)
    wanted = torch.tensor([by_hand(row, 4, symmetry, more) for row, more in rows], dtype=x.dtype).view(4, 8)
    torch.testing.assert_close(quantize(x, QuantGrid(4, 2, symmetry), noise), wanted, atol=1e-12, rtol=1e-12)
    inner = torch.linspace(-0.4, 0.4, 9, dtype=torch.float64).repeat(20_000, 1)
    inner[:, -1] = 1.0  # fixes the range; the clamp does not touch the others
    many = torch.rand(inner.shape, generator=torch.Generator().manual_seed(2), dtype=inner.dtype) - 0.5
    mean = quantize(inner, QuantGrid(4, 1, "symmetric"), many).mean(0)
    torch.testing.assert_close(mean[:-1], inner[0, :-1], atol=3e-3, rtol=0)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_constant_group_is_no_division_by_zero(bits: int, value: float) -> None:
    x = torch.full((2, 4), value)
    assert torch.isfinite(quantize(x, QuantGrid(bits, 2))).all()
    if not value:
        assert (quantize(x, QuantGrid(bits, 2)) == 0).all()
    if bits > 2:
        assert (quantize(x, QuantGrid(bits, 2, "asymmetric")) == x).all()


def test_gradients_go_straight_through() -> None:
    x = drawn(3, 4).requires_grad_()
    weights = drawn(3, 4, seed=9)
    (straight_through(x, quantize(x, QuantGrid(3))) * weights).sum().backward()
    assert torch.equal(x.grad, weights)


def test_groups_must_divide_and_half_precision_stays_half() -> None:
    with pytest.raises(PlanError, match="quantize_groups is 5"):
        grid_of(24, QuantGrid(8, 5), "layer.weight")
    x = drawn(4, 4, dtype=torch.float32).bfloat16()
    found = quantize(x, QuantGrid(8, 2))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, quantize(x.float(), QuantGrid(8, 2)).bfloat16(), atol=0, rtol=0)
    assert quantize(x, QuantGrid(16)) is x


@given(st.integers(1, 200), st.floats(0.01, 1.0))
@settings(deadline=None)
def test_a_mask_keeps_as_many_as_it_says(numel: int, ratio: float) -> None:
    scores = drawn(numel, seed=numel).round(decimals=1)  # with equal ones
    mask = top_mask(scores, ratio)
    assert int(mask.sum()) == num_kept(numel, ratio)
    assert abs(num_kept(numel, ratio) - ratio * numel) < 1 + 1e-6
    if 0 < int(mask.sum()) < numel:
        assert scores[mask].min() >= scores[~mask].max()


def test_kept_is_the_ceiling_and_no_more() -> None:
    assert [num_kept(10, r) for r in (0.1, 0.3, 0.31, 1.0, 0.01)] == [1, 3, 4, 10, 1]


def test_learnt_scores_have_the_gradient_of_their_mask() -> None:
    scores, weight = drawn(5, 1).requires_grad_(), drawn(5, 3, seed=1)
    (learnt_mask(scores, 0.4) * weight).sum().backward()
    torch.testing.assert_close(scores.grad, weight.sum(1, keepdim=True))


def test_scores_sum_what_is_dropped_together() -> None:
    weight = drawn(4, 6)
    rows = weight.tolist()
    assert row_scores(weight).tolist() == pytest.approx([sum(abs(v) for v in row) for row in rows])
    heads = [sum(abs(row[c]) for row in rows for c in range(2 * h, 2 * h + 2)) for h in range(3)]
    assert head_scores(weight, 3).tolist() == pytest.approx(heads)
    blocks = block_scores(weight[:3, :5], (2, 2))
    assert float(blocks[1, 2]) == pytest.approx(rows[2][4])
    assert float(blocks[0, 0]) == pytest.approx(rows[0][0] + rows[0][1] + rows[1][0] + rows[1][1])
    mask = expand_blocks(torch.tensor([[True, False, True], [False, True, True]]), (2, 2), (3, 5))
    assert mask.int().tolist() == [[1, 1, 0, 0, 1], [1, 1, 0, 0, 1], [0, 0, 1, 1, 1]]


def test_sensitivity_is_normed_and_what_is_not_finite_is_left_out() -> None:
    old = torch.tensor([1.0, 2.0])
    assert snip_update(old, torch.tensor([-3.0, 1.0])).tolist() == pytest.approx([0.9 + 0.75, 1.8 + 0.25])
    for bad in (torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, 1.0]), torch.zeros(2)):
        assert snip_update(old, bad).tolist() == pytest.approx([0.9, 1.8])


def test_bits_fall_when_their_period_is_over_and_periods_double() -> None:
    told = [fall(Bits(8, 3), count, 5).bits for count in range(14)]
    assert told == [8, 8, 8, 7, 7, 7, 6, 6, 6, 6, 6, 6, 5, 5]  # after 3, 6 and 12 steps
    slow = fall(Bits(8, 3), 3, 5, factor=4)
    assert slow == Bits(7, 24, 3)
    assert fall(slow, 23, 5).bits == 7
    assert fall(slow, 24, 5).bits == 6


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 7), st.integers(1, 9))
def test_bits_do_not_depend_on_how_often_one_looks(first: int, more: int, target: int, period: int) -> None:
    start = Bits(8, period)
    assert fall(fall(start, first, target), first + more, target) == fall(start, first + more, target)


def test_the_whole_weight_fades_out_after_each_fall() -> None:
    now = fall(Bits(8, 3), 7, 2)
    assert now == Bits(6, 12, 6)
    assert [mixed_ratio(now, c, 0.4) for c in (6, 7, 8, 9)] == pytest.approx([1.0, 0.6, 0.2, 0.0])


def test_iterative_pruning_goes_from_all_to_its_target() -> None:
    assert [dense_share(s, 10, 20, 0.25) for s in (0, 9, 10, 15, 20, 99)] == pytest.approx([1, 1, 1, 0.5, 0.25, 0.25])
    assert dense_share(10, 10, 10, 0.25) == 0.25
    assert [s for s in range(30) if new_mask_at(s, 10, 20, 4)] == [10, 14, 18, 20]
