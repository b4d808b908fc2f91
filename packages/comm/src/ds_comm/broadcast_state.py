"""Tensors made equal on all ranks, where they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_comm.collectives import all_gather_single, broadcast
from ds_comm.groups import Group
from ds_comm.metadata import metadata_device, on_group

__all__ = ["make_same"]


def make_same(tensors: Sequence[Tensor], group: Group) -> None:
    """Make `tensors` equal to those of the group's first rank. Compares digests first, so equal ranks send 16 bytes a tensor."""
    if group.link is None:
        return
    with torch.no_grad():
        digests = _digests([t.detach() for t in tensors]).to(metadata_device(group))
        all_of = digests.new_empty(group.size * digests.numel())
        all_gather_single(all_of, digests.flatten(), group, unit="shard")
        table = all_of.view(group.size, -1, 2)
        differs = (table != table[0]).flatten(2).any(2).any(0)
        for i in differs.nonzero().flatten().tolist():
            value = on_group(tensors[i].detach().contiguous(), group)
            broadcast(value, group=group, group_src=0, unit="shard")
            tensors[i].data.copy_(value)


def _digests(tensors: Sequence[Tensor]) -> Tensor:
    # Two sums over the bit patterns of each, one of them weighted by position, so that permuted rows differ: [tensors, 2]. One
    # pass over memory; the sums of all tensors are made together, because an operation on a few numbers takes long, too.
    parts = [_row_sums(tensor) for tensor in tensors]
    sums = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *(part for pair in parts for part in pair)])
    lengths = torch.tensor([sum(map(len, pair)) for pair in parts], dtype=torch.int64, device="cpu")
    of = torch.repeat_interleave(lengths)
    place = torch.arange(1, len(sums) + 1, device="cpu") - (lengths.cumsum(0) - lengths)[of]
    return torch.zeros(len(parts), 2, dtype=torch.int64, device="cpu").index_add_(
        0, of, torch.stack([sums, sums * place], 1)
    )


def _row_sums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the rows of a square of its words, and the words that do not fill one."""
    words = tensor.contiguous().view(-1).view(torch.uint8)
    if pad := -words.numel() % 8:
        words = torch.nn.functional.pad(words, (0, pad))
    words = words.view(torch.int64)
    width = max(1, math.isqrt(words.numel()))
    square = words.numel() // width * width
    return words[:square].view(-1, width).sum(1).cpu(), words[square:].cpu()
