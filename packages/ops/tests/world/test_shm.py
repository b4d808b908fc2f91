"""Shared-memory collectives equal their definition, to the bit, at every size around a slot; and no rank waits for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_config.errors import CommError, KernelError
from ds_ops import segment as segments
from ds_ops.shm_collectives import (
    Channel,
    ChannelSettings,
    HostCounters,
    SharedSegment,
    ShmCollective,
    ShmReduceOp,
    combine,
)
from ds_testing import world

SMALL = ChannelSettings(slot_bytes=4096, mailbox_bytes=4096, spin_us=20, timeout_s=200.0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]
SIZES = [0, 1, 7, 64, 1023, 5000]


@contextmanager
def channel(settings: ChannelSettings = SMALL) -> Iterator[Channel]:
    n, rank = dist.get_world_size(), dist.get_rank()
    nbytes = settings.segment_bytes(n)
    segment = SharedSegment(nbytes) if rank == 0 else None
    told: list[object] = [segment.token if segment else None]
    dist.broadcast_object_list(told)
    segment = segment or SharedSegment.attach(str(told[0]), nbytes)
    pids: list[object] = [None] * n
    dist.all_gather_object(pids, os.getpid())
    end = Channel(segment, rank, [int(str(p)) for p in pids], settings)
    dist.barrier()
    segment.close()
    try:
        yield end
    finally:
        end.close()


def part(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What rank `rank` contributes: the same on every rank that asks."""
    g = torch.Generator().manual_seed(1000 * rank + numel + salt)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=g).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 5, (numel,), generator=g).to(dtype)


def total(parts: list[torch.Tensor], op: ShmReduceOp = ShmReduceOp.SUM) -> torch.Tensor:
    """The definition: in rank order, half types in fp32, rounded once."""
    dtype = parts[0].dtype
    wide = [p.float() if dtype in (torch.bfloat16, torch.float16) else p for p in parts]
    acc = wide[0].clone()
    for p in wide[1:]:
        if op in (ShmReduceOp.SUM, ShmReduceOp.AVERAGE):
            acc = acc | p if dtype is torch.bool else acc + p
        elif op is ShmReduceOp.MAX:
            acc = torch.maximum(acc, p)
        elif op is ShmReduceOp.MIN:
            acc = torch.minimum(acc, p)
        elif op is ShmReduceOp.PRODUCT:
            acc = acc * p
        elif op is ShmReduceOp.BAND:
            acc = acc & p
        elif op is ShmReduceOp.BOR:
            acc = acc | p
        else:
            acc = acc ^ p
    return (acc / len(parts) if op is ShmReduceOp.AVERAGE else acc).to(dtype)


Run = Callable[..., None]


def check_everything(end: Channel, run: Run) -> None:
    w, rank = end.world, end.rank
    for dtype in DTYPES:
        for n in SIZES:
            mine, parts = part(rank, n, dtype), [part(r, n, dtype) for r in range(w)]
            out = torch.empty(n, dtype=dtype)
            run(ShmCollective.ALL_REDUCE, mine, out)
            assert torch.equal(out, total(parts)), (dtype, n)
            in_place = mine.clone()
            run(ShmCollective.ALL_REDUCE, in_place, in_place)
            assert torch.equal(in_place, total(parts))

            whole = [part(r, n * w, dtype, salt=1) for r in range(w)]
            run(ShmCollective.REDUCE_SCATTER, whole[rank], out)
            assert torch.equal(out, total([p[rank * n : (rank + 1) * n] for p in whole])), (dtype, n)

            gathered = torch.empty(n * w, dtype=dtype)
            run(ShmCollective.ALL_GATHER, mine, gathered)
            assert torch.equal(gathered, torch.cat(parts))
            gathered[rank * n : (rank + 1) * n] = mine  # in place, as ZeRO gathers
            run(ShmCollective.ALL_GATHER, gathered[rank * n : (rank + 1) * n], gathered)
            assert torch.equal(gathered, torch.cat(parts))

            for root in {0, w - 1}:
                held = part(rank, n, dtype)
                run(ShmCollective.BROADCAST, held, held, root=root)
                assert torch.equal(held, parts[root])
                run(ShmCollective.REDUCE, mine, out if rank == root else torch.empty(0, dtype=dtype), root=root)
                if rank == root:
                    assert torch.equal(out, total(parts))
                run(ShmCollective.GATHER, mine, gathered if rank == root else torch.empty(0, dtype=dtype), root=root)
                if rank == root:
                    assert torch.equal(gathered, torch.cat(parts))
                source = whole[root] if rank == root else torch.empty(0, dtype=dtype)
                run(ShmCollective.SCATTER, source, out, root=root)
                assert torch.equal(out, whole[root][rank * n : (rank + 1) * n])


