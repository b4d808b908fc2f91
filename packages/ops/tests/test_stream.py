"""Norms, conversions, copies, fill: against torch, over shapes and dtypes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_config.errors import KernelError
from ds_ops import convert, fill, grad_norm, sum_squares
from ds_ops.stream import _narrow_sum_squares, copy_ranges, norms_of, norms_of_ranges, total_squares

pytestmark = pytest.mark.usefixtures("native")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
lengths = st.one_of(st.integers(0, 100), st.sampled_from([2048, 16384, 16385, 100_003]))


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from(DTYPES), st.integers(0, 3))
def test_sum_squares(n: int, dtype: torch.dtype, offset: int) -> None:
    x = torch.randn(n + offset).to(dtype)[offset:]
    assert sum_squares(x) == pytest.approx(float(x.double().square().sum()), rel=1e-12)


def test_sum_squares_does_not_overflow_and_shows_what_is_not_finite() -> None:
    assert sum_squares(torch.full((4,), 1e30)) == pytest.approx(4e60, rel=1e-6)
    assert math.isinf(sum_squares(torch.tensor([1.0, math.inf])))
    assert math.isnan(sum_squares(torch.tensor([1.0, math.nan, 2.0])))


def test_sum_squares_is_the_same_on_any_number_of_threads() -> None:
    x = torch.randn(1_000_003)
    before = torch.get_num_threads()
    results = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.add(sum_squares(x))
    torch.set_num_threads(before)
    assert len(results) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=4), st.sampled_from(DTYPES), st.integers(0, 3))
def test_norms_of_tensors_in_one_pass(numels: list[int], dtype: torch.dtype, offset: int) -> None:
    tensors = [torch.randn(n + offset).to(dtype)[offset:] for n in numels]
    for (square, peak), x in zip(norms_of(tensors).tolist(), tensors, strict=True):
        assert square == sum_squares(x)
        assert peak == max(x.double().abs().tolist(), default=0.0)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(lengths, min_size=1, max_size=3), st.sampled_from([*DTYPES, torch.float64, torch.complex64]))
def test_norms_of_ranges_are_those_of_their_views(data: st.DataObject, numels: list[int], dtype: torch.dtype) -> None:
    sources = []
    for n in numels:
        cuts = sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=5)))
        sources.append((torch.randn(n, dtype=dtype), list(itertools.pairwise(cuts))))
    views = [x[start:stop] for x, ranges in sources for start, stop in ranges]
    assert torch.equal(norms_of_ranges(sources), norms_of(views))


@pytest.mark.parametrize("ranges", [[(0, 5)], [(-1, 2)], [(3, 2)]])
def test_norms_of_ranges_reach_no_further_than_their_tensor(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(KernelError, match="norms_of_ranges: elements"):
        norms_of_ranges([(torch.ones(4), ranges)])
    with pytest.raises(KernelError, match="no tensors"):
        norms_of_ranges([(torch.ones(4), [])])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_norms_show_what_is_not_finite_and_take_complex_numbers_as_pairs(dtype: torch.dtype, backend: str) -> None:
    values = [[-2.0, 1.0], [1.0, -math.inf, 3.0], [0.0] * 40 + [math.nan] + [math.inf] * 40, []]
    found = norms_of([torch.tensor(v, dtype=dtype) for v in values]).tolist()
    assert found[0] == pytest.approx([5.0, 2.0], rel=1e-14)
    assert (found[1], found[3]) == ([math.inf, math.inf], [0.0, 0.0])
    assert all(map(math.isnan, found[2]))
    assert norms_of([torch.tensor([3 - 4j])]).tolist() == [pytest.approx([25.0, 4.0])]
    with pytest.raises(KernelError, match="no tensors"):
        norms_of([])


def test_grad_norm_of_a_list(backend: str) -> None:
    tensors = [torch.full((3,), 2.0), torch.full((4,), 1.0).bfloat16(), torch.zeros(0)]
    assert grad_norm(tensors) == 4.0
    assert grad_norm([]) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sums_are_exact(dtype: torch.dtype, backend: str) -> None:
    x = torch.full((30_000_000,), 1e-3, dtype=dtype)
    assert float(total_squares([x])) == pytest.approx(x.numel() * float(x[0]) ** 2, rel=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 5, 4096, 10_000_003])
def test_a_device_without_fp64_sums_short_rows(dtype: torch.dtype, n: int) -> None:
    x = torch.randn(n).to(dtype)
    assert float(_narrow_sum_squares(x)) == pytest.approx(float(x.double().square().sum()), rel=4e-6)


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.sampled_from([1.0, 0.3]), st.integers(0, 3))
def test_convert(n: int, source: torch.dtype, target: torch.dtype, scale: float, offset: int) -> None:
    x = torch.randn(n + offset).to(source)[offset:]
    out = torch.empty(n + 1, dtype=target)[1:]
    expected = (x.float() * torch.tensor(scale)).to(target)
    assert torch.equal(convert(out, x, scale=scale), expected)


def test_convert_streams_large_results() -> None:
    x = torch.randn(6_000_011)
    assert torch.equal(convert(torch.empty_like(x, dtype=torch.bfloat16)[1:], x[1:]), x[1:].bfloat16())
    assert torch.equal(convert(torch.empty_like(x)[1:], x[1:], scale=2.0), x[1:] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_value_and_special_floats(dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 6e-8, 65504.0, 65520.0, 3.4e38])
    out = convert(torch.empty(11, dtype=dtype), special)
    assert torch.equal(out.nan_to_num(123.0), special.to(dtype).nan_to_num(123.0))
    assert torch.equal(torch.signbit(out[:4]), torch.signbit(special[:4]))
    if dtype != torch.float32:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        assert torch.equal(convert(torch.empty(2**16), every).nan_to_num(0.5), every.float().nan_to_num(0.5))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_fill(dtype: torch.dtype) -> None:
    for n in (0, 1, 17, 40_000):
        assert torch.equal(fill(torch.empty(n, dtype=dtype), 0.3), torch.full((n,), 0.3, dtype=dtype))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([*DTYPES, torch.float64, torch.int64]), st.integers(1, 3))
def test_ranges_come_where_they_belong_and_nothing_else_changes(
    data: st.DataObject, dtype: torch.dtype, threads: int
) -> None:
    sources = [torch.arange(300_000).to(dtype), torch.arange(100).to(dtype).view(10, 10)]
    out, at, moves = torch.zeros(501_000, dtype=dtype), 0, []
    for _ in range(data.draw(st.integers(0, 5))):
        x = data.draw(st.sampled_from(sources))
        n = data.draw(st.sampled_from([0, 1, 63, x.numel() // 3]))
        start = data.draw(st.integers(0, x.numel() - n))
        at += data.draw(st.integers(0, 70))
        moves.append((x, [(start, at, n)]))
        at += n
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    # Ranges of one source in one entry or in several.
    joint = [(x, [move for y, ranges in moves for move in ranges if y is x]) for x in sources]
    assert copy_ranges(out, data.draw(st.sampled_from([moves, joint]))) is out
    torch.set_num_threads(before)
    expected = torch.zeros_like(out)
    for x, [(start, at, n)] in moves:
        expected[at : at + n] = x.view(-1)[start : start + n]
    assert torch.equal(out, expected)


def test_a_range_that_does_not_fit_is_refused_and_nothing_is_written() -> None:
    shared, x = torch.zeros(20), torch.ones(10)
    out = shared[:10]
    wrong = [
        (x, [(5, 0, 6)]),
        (x, [(0, 5, 6)]),
        (x, [(0, -1, 2)]),
        (x, [(0, 3, 1), (-1, 0, 2)]),
        (x.double(), [(0, 0, 1)]),
        (x.view(5, 2).t(), [(0, 0, 1)]),
        (out, [(0, 0, 1)]),
        (shared[5:15], [(0, 0, 1)]),
    ]
    for bad in wrong:
        with pytest.raises(KernelError):
            copy_ranges(out, [(x, [(0, 0, 1)]), bad])
        assert not out.any()
