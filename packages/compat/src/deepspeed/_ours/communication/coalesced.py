"""`deepspeed.runtime.comm.coalesced_collectives`: averages of lists of tensors, each rank its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ds_comm import as_group, reduce_scatter_single


def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Reduce-scatter the average of every rank's `tensors`. Collective.

    The shards are flat and in order; the last ranks' shards may be shorter.
    """
    ranks = as_group(group)
    shards = []
    for tensor in tensors:
        part = -(-tensor.numel() // ranks.size)
        padded = nn.functional.pad(tensor.reshape(-1) / ranks.size, (0, part * ranks.size - tensor.numel()))
        out = padded.new_empty(part)
        reduce_scatter_single(out, padded, group=ranks)
        shards.append(out[: max(0, min(part, tensor.numel() - ranks.rank * part))])
    return shards


def all_to_all_quant_reduce(tensors: Sequence[Tensor], groups: Mapping[str, Any]) -> list[Tensor]:
    """`reduce_scatter_coalesced` over all ranks: exact, as upstream's for tensors that cannot be coded. Collective."""
    del groups
    return reduce_scatter_coalesced(tensors)


def all_to_all_loco_quant_reduce(
    params: Sequence[nn.Parameter], groups: Mapping[str, Any], loco_param: Any = None
) -> list[Tensor]:
    """Reduce-scatter the average of gradients, exact: without rounding there is no error to feed back. Collective."""
    del loco_param
    return all_to_all_quant_reduce([param.grad for param in params if param.grad is not None], groups)