@world(1)
def test_definition_1() -> None:
    with channel() as end:
        check_everything(end, end.call)


@world(2)
def test_definition_2() -> None:
    with channel() as end:
        check_everything(end, end.call)


@world(3)
def test_definition_3() -> None:
    with channel() as end:
        check_everything(end, end.call)


@world(4)
def test_definition_4() -> None:
    with channel() as end:
        check_everything(end, end.call)


@pytest.mark.parametrize("how", ["wait", "look"])
@world(3)
def test_calls_that_are_started_have_the_same_definition(how: str) -> None:
    """Small ones have two halves, the second in `wait` or `done`; large ones run on the channel's thread."""

    def run(verb: ShmCollective, inp: torch.Tensor, out: torch.Tensor, root: int = 0) -> None:
        task = end.start(verb, inp, out, root=root)
        while how == "look" and not task.done():
            time.sleep(0)
        task.wait()

    with channel() as end:
        check_everything(end, run)


@world(2)
def test_what_is_large_is_written_past_the_cache_to_the_same_bits() -> None:
    n = (4 << 20) // 2 + 77  # more than shm.h's streaming_bytes in half precision
    with channel(ChannelSettings()) as end:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            parts = [part(r, n, dtype) for r in range(2)]
            for start in (0, 1):  # an odd address has a head and a tail that are not whole vectors
                out = torch.zeros(n + 2, dtype=dtype)
                end.call(ShmCollective.ALL_REDUCE, parts[end.rank], out[start : start + n])
                assert torch.equal(out[start : start + n], total(parts))
                assert not out[n + start :].any()
                combine(out[start : start + n], parts[::-1])
                assert torch.equal(out[start : start + n], total(parts[::-1]))
            gathered = torch.empty(2 * n, dtype=dtype)
            end.call(ShmCollective.ALL_GATHER, parts[end.rank], gathered)
            assert torch.equal(gathered, torch.cat(parts))
            out = torch.empty(n, dtype=dtype)
            end.call(ShmCollective.REDUCE_SCATTER, gathered, out)
            assert torch.equal(out, total([parts[end.rank]] * 2))


@world(3)
def test_every_reduction() -> None:
    with channel() as end:
        for dtype in (torch.float32, torch.int32, torch.bfloat16):
            for op in ShmReduceOp:
                bits = op in (ShmReduceOp.BAND, ShmReduceOp.BOR, ShmReduceOp.BXOR)
                if (bits and dtype.is_floating_point) or (op is ShmReduceOp.AVERAGE and not dtype.is_floating_point):
                    with pytest.raises(KernelError, match="not defined"):
                        end.call(ShmCollective.ALL_REDUCE, part(0, 3, dtype), torch.empty(3, dtype=dtype), op=op)
                    continue
                out = torch.empty(3000, dtype=dtype)
                end.call(ShmCollective.ALL_REDUCE, part(end.rank, 3000, dtype), out, op=op)
                assert torch.equal(out, total([part(r, 3000, dtype) for r in range(3)], op)), (dtype, op)


@world(3)
def test_all_to_all_with_uneven_sizes() -> None:
    with channel() as end:
        for scale in (0, 1, 700):
            send = [(end.rank * 3 + r) * scale for r in range(3)]
            receive = [(r * 3 + end.rank) * scale for r in range(3)]
            inp = torch.arange(sum(send)) + 10**6 * end.rank
            out = torch.empty(sum(receive), dtype=torch.int64)
            end.all_to_all(inp, out, send, receive).wait()
            expected = []
            for r in range(3):
                start = sum((r * 3 + k) * scale for k in range(end.rank))
                expected.append(torch.arange(start, start + receive[r]) + 10**6 * r)
            assert torch.equal(out, torch.cat(expected))


@world(2)
def test_queued_calls_run_in_order_and_overlap_with_blocking_ones() -> None:
    with channel() as end:
        for _ in range(30):
            outs = [torch.empty(3000) for _ in range(4)]
            tasks = [
                end.start(ShmCollective.ALL_REDUCE, torch.full((3000,), i + 1.0), out) for i, out in enumerate(outs)
            ]
            end.barrier()
            for i, (task, out) in enumerate(zip(tasks, outs, strict=True)):
                task.wait(10)
                assert task.done()
                assert out.unique().item() == 2 * (i + 1)


