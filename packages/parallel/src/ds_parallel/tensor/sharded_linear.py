"""One linear layer of which a rank has a part, for programs that cut layers themselves; models are cut by `parallelize_model`.

A dim in several parts stays one parameter here: this rank's stretch of every part, behind each other.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_comm import Group
from ds_comm.differentiable import copy, gather, reduce, split
from ds_parallel.tensor.dim_shards import DimShards

__all__ = ["ShardedLinear"]


class ShardedLinear(nn.Module):
    """A column layer (`cut.dim` is 0, outputs are cut) or a row layer (1, inputs are cut and results summed).

    Args:
        weight: [out, in], whole; kept as this rank's part unless `local`.
        bias: [out], whole; of a row layer every rank keeps all of it.
        cut: Which stretches each rank has.
        group: The tensor-parallel ranks.
        local: The parameters are this rank's part already.
    Attributes:
        gather_output: A column layer's whole output is put together on every rank.
        split_input: A row layer is given its whole input, and takes its part of it.
        rank: Whose part it keeps.
    """

    gather_output = False
    split_input = False

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, cut: DimShards, group: Group, *, local: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.cut, self.group, self.rank = weight, bias, cut, group, group.rank
        if not local:
            self.shard_params([weight, bias])

    def sharded_dim(self, param: Tensor) -> int | None:
        """Return the dim along which `weight` or `bias` is cut; None for one that every rank holds whole."""
        return self.cut.dim if param.dim() > 1 else 0 if self.cut.dim == 0 else None

    @torch.no_grad()
    def shard_params(self, params: Iterable[nn.Parameter | None]) -> None:
        """Keep this rank's part of whole parameters."""
        for param in params:
            dim = None if param is None else self.sharded_dim(param)
            if param is not None and dim is not None:
                parts = [param.data.narrow(dim, a, b - a) for a, b in self.cut.stretches(self.rank)]
                param.data = torch.cat(parts, dim).contiguous()

    @torch.no_grad()
    def gather_params(self, params: Iterable[nn.Parameter | None]) -> None:
        """Make parameters whole. Collective over the group; those that are whole stay as they are."""
        widths = [self.cut.width(rank) for rank in range(self.group.size)]
        for param in params:
            dim = None if param is None else self.sharded_dim(param)
            if param is not None and dim is not None and param.shape[dim] != self.cut.size:
                by_rank = gather(param.data, self.group, dim, widths).split(widths, dim)
                param.data = self._joined(by_rank, dim)

    def _joined(self, by_rank: Iterable[Tensor], dim: int) -> Tensor:
        """Put what the ranks hold of a dim in the order of the whole dim."""
        stretches = [
            (start, piece.narrow(dim, offset, stop - start))
            for rank, piece in enumerate(by_rank)
            for offset, (start, stop) in self._offsets(rank)
        ]
        return torch.cat([piece for _, piece in sorted(stretches, key=lambda pair: pair[0])], dim)

    def _offsets(self, rank: int) -> list[tuple[int, tuple[int, int]]]:
        offsets, offset = [], 0
        for start, stop in self.cut.stretches(rank):
            offsets.append((offset, (start, stop)))
            offset += stop - start
        return offsets

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Linear's name
        """Map [..., in] to [..., out]: this rank's outputs, or all of them where they are summed or gathered."""
        x = input
        if self.cut.dim == 0:
            out = functional.linear(copy(x, self.group), self.weight, self.bias)
            return self._gathered(out) if self.gather_output else out
        if self.split_input:
            x = split(x, self.group, -1, [self.cut.width(rank) for rank in range(self.group.size)])
        out = reduce(functional.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias

    def _gathered(self, out: Tensor) -> Tensor:
        widths = [self.cut.width(rank) for rank in range(self.group.size)]
        return self._joined(gather(out, self.group, -1, widths).split(widths, -1), out.dim() - 1)

    def extra_repr(self) -> str:
        shape = tuple(self.weight.shape)
        return f"weight={shape}, bias={self.bias is not None}, rank {self.group.rank} of {self.group.size}"
