"""The sum of several tensors with its norms: against torch, over shapes, dtypes, numbers of sources and threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_config.errors import KernelError
from ds_ops.reduce import sum_ranges, sum_sources
from ds_ops.stream import sum_squares

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def peak_of(x: torch.Tensor) -> float:
    return max(x.double().abs().tolist(), default=0.0)


lengths = st.one_of(st.integers(0, 100), st.sampled_from([511, 512, 16384, 16385, 100_003]))


@settings(max_examples=80, deadline=None)
@given(lengths, st.sampled_from(DTYPES), st.integers(1, 4), st.integers(0, 3))
def test_it_is_the_sum_in_order_to_the_bit(n: int, dtype: torch.dtype, count: int, offset: int) -> None:
    sources = [torch.randn(n + offset).to(dtype)[offset:] for _ in range(count)]
    out = torch.empty(n, dtype=dtype)
    norms = sum_sources(out, sources)
    total = sources[0].float()
    for source in sources[1:]:
        total = total + source.float()
    assert torch.equal(out, total.to(dtype))
    assert norms.tolist() == pytest.approx([float(out.double().square().sum()), peak_of(out)], rel=1e-12)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_out_may_be_one_of_the_sources(backend: str, place: int) -> None:
    sources = [torch.randn(70_001) for _ in range(3)]
    expected = sources[0] + sources[1] + sources[2]
    sum_sources(sources[place], sources)
    assert torch.equal(sources[place], expected)


def test_squares_are_those_of_sum_squares_within_one_block(native: None) -> None:
    out = torch.empty(16_000)
    assert sum_sources(out, [torch.randn(16_000), torch.randn(16_000)])[0] == sum_squares(out)


def test_it_is_the_same_on_any_number_of_threads(native: None) -> None:
    sources, before = [torch.randn(1_000_003) for _ in range(2)], torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = torch.empty(1_000_003)
        results.append((sum_sources(out, sources).tolist(), out))
    torch.set_num_threads(before)
    assert all(r[0] == results[0][0] and torch.equal(r[1], results[0][1]) for r in results)


def test_wide_floats_go_through_torch() -> None:
    a, b = torch.randn(2, 1000, dtype=torch.float64).unbind()
    out = torch.empty_like(a)
    expected = [float((a + b).square().sum()), peak_of(a + b)]
    assert sum_sources(out, [a, b]).tolist() == pytest.approx(expected, rel=1e-14)
    assert torch.equal(out, a + b)


def test_what_does_not_fit_is_refused(backend: str) -> None:
    x = torch.zeros(10)
    for sources in ([], [x, x[:5]], [x.bfloat16()]):
        with pytest.raises(KernelError):
            sum_sources(torch.empty(10), sources)
    with pytest.raises(KernelError, match="share memory"):
        sum_sources(x[:8], [x[2:]])


def test_autograd_knows_that_out_was_written() -> None:
    out = torch.zeros(4)
    before = out._version
    sum_sources(out, [torch.ones(4)])
    assert out._version > before


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([*DTYPES, torch.float64]), st.integers(1, 3), st.integers(1, 4))
def test_ranges_are_summed_from_where_they_start_or_from_what_stands_for_them(data, dtype, world, count) -> None:
    own = data.draw(st.integers(0, world - 1))
    rows = [torch.randn(60_000).to(dtype) for _ in range(world)]
    numels = [data.draw(st.sampled_from([0, 1, 17, 511, 20_000])) for _ in range(count)]
    starts = [[data.draw(st.integers(0, 60_000 - n)) for _ in range(world)] for n in numels]
    instead = [torch.randn(n).to(dtype) if data.draw(st.booleans()) else None for n in numels]
    expected = []
    for n, places, other in zip(numels, starts, instead, strict=True):
        terms = [row[place : place + n] for row, place in zip(rows, places, strict=True)]
        if other is not None:
            terms[own] = other
        expected.append(
            sum((t.to(torch.promote_types(dtype, torch.float32)) for t in terms[1:]), terms[0].clone()).to(dtype)
        )
        if dtype.itemsize == 2:
            expected[-1] = sum((t.float() for t in terms[1:]), terms[0].float()).to(dtype)
    outs = [
        torch.empty(n, dtype=dtype) if o is None or data.draw(st.booleans()) else o
        for n, o in zip(numels, instead, strict=True)
    ]
    norms = sum_ranges(outs, rows, starts, own_row=own, instead=instead)
    assert all(torch.equal(out, want) for out, want in zip(outs, expected, strict=True))
    assert norms.shape == (count, 2)
    for (square, peak), want in zip(norms.tolist(), expected, strict=True):
        assert square == pytest.approx(float(want.double().square().sum()), rel=1e-12)
        assert peak == peak_of(want)


def test_a_range_outside_of_its_row_or_over_another_out_is_refused(backend: str) -> None:
    row, out = torch.zeros(100), torch.zeros(10)
    for start in (-1, 91):
        with pytest.raises(KernelError, match="reaches beyond"):
            sum_ranges([out], [row], [[start]])
    for instead in (torch.zeros(9), torch.zeros(10, dtype=torch.float64), torch.zeros(20)[::2]):
        with pytest.raises(KernelError, match="instead"):
            sum_ranges([out], [row], [[0]], instead=[instead])
    with pytest.raises(KernelError, match="share memory"):
        sum_ranges([row[:10]], [row], [[5]])
    with pytest.raises(KernelError):
        sum_ranges([], [row], [])
    with pytest.raises(ValueError):
        sum_ranges([out], [row], [[0, 0]])
