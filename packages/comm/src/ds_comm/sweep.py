"""Time collectives over operations, sizes, dtypes and backends, alternating between the backends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_comm.collectives as collectives
from ds_comm._torch import ALL_GATHER_SINGLE, REDUCE_SCATTER_SINGLE
from ds_comm.bandwidth import bandwidth
from ds_comm.groups import Group

__all__ = ["OPERATIONS", "BenchCase", "BenchTiming", "cases", "measure", "sweep"]

Start = Callable[[bool], Any]
Operation = Callable[[Tensor, Group], Start]


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One operation on a message of `nbytes` in all, on the backend of one of the groups."""

    op: str
    backend: str
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True, slots=True)
class BenchTiming:
    """What a case took on the slowest rank: the median, the fastest and the 99th percentile of the repeats.

    Attributes:
        flow_s: Of one of several that are on their way together: their median time by their number. What is latency only overlaps.
        busy_s: Of these, how long a core of the rank was busy with one.
    """

    case: BenchCase
    ranks: int
    median_s: float
    best_s: float
    p99_s: float
    algorithm_gbps: float
    bus_gbps: float
    flow_s: float
    busy_s: float


def _all_reduce(message: Tensor, group: Group) -> Start:
    return lambda later: collectives.all_reduce(message, group=group, async_op=later)


