"""The ranks of a family hold the same: shapes are checked, values are made equal to those of its first rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import ds_comm as comm
from ds_comm import Group
from ds_comm.family import Family
from ds_config.errors import PlanError
from ds_zero.layout.families import Logical
from ds_zero.layout.units import DENSE, UnitSpec

__all__ = ["check_same", "make_same"]


def hash_of(text: str) -> int:
    """A 63-bit digest, the same in every process (Python's own hash is not)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def check_same(specs: Sequence[UnitSpec], logical: Mapping[str, Logical], families: Mapping[str, Family]) -> None:
    """Raise on all ranks of a family that do not hold the same of it. Collective over each family's group.

    They must also have its units at the same place among the units of families that all of them have: that is the order in which
    they communicate.
    """
    _check_present(families)
    for name, family in families.items():
        if family.group.pg is None:
            continue
        common = {n for n, f in families.items() if set(f.group.ranks) >= set(family.group.ranks)}
        ours = [spec for spec in specs if spec.family in common]
        mine = torch.tensor([hash_of(repr([_content(spec, logical) for spec in ours]))], dtype=torch.int64)
        all_of = torch.empty(family.group.size, dtype=torch.int64)
        comm.all_gather_single(all_of, mine, family.group, unit="shard")
        if len(set(all_of.tolist())) > 1:
            of = "" if name == DENSE else f"of family {name!r} "
            raise PlanError(
                f"the ranks hold different models: {sum(len(s.params) for s in ours)} parameters {of}in {len(ours)} units here, "
                f"digests by rank {all_of.tolist()}",
                code="zero-models-differ",
                fix="Build the same model and the same optimizer groups on every rank; assign a family to what differs.",
            )


def _check_present(families: Mapping[str, Family]) -> None:
    """A family that a rank of its group lacks would let the others wait for that rank."""
    group = families[DENSE].group
    mine = torch.tensor([len(families)], dtype=torch.int64)
    if group.pg is not None:
        comm.all_reduce(mine, group=group, unit="shard")
    if group.pg is None or mine.item() == group.size:
        return
    told = comm.all_gather_json({n: f.group.ranks for n, f in families.items()}, group, unit="shard")
    for rank, others in zip(group.ranks, told, strict=True):
        for name, ranks in others.items():
            lacking = [r for r, has in zip(group.ranks, told, strict=True) if r in ranks and has.get(name) != ranks]
            if lacking:
                raise PlanError(
                    f"on rank {rank} the model has parameters of family {name!r} over ranks {tuple(ranks)}; on ranks {lacking} it has none",
                    code="zero-family",
                    fix="Give every rank of a family's group a part of it, or leave those ranks out of the group.",
                )


def _content(spec: UnitSpec, logical: Mapping[str, Logical]) -> tuple[Any, ...]:
    # A tied weight has other names, and other modules, on other stages; its logical name is the same.
    params = [(replace(p, name="", module=""), logical[p.name]) for p in spec.params]
    return (spec.family, spec.residency, "" if spec.family != DENSE else spec.module, params)


def make_same(tensors: Sequence[Tensor], group: Group) -> None:
    """Make `tensors` equal to those of the group's first rank. Compares digests first, so equal ranks send 16 bytes a tensor."""
    if group.pg is None:
        return
    with torch.no_grad():
        mine = _digests([t.detach() for t in tensors])
        all_of = torch.empty(group.size * mine.numel(), dtype=torch.int64)
        comm.all_gather_single(all_of, mine.flatten(), group, unit="shard")
        table = all_of.view(group.size, -1, 2)
        differs = (table != table[0]).flatten(2).any(2).any(0)
        for i in differs.nonzero().flatten().tolist():
            value = tensors[i].detach().contiguous()
            comm.broadcast(value, group=group, group_src=0, unit="shard")
            tensors[i].data.copy_(value)


def _digests(tensors: Sequence[Tensor]) -> Tensor:
    # Two sums over the bit patterns of each, one of them weighted by position, so that permuted rows differ: [tensors, 2]. One
    # pass over memory; the sums of all tensors are made together, because an operation on a few numbers takes long, too.
    parts = [_row_sums(tensor) for tensor in tensors]
    sums = torch.cat([torch.empty(0, dtype=torch.int64), *(part for pair in parts for part in pair)])
    lengths = torch.tensor([sum(map(len, pair)) for pair in parts], dtype=torch.int64)
    of = torch.repeat_interleave(lengths)
    place = torch.arange(1, len(sums) + 1) - (lengths.cumsum(0) - lengths)[of]
    return torch.zeros(len(parts), 2, dtype=torch.int64).index_add_(0, of, torch.stack([sums, sums * place], 1))


def _row_sums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the rows of a square of its words, and the words that do not fill one."""
    words = tensor.contiguous().view(-1).view(torch.uint8)
    if pad := -words.numel() % 8:
        words = torch.nn.functional.pad(words, (0, pad))
    words = words.view(torch.int64)
    width = max(1, math.isqrt(words.numel()))
    square = words.numel() // width * width
    return words[:square].view(-1, width).sum(1).cpu(), words[square:].cpu()
