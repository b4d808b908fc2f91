"""Huge-page memory: ordinary tensors in every respect but their pages."""

from __future__ import annotations

import ctypes
import pickle
from pathlib import Path

import pytest
import torch

from ds_ops.host_arena import HUGE_PAGE_BYTES, make_huge, trim, zeros_huge


def test_views_are_zero_disjoint_and_writable() -> None:
    sizes = [3_000_000, 0, 7, 1_000_001]
    tensors = zeros_huge(sizes, torch.bfloat16, stream=2)
    assert [t.numel() for t in tensors] == sizes
    assert not any(bool(t.any()) for t in tensors)
    for i, t in enumerate(tensors):
        t.fill_(i + 1)
    for i, t in enumerate(tensors):
        assert bool((t == i + 1).all())


def test_streams_start_at_different_offsets_into_their_pages() -> None:
    starts = [zeros_huge([HUGE_PAGE_BYTES], torch.float32, stream=s)[0].data_ptr() % 4096 for s in range(4)]
    assert len(set(starts)) == 4


def test_small_arenas_are_ordinary_memory() -> None:
    (t,) = zeros_huge([10], torch.float32)
    assert t.untyped_storage().nbytes() == 40


def test_memory_outlives_its_maker_and_pickles() -> None:
    def make() -> torch.Tensor:
        return zeros_huge([2_000_000], torch.float32)[0].fill_(2.0)

    t = make()
    assert float(t.sum()) == 4_000_000.0
    assert torch.equal(pickle.loads(pickle.dumps(t)), t)
    assert torch.equal(t.clone(), t)


def test_make_huge_changes_no_value_and_no_address() -> None:
    t = torch.randn(4_000_000)
    kept, address = t.clone(), t.data_ptr()
    make_huge(t)
    assert t.data_ptr() == address
    assert torch.equal(t, kept)
    assert not make_huge(torch.randn(10))
    assert not make_huge(torch.empty(4_000_000, 2)[:, 0])
    assert not make_huge(torch.empty(4_000_000, device="meta"))


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_freed_memory_goes_back_to_the_system() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("not glibc")
    trim()
    kept = [bytearray(100_000) for _ in range(600)]  # below the size that is mapped by itself
    last = kept.pop()
    kept.clear()
    before = resident_pages()
    assert trim()
    assert resident_pages() <= before
    assert len(last) == 100_000
