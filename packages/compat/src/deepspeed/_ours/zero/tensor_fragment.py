"""Small tensor classes and functions of upstream's that programs import: sparse rows, tensors cut over a group, rotations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ds_comm
from deepspeed._ours.base.forwarding import answers, calls, method, tells
from deepspeed._ours.base.raising import refused
from deepspeed._ours.native_ops.accelerator_api import get_accelerator
from deepspeed._ours.parallel.tp_shards import get_num_kv_heads, get_shard_size_list, set_num_kv_heads
from ds_comm.differentiable import seq_all_to_all


def prefix_sum_inc(weights: Sequence[int]) -> list[int]:
    """Compute the inclusive prefix sums of `weights`."""
    total, sums = 0, []
    for weight in weights:
        total += weight
        sums.append(total)
    return sums


# ---- rows of a matrix


class SparseTensor:
    """A matrix [rows, columns] by those of its rows that are not zero; rows may stand in it more than once, and add up.

    Attributes:
        indices: int64 [n], the rows.
        values: [n, columns].
        dense_size: [rows, columns].
    """

    def __init__(self, dense_tensor: Tensor | None = None) -> None:
        self.orig_dense_tensor = dense_tensor
        self.indices: Any = None
        self.values: Any = None
        self.dense_size: Any = None
        if dense_tensor is None:
            return
        self.is_sparse, self.dtype = dense_tensor.is_sparse, dense_tensor.dtype
        self.dense_size = list(dense_tensor.size())
        if dense_tensor.is_sparse:
            coalesced = dense_tensor.coalesce()
            self.indices, self.values = coalesced.indices().flatten(), coalesced.values()
        else:
            self.indices = dense_tensor.ne(0).any(1).nonzero().flatten()
            self.values = dense_tensor[self.indices]

    @staticmethod
    def type() -> str:
        """Return the type's name, as a tensor does."""
        return "deepspeed.SparseTensor"

    def to_coo_tensor(self) -> Tensor:
        """Convert the rows to torch's sparse tensor."""
        return torch.sparse_coo_tensor(self.indices.unsqueeze(0), self.values, self.dense_size)

    def to_dense(self) -> Tensor:
        """Convert the rows to the full dense matrix."""
        return self.values.new_zeros(self.dense_size).index_add_(0, self.indices, self.values)

    def sparse_size(self) -> tuple[int, int]:
        """Numbers held, and numbers of the whole matrix."""
        return self.indices.numel() + self.values.numel(), math.prod(self.dense_size)

    def add(self, b: SparseTensor) -> None:
        """Add another matrix of the same size."""
        if self.dense_size != b.dense_size:
            raise refused("add-sizes", self.dense_size, b.dense_size)
        self.indices = torch.cat([self.indices, b.indices])
        self.values = torch.cat([self.values, b.values])

    def __repr__(self) -> str:
        stored, whole = self.sparse_size()
        return (
            f"SparseTensor(rows={self.indices.numel()}, dense_size={self.dense_size}, reduction={whole / stored:.2f})"
        )


# ---- a tensor cut over a group