@world(2)
def test_a_small_call_needs_no_rank_that_waits_for_it() -> None:
    with channel() as end:
        out = torch.zeros(10)
        task = end.start(ShmCollective.ALL_REDUCE, torch.ones(10), out)
        if end.rank == 1:
            task.wait()
            assert out.sum() == 20
        dist.barrier()
        if end.rank == 0:
            assert not out.any()  # nobody has asked
            assert task.done()
            assert out.sum() == 20


@world(2)
def test_what_follows_a_small_call_need_not_wait_for_the_others() -> None:
    with channel() as end:
        outs, word = [torch.zeros(10), torch.zeros(10)], torch.zeros(1)
        if end.rank == 1:  # comes to the calls only when rank 0 has started both
            end.receive(word, 0).wait()
        tasks = [end.start(ShmCollective.ALL_REDUCE, torch.ones(10) * (i + 1), out) for i, out in enumerate(outs)]
        if end.rank == 0:
            end.send(word, 1).wait()
        for i, task in enumerate(tasks):
            task.wait()
            assert outs[i].sum() == 20 * (i + 1)


@world(2)
def test_a_call_that_nobody_keeps_is_completed_by_the_next() -> None:
    with channel() as end:
        for n in (10, 5000):
            out = torch.zeros(n)
            end.start(ShmCollective.ALL_REDUCE, torch.ones(n), out)
            end.barrier()
            assert out.sum() == 2 * n


@world(2)
def test_a_limit_ends_the_waiting_and_not_the_call() -> None:
    with channel() as end:
        out = torch.zeros(10)
        if end.rank == 1:
            dist.barrier()
        task = end.start(ShmCollective.ALL_REDUCE, torch.ones(10), out)
        if end.rank == 0:
            with pytest.raises(TimeoutError, match="all_reduce"):
                task.wait(0.05)
            dist.barrier()
        task.wait(60)
        assert out.sum() == 20


def test_closing_ends_what_nobody_waited_for() -> None:
    end = Channel(SharedSegment(SMALL.segment_bytes(2)), 0, [os.getpid(), os.getppid()], SMALL)
    task = end.start(ShmCollective.ALL_REDUCE, torch.ones(10), torch.zeros(10))
    assert not task.done()
    end.close()
    with pytest.raises(CommError, match="aborted"):
        task.wait()


@world(2)
def test_both_ranks_send_before_they_receive() -> None:
    with channel() as end:
        peer = 1 - end.rank
        out = [end.send(torch.full((n,), float(end.rank)), peer, tag=n) for n in (50000, 0, 3)]
        into = [torch.empty(n) for n in (50000, 0, 3)]
        end.barrier()  # a collective in between is not held up by a send without room
        took = [end.receive(t, peer, tag=t.numel()) for t in into]
        for task in out + took:
            task.wait(10)
        assert all((t == peer).all() for t in into)


@world(2)
def test_ranks_that_came_with_different_calls_are_named() -> None:
    n = 10 + dist.get_rank()
    with channel() as end, pytest.raises(CommError, match="came with another operation") as caught:
        end.call(ShmCollective.ALL_REDUCE, torch.ones(n), torch.empty(n))
    assert caught.value.code == "shm-mismatch"
    with channel() as end:
        if end.rank == 0:
            end.send(torch.ones(3), 1).wait(10)
            dist.barrier()
        else:
            with pytest.raises(CommError, match="rank 0"):
                end.receive(torch.ones(4), 0).wait(10)
            dist.barrier()


@world(2)
def test_a_rank_that_does_not_come_ends_in_a_timeout_for_all() -> None:
    with channel(ChannelSettings(slot_bytes=4096, mailbox_bytes=4096, timeout_s=0.3)) as end:
        if end.rank == 0:
            with pytest.raises(CommError) as caught:
                end.barrier()
            assert caught.value.code == "shm-timeout"
            assert "for rank 1" in caught.value.message
        dist.barrier()
        with pytest.raises(CommError) as caught:
            end.barrier()
        assert caught.value.code == "shm-aborted"