def _all_gather(message: Tensor, group: Group) -> Start:
    part = message[: message.numel() // group.size].clone()
    return lambda later: collectives.all_gather_single(message, part, group, later)


def _reduce_scatter(message: Tensor, group: Group) -> Start:
    part = message[: message.numel() // group.size].clone()
    return lambda later: collectives.reduce_scatter_single(part, message, group=group, async_op=later)


def _all_to_all(message: Tensor, group: Group) -> Start:
    out = torch.empty_like(message)
    return lambda later: collectives.all_to_all_single(out, message, group=group, async_op=later)


def _broadcast(message: Tensor, group: Group) -> Start:
    return lambda later: collectives.broadcast(message, group_src=0, group=group, async_op=later)


def _barrier(message: Tensor, group: Group) -> Start:
    return lambda later: collectives.barrier(group, later)


def _torch_all_reduce(message: Tensor, group: Group) -> Start:
    return lambda later: dist.all_reduce(message, group=group.pg, async_op=later)


def _torch_all_gather(message: Tensor, group: Group) -> Start:
    part = message[: message.numel() // group.size].clone()
    return lambda later: ALL_GATHER_SINGLE(message, part, group=group.pg, async_op=later)


def _torch_reduce_scatter(message: Tensor, group: Group) -> Start:
    part = message[: message.numel() // group.size].clone()
    return lambda later: REDUCE_SCATTER_SINGLE(part, message, group=group.pg, async_op=later)


OPERATIONS: Mapping[str, Operation] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
    "torch.all_reduce": _torch_all_reduce,
    "torch.all_gather": _torch_all_gather,
    "torch.reduce_scatter": _torch_reduce_scatter,
}
_TOGETHER = 8
"""So many operations of a case are on their way together where their flow is measured, or as many as `_TOGETHER_BYTES` are, and two at least."""
_TOGETHER_BYTES = 128 << 20
_PASSES = 4
_SPELLED = {
    "all_gather": "all_gather_single",
    "reduce_scatter": "reduce_scatter_single",
    "all_to_all": "all_to_all_single",
}


def cases(
    ops: Sequence[str], backends: Sequence[str], dtypes: Sequence[torch.dtype], sizes: Iterable[int]
) -> Iterator[list[BenchCase]]:
    """Lists of cases to alternate between: the same message on each backend."""
    for op in ops:
        for dtype in dtypes[:1] if op == "barrier" else dtypes:
            for nbytes in (0,) if op == "barrier" else sizes:
                yield [BenchCase(op, backend, dtype, nbytes) for backend in backends]


def sweep(groups: Mapping[str, Group], together: Iterable[list[BenchCase]], budget_s: float) -> Iterator[BenchTiming]:
    """Measure lists of cases in passes over all of them. Collective over the groups, which are the same ranks on each backend.

    A machine that is slow for some seconds then slows a part of the repeats of every list, which medians leave out, not one list alone.

    Args:
        groups: By name of the backend.
        budget_s: About how long to repeat a list in all passes.
    """
    lists = list(together)
    passes = [
        [_repeat(groups, alternating, budget_s / _PASSES, 1) for alternating in lists] for _ in range(_PASSES - 1)
    ]
    for i, alternating in enumerate(lists):
        last = _repeat(groups, alternating, budget_s / _PASSES, 1)
        yield from _slowest(groups, alternating, torch.cat([*(before[i] for before in passes), last], 1))


def measure(groups: Mapping[str, Group], alternating: Sequence[BenchCase], budget_s: float) -> list[BenchTiming]:
    """Repeat cases alternately, at least three times each, and report each on its slowest rank."""
    return _slowest(groups, alternating, _repeat(groups, alternating, budget_s, 3))


def _together(alternating: Sequence[BenchCase]) -> int:
    return max(2, min(_TOGETHER, _TOGETHER_BYTES // max(1, *(case.nbytes for case in alternating))))


def _repeat(groups: Mapping[str, Group], alternating: Sequence[BenchCase], budget_s: float, least: int) -> Tensor:
    """Return [alone and together, repeats, cases, seconds and seconds of a core] of this rank."""
    count = _together(alternating)
    starts = [[_prepare(case, groups[case.backend]) for _ in range(count)] for case in alternating]
    for case, begin in zip(alternating, starts, strict=True):
        _time(begin, groups[case.backend])  # a backend's own buffers: their pages are new to the process once
    first_s = max(_time(begin[:1], groups[case.backend])[0] for case, begin in zip(alternating, starts, strict=True))
    longest = torch.tensor([first_s], dtype=torch.float64, device="cpu")
    any_group = groups[alternating[0].backend]
    collectives.all_reduce(longest, collectives.ReduceOp.MAX, any_group)  # all ranks repeat equally often
    repeats = max(least, min(200, int(budget_s / (float(longest) * len(starts) * (1 + count) + 1e-9))))
    alone, together = [], []
    for _ in range(repeats):
        alone.append([_time(begin[:1], groups[case.backend]) for case, begin in zip(alternating, starts, strict=True)])
        together.append([_time(begin, groups[case.backend]) for case, begin in zip(alternating, starts, strict=True)])
    return torch.tensor([alone, together], dtype=torch.float64, device="cpu")


def _slowest(groups: Mapping[str, Group], alternating: Sequence[BenchCase], both: Tensor) -> list[BenchTiming]:
    any_group, count = groups[alternating[0].backend], _together(alternating)
    slowest = both[..., 0].contiguous()
    collectives.all_reduce(slowest, collectives.ReduceOp.MAX, any_group)
    slowest[1] /= count
    busy = (both[1, ..., 1].median(0).values / count).contiguous()
    collectives.all_reduce(busy, collectives.ReduceOp.MAX, any_group)
    return [
        _timing(case, any_group.size, slowest[..., i].tolist(), float(busy[i])) for i, case in enumerate(alternating)
    ]


def _prepare(case: BenchCase, group: Group) -> Start:
    numel = -(-case.nbytes // case.dtype.itemsize // group.size) * group.size
    message = torch.ones(numel, device="cpu").to(case.dtype)
    return OPERATIONS[case.op](message, group)


def _time(begin: Sequence[Start], group: Group) -> tuple[float, float]:
    """Return the seconds of operations on their way together after all ranks have come, and the seconds of a core that this process used for them."""
    collectives.barrier(group)
    began, used = time.perf_counter(), time.process_time()
    works = [start(len(begin) > 1) for start in begin]
    for work in works if len(begin) > 1 else ():
        work.wait()
    return time.perf_counter() - began, time.process_time() - used


def _timing(case: BenchCase, ranks: int, seconds: Sequence[Sequence[float]], busy_s: float) -> BenchTiming:
    alone, together = seconds
    median_s = statistics.median(alone)
    plain = case.op.removeprefix("torch.")
    op = _SPELLED.get(plain, plain)
    passed = case.nbytes // ranks if plain == "all_gather" else case.nbytes
    speed = bandwidth(op, passed, ranks, median_s)
    p99_s = sorted(alone)[min(len(alone) - 1, int(len(alone) * 0.99))]
    flow_s = statistics.median(together)
    return BenchTiming(case, ranks, median_s, min(alone), p99_s, speed.algorithm_gbps, speed.bus_gbps, flow_s, busy_s)