class PartitionedTensor:
    """A tensor of which every rank of a group keeps one stretch; the same tensor was given on all of them.

    Attributes:
        local_data: [n], this rank's stretch; the last one may be shorter.
        orig_size: Shape of the whole.
    """

    def __init__(self, tensor: Tensor | None, group: Any, partition_meta: Tensor | None = None) -> None:
        self.group = ds_comm.as_group(group)
        self.orig_size: list[int] = []
        if tensor is not None:
            flat = tensor.detach().reshape(-1)
            self.orig_size = list(tensor.shape)
            share = self._share
            self.local_data = flat[share * self.group.rank : share * (self.group.rank + 1)].clone()
            self.orig_device = tensor.device
        elif partition_meta is not None:
            self.orig_size = [int(size) for size in partition_meta.tolist()]

    @property
    def _share(self) -> int:
        return -(-math.prod(self.orig_size) // self.group.size)

    @classmethod
    def from_meta(cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None) -> PartitionedTensor:
        """Rebuild a tensor from the results of `to_meta` and `data`."""
        partitioned = cls(None, group, meta)
        partitioned.local_data = local_part if device is None else local_part.to(device)
        partitioned.orig_device = partitioned.local_data.device
        return partitioned

    def to_meta(self) -> Tensor:
        """Return the shape of the full tensor, int64."""
        return torch.tensor(self.orig_size, dtype=torch.int64, device=self.local_data.device)

    data = tells("local_data", "Return this rank's shard of the tensor.")

    local_size = calls("local_data.size", "Return the shape of this rank's shard.")

    def full(self, device: Any = None) -> Tensor:
        """Gather the full tensor from all shards. Collective over the group."""
        padded = self.local_data.new_zeros(self._share)
        padded[: self.local_data.numel()] = self.local_data
        whole = padded.new_empty(self._share * self.group.size)
        ds_comm.all_gather_single(whole, padded, self.group, unit="partitioned").wait()
        whole = whole[: math.prod(self.orig_size)].view(self.orig_size)
        return whole if device is None else whole.to(device)


class NoGatherHandle:
    """The gather of a parameter that is here already."""

    def __init__(self, param: Any = None) -> None:
        self.param = param

    wait = answers(None, "Do nothing: no all-gather was started.")


class MultipleAllGatherHandles:
    """Several gathers."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = list(handles)

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait until all all-gathers are complete."""
        for handle in self.handles:
            handle.wait(handle_dependency=handle_dependency)


class AllGatherHandle:
    """A gather that was begun."""

    def __init__(self, handle: Any, param: Any = None, quantization: Any = None, **options: Any) -> None:
        del quantization, options
        self.handle, self.param = handle, param

    wait = method(
        lambda self, handle_dependency=True: self.handle.wait(), "Wait until the parameter's all-gather is complete."
    )


# ---- linear layers


def __getattr__(name: str) -> Any:
    if name not in ("autocast_custom_fwd", "autocast_custom_bwd"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    decorate: Callable[..., Any] = getattr(torch.amp, name.removeprefix("autocast_"))
    return partial(decorate, device_type=get_accelerator().device_name())  # known when it is asked for


class LinearFunctionForZeroStage3(torch.autograd.Function):
    """x W^T + b as one node, for programs that look for it; under a transform of torch.func, too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        x, weight, *rest = inputs
        ctx.has_bias = bool(rest) and rest[0] is not None
        kind = x.device.type
        ctx.cast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.cast is not None:
            kind, dtype = ctx.cast
            with torch.autocast(kind, dtype):
                return _gradients(ctx, x, weight, grad)
        return _gradients(ctx, x, weight, grad)


def _gradients(ctx: Any, x: Tensor, weight: Tensor, grad: Tensor) -> Any:
    flat = grad.reshape(-1, grad.shape[-1])
    return (
        grad.matmul(weight) if ctx.needs_input_grad[0] else None,
        flat.t().matmul(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None,
        flat.sum(0) if ctx.has_bias else None,
    )


def zero3_linear_wrap(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  upstream's name
    """Apply `torch.nn.functional.linear` as a single node of the graph."""
    output: Tensor = LinearFunctionForZeroStage3.apply(input, weight, bias)
    return output


class LinearModuleForZeroStage3(nn.Linear):
    """`torch.nn.Linear`: a unit of ds-zero keeps no weight for the backward anyway."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Linear's name
        return zero3_linear_wrap(input, self.weight, self.bias)


# ---- sequences


def single_all_to_all(
    input: Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int, group: Any, async_op: bool = False,  # noqa: A002
    handle: Any = None, type: str | None = None, num_kv_heads: int | None = None,  # noqa: A002
) -> Tensor:  # fmt: skip
    """Cut dim `scatter_idx` over the group and put together dim `gather_idx`. Differentiable.

    Heads (dim 2) that ranks do not divide are cut as `get_shard_size_list` says, from then on by `num_kv_heads`, as upstream has it.
    """
    del batch_dim_idx, async_op, handle, type, num_kv_heads  # of upstream's own streams, and what the tensor says
    x, ranks, scattered, gathered = input, ds_comm.as_group(group), None, None
    if scatter_idx == 2 and x.shape[2] % ranks.size:
        if get_num_kv_heads() is None:
            set_num_kv_heads(x.shape[2])
        scattered = get_shard_size_list(x.shape[2], ranks.size)
    elif gather_idx == 2 and get_num_kv_heads() is not None:
        gathered = [int(heads) for heads in ds_comm.all_gather_json(x.shape[2], ranks)]
    output: Tensor = seq_all_to_all(
        x, group, scatter_dim=scatter_idx, gather_dim=gather_idx, scatter_sizes=scattered, gather_sizes=gathered
    )
    return output


class SeqAllToAll:
    """The exchange of Ulysses: [sequence / N, heads] to [sequence, heads / N], and back as its gradient."""

    @staticmethod
    def apply(group: Any, x: Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int = 0, *others: Any) -> Tensor:
        """Apply `single_all_to_all` with upstream's order of arguments."""
        return single_all_to_all(x, scatter_idx, gather_idx, batch_dim_idx, group, *others)