def victim(settings: ChannelSettings, token: str, nbytes: int, parent: int, send: int) -> None:
    end = Channel(SharedSegment.attach(token, nbytes), 1, [parent, os.getpid()], settings)
    end.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_noticed() -> None:
    segment = SharedSegment(SMALL.segment_bytes(2))
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            victim(
                SMALL, segment.token.replace(str(os.getpid()), str(os.getppid()), 1), segment.nbytes, os.getppid(), 0
            )
        finally:
            os._exit(1)
    end = Channel(segment, 0, [os.getpid(), child], SMALL)
    end.barrier()
    with pytest.raises(CommError, match="rank 1 ended"):
        end.barrier()
    assert time.monotonic() - started < 100
    os.waitpid(child, 0)
    end.close()


def test_who_only_looks_learns_of_a_rank_that_died() -> None:
    segment = SharedSegment(SMALL.segment_bytes(2))
    child = os.fork()
    if child == 0:
        os._exit(0)
    end = Channel(segment, 0, [os.getpid(), child], SMALL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    task = end.start(ShmCollective.ALL_REDUCE, torch.ones(10), torch.zeros(10))
    limit = time.monotonic() + 150
    while not task.done() and time.monotonic() < limit:
        time.sleep(1e-4)
    assert task.done()
    with pytest.raises(CommError, match="rank 1 ended"):
        task.wait()
    os.waitpid(child, 0)
    end.close()


@world(2)
def test_an_arena_is_one_memory_and_a_reduction_over_it_copies_nothing() -> None:
    n, rank = 1000, dist.get_rank()
    segment = SharedSegment(4 * n * 2) if rank == 0 else None
    told: list[object] = [segment.token if segment else None]
    dist.broadcast_object_list(told)
    segment = segment or SharedSegment.attach(str(told[0]), 4 * n * 2)
    parts = [segment.tensor(n, torch.float32, 4 * n * r) for r in range(2)]
    parts[rank].fill_(rank + 1.5)
    dist.barrier()
    out = torch.empty(n)
    combine(out, parts)
    assert out.unique().item() == 4.0
    combine(out, parts, ShmReduceOp.MAX)
    assert out.unique().item() == 2.5


def mapped(address: int) -> dict[str, str]:
    """What the kernel says of the mapping at `address`."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            inside = int(first.split("-")[0], 16) <= address < int(first.split("-")[1], 16)
            found |= {"file": rest.split()[-1]} if inside else {}
        elif inside:
            found[first.rstrip(":")] = rest.strip()
    return found


LARGE = 16 << 20


@world(2)
def test_a_large_segment_is_in_huge_pages_on_all_ranks_where_its_maker_may_mount() -> None:
    probe = segments._huge_file()
    if probe < 0 or not segments._memfds_are_small():
        pytest.skip(f"no file in huge pages here: {os.strerror(-probe)}")
    os.close(probe)
    rank = dist.get_rank()
    segment = SharedSegment(LARGE) if rank == 0 else None
    told: list[object] = [segment.token if segment else None]
    dist.broadcast_object_list(told)
    segment = segment or SharedSegment.attach(str(told[0]), LARGE)
    whole = segment.tensor(LARGE // 4, torch.float32)
    assert not whole.any()
    dist.barrier()
    whole[rank * LARGE // 8 : (rank + 1) * LARGE // 8] = rank + 1.0
    dist.barrier()
    segment.close()
    assert whole.sum().item() == 3.0 * LARGE / 8
    found = mapped(whole.data_ptr())
    assert found["THPeligible"] == "1", found
    assert "memfd" not in found["file"]


def test_without_the_right_to_mount_a_large_segment_is_a_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_huge_file", lambda: -1)
    segment = SharedSegment(LARGE)
    assert "memfd" in os.readlink(f"/proc/self/fd/{segment.fd}")
    assert SharedSegment.attach(segment.token, LARGE).tensor(LARGE, torch.uint8)[-1] == 0


def test_a_large_segment_leaves_no_descriptor_and_no_mount() -> None:
    def cycle() -> tuple[int, int]:
        SharedSegment(LARGE).close()
        return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/mounts").read_text().splitlines())

    first = cycle()
    assert cycle() == first


def test_a_token_of_nobody_and_sizes_that_do_not_fit_are_refused() -> None:
    segment = SharedSegment(4096)
    with pytest.raises(CommError, match="cannot attach"):
        SharedSegment.attach("999999999:3:7", 4096)
    with pytest.raises(CommError, match="another file"):
        SharedSegment.attach(segment.token, 8192)
    with pytest.raises(KernelError, match="do not fit"):
        segment.tensor(1025, torch.float32)
    end = Channel(SharedSegment(SMALL.segment_bytes(1)), 0, [os.getpid()], SMALL)
    with pytest.raises(KernelError, match="expected 4 and 4"):
        end.call(ShmCollective.ALL_REDUCE, torch.ones(4), torch.empty(5))
    with pytest.raises(KernelError, match="contiguous"):
        end.call(ShmCollective.ALL_REDUCE, torch.ones(4, 4).t(), torch.empty(16))
    with pytest.raises(KernelError, match="not another rank"):
        end.send(torch.ones(1), 0)
    end.close()


def test_descriptors_and_threads_are_given_back() -> None:
    def cycle() -> tuple[int, int]:
        segment = SharedSegment(SMALL.segment_bytes(1))
        end = Channel(segment, 0, [os.getpid()], SMALL)
        out = torch.empty(10)
        end.start(ShmCollective.ALL_REDUCE, torch.ones(10), out).wait(5)
        end.close()
        segment.close()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    first = cycle()
    assert cycle() == first


def _count_once(token: str, parent: int) -> None:
    counters = HostCounters(SharedSegment.attach(token, HostCounters.nbytes_for(2)), 0, 1, [parent, os.getpid()])
    counters.advance()
    os.kill(os.getpid(), signal.SIGKILL)


def test_counters_name_who_is_behind_and_notice_who_died() -> None:
    segment = SharedSegment(HostCounters.nbytes_for(2))
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_count_once, args=(segment.token, os.getpid()))
    process.start()
    assert process.pid is not None
    counters = HostCounters(segment, 0, 0, [os.getpid(), process.pid])
    assert (counters.advance(), counters.value) == (1, 1)
    assert counters.wait(1, timeout_s=60) is None
    assert counters.behind(1) is None
    assert (counters.advance(), counters.behind(2)) == (2, 1)
    with pytest.raises(CommError, match="rank 1 ended") as caught:
        counters.wait(2, timeout_s=60)
    assert caught.value.code == "shm-peer-died"
    process.join()


@world(2)
def test_counters_are_waited_for_without_a_call_of_the_others() -> None:
    rank = dist.get_rank()
    segment = SharedSegment(HostCounters.nbytes_for(2)) if rank == 0 else None
    told: list[object] = [segment.token if segment else None]
    dist.broadcast_object_list(told)
    segment = segment or SharedSegment.attach(str(told[0]), HostCounters.nbytes_for(2))
    pids: list[object] = [None] * 2
    dist.all_gather_object(pids, os.getpid())
    counters = HostCounters(segment, 0, rank, [int(str(p)) for p in pids])
    dist.barrier()
    if rank == 0:
        assert counters.advance() == 1
        assert counters.wait(1, timeout_s=0.01) == 1  # rank 1 is behind
        dist.barrier()
        assert counters.wait(3, timeout_s=0.01) == 0  # we are, too
        for _ in range(300):
            counters.wait(counters.advance(), timeout_s=60)
    else:
        dist.barrier()
        for _ in range(301):
            counters.advance()
        assert counters.wait(301, timeout_s=60) is None
    assert counters.wait(301, timeout_s=60) is None
    dist.barrier()


@world(2)
def test_what_is_pulled_was_written_before_the_others_came() -> None:
    with channel() as end:
        with pytest.raises(KernelError, match="3 elements into 4"):
            end.fetch(torch.zeros(4), torch.zeros(3))
        ours = torch.arange(6.0)
        into = torch.zeros(2, 3, dtype=torch.complex64)
        end.fetch(into, ours.to(torch.complex64))
        assert torch.equal(into.view(-1).real, ours)
        end.pull(out := torch.zeros(6), [ours, ours], ShmReduceOp.AVERAGE)
        assert torch.equal(out, ours)
        end.pull(out[:2], [ours, ours], first=3)
        assert out[:2].tolist() == [6.0, 8.0]
        with pytest.raises(KernelError, match="2 elements from 5 on of a source of 6"):
            end.pull(out[:2], [ours], first=5)
        flags = torch.tensor([0, 2, 1], dtype=torch.uint8).view(torch.bool)  # any byte but zero is true
        combine(found := torch.zeros(3, dtype=torch.bool), [flags])
        assert found.view(torch.uint8).tolist() == [0, 1, 1]
