"""The pool of host memory: bounded, accounted to the byte, and never lent twice."""

from __future__ import annotations

import gc
import itertools
import mmap
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_accel import PinnedBuffer, PinnedMemoryError, PinnedPool
from ds_accel.pinned import PAGE_BYTES
from ds_monitor import MemorySink, attach, detach

KIB = 1024


def plain(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_buffers_start_on_a_page_and_have_the_size_that_was_asked() -> None:
    pool = PinnedPool(1 << 20, pinned=False)
    for nbytes in (1, 4095, 4096, 4097, 100_000):
        with pool.take(nbytes) as buffer:
            assert buffer.tensor.shape == (nbytes,)
            assert buffer.tensor.dtype == torch.uint8
            assert buffer.tensor.data_ptr() % PAGE_BYTES == 0
            assert pool.stats().in_use_bytes == -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to ask for")
def test_large_buffers_start_on_a_huge_page() -> None:
    with PinnedPool(8 << 20, pinned=False).take(5 << 20) as buffer:
        assert buffer.tensor.data_ptr() % (2 << 20) == 0
        assert not bool(buffer.tensor.any())
        buffer.tensor.fill_(1)
        assert int(buffer.tensor.sum()) == 5 << 20


def test_views_have_their_dtype_and_are_checked() -> None:
    with PinnedPool(1 << 20, pinned=False).take(1001) as buffer:
        assert buffer.view(torch.float32).shape == (250,)
        assert buffer.view(torch.bfloat16, 5).shape == (5,)
        buffer.view(torch.float32, 2).copy_(torch.tensor([1.0, 2.0]))
        assert buffer.view(torch.float32)[:2].tolist() == [1.0, 2.0]
        with pytest.raises(
            PinnedMemoryError, match=r"251 elements of torch.float32 need 1004 bytes, the buffer has 1001"
        ) as caught:
            buffer.view(torch.float32, 251)
        assert caught.value.code == "pinned-size"


def test_locked_blocks_are_powers_of_two_and_counted_so() -> None:
    pool = PinnedPool(32 * KIB, pinned=True, allocate=plain)
    assert [pool.block_bytes(n) for n in (1, 4096, 4097, 9000, 16384)] == [4096, 4096, 8192, 16384, 16384]
    buffer = pool.take(9000)
    assert pool.stats().in_use_bytes == 16384
    with pytest.raises(
        PinnedMemoryError, match=r"asked for 16385 bytes \(a block of 32768\), 16384 of 32768 are in use by 1 buffers"
    ):
        pool.take(16385)
    buffer.release()


def test_the_bound_is_never_passed_and_kept_blocks_make_room() -> None:
    pool = PinnedPool(40 * KIB, pinned=False)
    a, b = pool.take(16 * KIB), pool.take(16 * KIB)
    with pytest.raises(PinnedMemoryError) as caught:
        pool.take(12 * KIB)
    assert caught.value.code == "pinned-limit"
    a.release()
    assert pool.stats().cached == 16 * KIB
    with pool.take(20 * KIB):
        stats = pool.stats()
        assert (stats.in_use_bytes, stats.cached, stats.reserved) == (36 * KIB, 0, 36 * KIB), (
            "the kept block went back to the system"
        )
    b.release()
    assert pool.stats().peak == 36 * KIB
    assert pool.trim() == 36 * KIB
    assert pool.stats().reserved == 0
    with pytest.raises(ValueError, match="a pinned buffer of 0 bytes"):
        pool.take(0)


def test_a_block_is_reused_when_it_fits_well() -> None:
    made: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return plain(nbytes)

    pool = PinnedPool(1 << 20, pinned=False, allocate=allocate)
    pool.take(40 * KIB).release()
    pool.take(100 * KIB).release()
    pool.take(36 * KIB).release()
    assert made == [40 * KIB, 100 * KIB]
    pool.take(8 * KIB).release()
    assert made[2:] == [8 * KIB], "a far larger block is not wasted on a small request"


def test_a_block_waits_for_the_copy_that_uses_it() -> None:
    pool = PinnedPool(16 * KIB, pinned=False)
    event = Event()
    buffer = pool.take(16 * KIB)
    address = buffer.tensor.data_ptr()
    buffer.release(after=event)
    stats = pool.stats()
    assert (stats.num_in_use, stats.in_use_bytes, stats.waiting, stats.cached) == (0, 0, 16 * KIB, 0)
    with pytest.raises(PinnedMemoryError, match="16384 of them in copies that are not done"):
        pool.take(4 * KIB)
    assert pool.trim() == 0
    event.done = True
    again = pool.take(16 * KIB)
    assert again.tensor.data_ptr() == address
    again.release()


def test_a_released_buffer_cannot_be_used_or_released_again() -> None:
    pool = PinnedPool(1 << 20, pinned=False)
    buffer = pool.take(100)
    buffer.release()
    for use in (lambda: buffer.tensor, buffer.release, lambda: buffer.view(torch.uint8)):
        with pytest.raises(PinnedMemoryError, match="used after its release") as caught:
            use()
        assert caught.value.code == "pinned-released"
    with buffer:  # leaving is no second release
        pass
    assert pool.stats().num_in_use == 0


def test_a_dropped_buffer_leaves_the_account_and_is_not_lent_again() -> None:
    pool = PinnedPool(8 * KIB, pinned=False)
    view = pool.take(8 * KIB).tensor
    view.fill_(7)
    gc.collect()
    assert pool.stats().reserved == 0
    with pool.take(8 * KIB) as other:
        other.tensor.fill_(1)
        assert int(view.sum()) == 7 * 8 * KIB


def test_the_system_refuses() -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    pool = PinnedPool(1 << 20, pinned=True, allocate=refuse)
    with pytest.raises(PinnedMemoryError, match=r"gave no block of 4096 bytes \(CUDA error: out of memory\)") as caught:
        pool.take(1)
    assert caught.value.code == "pinned-alloc"
    assert pool.stats().reserved == 0


def test_the_account_is_told_to_the_monitor() -> None:
    sink = MemorySink()
    attach([sink])
    try:
        PinnedPool(1 << 20, pinned=False, name="offload").take(5000).release()
    finally:
        detach([sink])
    assert [record.value for record in sink.named("accel/offload/bytes")] == [8192, 0]


REQUESTS = st.lists(
    st.tuples(st.sampled_from(["take", "release", "later", "happen", "trim"]), st.integers(1, 40 * KIB)), max_size=40
)


@given(REQUESTS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_use_keeps_the_account_right_and_lends_no_byte_twice(requests: list[tuple[str, int]], pinned: bool) -> None:
    pool = PinnedPool(128 * KIB, pinned=pinned, allocate=plain if pinned else None)
    lent: list[PinnedBuffer] = []
    waiting: list[tuple[Event, int]] = []
    for verb, number in requests:
        if verb == "take":
            try:
                lent.append(pool.take(number))
            except PinnedMemoryError:
                used = pool.stats().in_use_bytes + pool.stats().waiting
                assert used + pool.block_bytes(number) > 128 * KIB
        elif verb in ("release", "later") and lent:
            buffer = lent.pop(number % len(lent))
            event = Event() if verb == "later" else None
            if event is not None:
                waiting.append((event, buffer.nbytes))
            buffer.release(after=event)
        elif verb == "happen" and waiting:
            waiting.pop()[0].done = True
        elif verb == "trim":
            pool.trim()
        stats = pool.stats()
        assert stats.reserved <= stats.limit
        assert stats.num_in_use == len(lent)
        assert stats.in_use_bytes >= sum(buffer.nbytes for buffer in lent)
        spans = sorted((b.tensor.data_ptr(), b.nbytes) for b in lent)
        assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(spans))


def test_many_threads_share_a_pool() -> None:
    pool = PinnedPool(64 * KIB, pinned=False)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            try:
                with pool.take(4 * KIB) as buffer:
                    buffer.tensor.fill_(number)
                    if int(buffer.tensor.min()) != number or int(buffer.tensor.max()) != number:
                        wrong.append(number)
            except PinnedMemoryError:
                wrong.append(-1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.stats().num_in_use == 0


@pytest.mark.parametrize("way", ["release", "drop"])
def test_a_buffer_goes_back_where_another_thread_is_in_the_pool_or_its_sink(way: str) -> None:
    """The collector frees graphs inside any line: of a thread that writes a record while another, in the pool, waits to report."""
    inside, go_on = threading.Event(), threading.Event()

    def allocate(nbytes: int) -> torch.Tensor:
        if inside_first:
            inside.set()
            assert go_on.wait(30)
        return plain(nbytes)

    inside_first: list[bool] = []
    pool = PinnedPool(64 * KIB, pinned=True, allocate=allocate)
    buffer = pool.take(4 * KIB)
    inside_first.append(True)
    other = threading.Thread(target=lambda: pool.take(8 * KIB).release())
    other.start()
    assert inside.wait(30)
    done = threading.Event()

    def give_back() -> None:
        nonlocal buffer
        if way == "release":
            buffer.release(in_finalizer=True)
        else:
            del buffer
        done.set()

    returning = threading.Thread(target=give_back)
    returning.start()
    waited = not done.wait(5)
    go_on.set()
    other.join()
    returning.join()
    assert not waited
    assert pool.stats().num_in_use == 0
