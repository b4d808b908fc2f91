"""Stands in for ds_comm's groups and collectives until they land; same names, same signatures. Deleted then."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ds_comm.placement import TensorShard


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One rank's elements of one logical tensor: 1-D, writable in place."""

    shard: TensorShard
    data: Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate; `pg` is None for a group of one."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    pg: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


class Work(Protocol):
    def wait(self) -> None: ...
    def is_completed(self) -> bool: ...


class _Done:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


@dataclass
class _SumOnWait:
    work: Work
    parts: Tensor
    out: Tensor

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()
        if len(self.parts) == 2:
            torch.add(self.parts[0], self.parts[1], out=self.out)
        else:
            torch.sum(self.parts, 0, out=self.out)


def as_group(group: Group | dist.ProcessGroup | None, name: str = "data") -> Group:
    if isinstance(group, Group):
        return group
    if group is None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return Group(name, (0,), 0)
        group = dist.group.WORLD
    return Group(name, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group), group)


def reduce_scatter_single(out: Tensor, inp: Tensor, group: Group, *, unit: str = "", async_op: bool = False) -> Work:
    if group.pg is None:
        if out.data_ptr() != inp.data_ptr():
            out.copy_(inp)
        return _Done()
    parts = torch.empty_like(inp)
    work = dist.all_to_all_single(parts, inp, group=group.pg, async_op=True)
    done = _SumOnWait(work, parts.view(group.size, -1), out)
    if not async_op:
        done.wait()
        return _Done()
    return done


def all_gather_single(out: Tensor, inp: Tensor, group: Group, *, unit: str = "", async_op: bool = False) -> Work:
    if group.pg is None:
        if out.data_ptr() != inp.data_ptr():
            out.copy_(inp)
        return _Done()
    work = dist.all_gather_into_tensor(out, inp, group=group.pg, async_op=async_op)
    return work if async_op else _Done()


def all_reduce(tensor: Tensor, group: Group, *, unit: str = "", async_op: bool = False) -> Work:
    if group.pg is None:
        return _Done()
    work = dist.all_reduce(tensor, group=group.pg, async_op=async_op)
    return work if async_op else _Done()


def exchange(group: Group, value: Any) -> list[Any]:
    """Every rank's JSON-able `value`, in group order."""
    if group.pg is None:
        return [value]
    parts: list[Any] = [None] * group.size
    dist.all_gather_object(parts, json.dumps(value), group=group.pg)
    return [json.loads(part) for part in parts]


def broadcast(tensor: Tensor, group: Group, *, src: int = 0, unit: str = "") -> None:
    if group.pg is not None:
        dist.broadcast(tensor, group.ranks[src], group=group.pg)
