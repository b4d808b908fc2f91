"""Time collectives over operations, sizes, dtypes and backends, alternating between the backends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import ds_comm.collectives as collectives
from ds_comm._torch import ALL_GATHER_SINGLE, REDUCE_SCATTER_SINGLE
from ds_comm.bandwidth import bandwidth
from ds_comm.groups import Group

__all__ = ["OPERATIONS", "BenchCase", "BenchTiming", "cases", "measure", "sweep"]

Operation = Callable[[Tensor, Group], Callable[[], object]]


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

    `host_share` is the part of that time in which a core of the rank was busy with it, from 0 to 1.
    """

    case: BenchCase
    ranks: int
    median_s: float
    best_s: float
    p99_s: float
    algorithm_gbps: float
    bus_gbps: float
    host_share: float = 0.0


def _all_reduce(message: Tensor, group: Group) -> Callable[[], object]:
    return lambda: collectives.all_reduce(message, group=group)


def _all_gather(message: Tensor, group: Group) -> Callable[[], object]:
    part = message[: message.numel() // group.size].clone()
    return lambda: collectives.all_gather_single(message, part, group)


def _reduce_scatter(message: Tensor, group: Group) -> Callable[[], object]:
    part = message[: message.numel() // group.size].clone()
    return lambda: collectives.reduce_scatter_single(part, message, group=group)


def _all_to_all(message: Tensor, group: Group) -> Callable[[], object]:
    out = torch.empty_like(message)
    return lambda: collectives.all_to_all_single(out, message, group=group)


def _broadcast(message: Tensor, group: Group) -> Callable[[], object]:
    return lambda: collectives.broadcast(message, group_src=0, group=group)


def _barrier(message: Tensor, group: Group) -> Callable[[], object]:
    return lambda: collectives.barrier(group)


def _torch_all_reduce(message: Tensor, group: Group) -> Callable[[], object]:
    return lambda: dist.all_reduce(message, group=group.pg)


def _torch_all_gather(message: Tensor, group: Group) -> Callable[[], object]:
    part = message[: message.numel() // group.size].clone()
    return lambda: ALL_GATHER_SINGLE(message, part, group=group.pg)


def _torch_reduce_scatter(message: Tensor, group: Group) -> Callable[[], object]:
    part = message[: message.numel() // group.size].clone()
    return lambda: REDUCE_SCATTER_SINGLE(part, message, group=group.pg)


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
    """Measure lists of cases in order. Collective over the groups, which are the same ranks on each backend.

    Args:
        groups: By name of the backend.
        budget_s: About how long to repeat a list.
    """
    for alternating in together:
        yield from measure(groups, alternating, budget_s)


def measure(groups: Mapping[str, Group], alternating: Sequence[BenchCase], budget_s: float) -> list[BenchTiming]:
    """Repeat cases alternately, at least three times each, and report each on its slowest rank."""
    runs = [_prepare(case, groups[case.backend]) for case in alternating]
    first_s = max(_time(run, groups[case.backend])[0] for case, run in zip(alternating, runs, strict=True))
    longest = torch.tensor([first_s], dtype=torch.float64)
    any_group = groups[alternating[0].backend]
    collectives.all_reduce(longest, collectives.ReduceOp.MAX, any_group)  # all ranks repeat equally often
    repeats = max(3, min(200, int(budget_s / (float(longest) * len(runs) + 1e-9))))
    seconds, busy_s = torch.tensor(
        [
            [_time(run, groups[case.backend]) for case, run in zip(alternating, runs, strict=True)]
            for _ in range(repeats)
        ],
        dtype=torch.float64,
    ).unbind(-1)
    shares = (busy_s.sum(0) / seconds.sum(0)).clamp(max=1.0).tolist()
    slowest = seconds.contiguous()
    collectives.all_reduce(slowest, collectives.ReduceOp.MAX, any_group)
    return [_timing(case, any_group.size, slowest[:, i].tolist(), shares[i]) for i, case in enumerate(alternating)]


def _prepare(case: BenchCase, group: Group) -> Callable[[], object]:
    numel = -(-case.nbytes // case.dtype.itemsize // group.size) * group.size
    message = torch.ones(numel).to(case.dtype)
    return OPERATIONS[case.op](message, group)


def _time(run: Callable[[], object], group: Group) -> tuple[float, float]:
    """Return the seconds of a run after all ranks have come, and the seconds of a core that this process used for it."""
    collectives.barrier(group)
    began, used = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - used


def _timing(case: BenchCase, ranks: int, seconds: list[float], share: float) -> BenchTiming:
    median_s = statistics.median(seconds)
    plain = case.op.removeprefix("torch.")
    op = _SPELLED.get(plain, plain)
    passed = case.nbytes // ranks if plain == "all_gather" else case.nbytes
    speed = bandwidth(op, passed, ranks, median_s)
    p99_s = sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * 0.99))]
    return BenchTiming(case, ranks, median_s, min(seconds), p99_s, speed.algorithm_gbps, speed.bus_gbps, share)
