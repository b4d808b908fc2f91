"""`deepspeed.runtime.domino`: the linear layers, and the wait for the sum of a gradient, for programs that order half batches themselves.

    out, _ = column(wait_for_backward(x, handles, "BATCH0"), handles, "BATCH0")

In backward the column layer starts the sum of its input's gradient over the ranks, computes the gradient of its weight meanwhile, and leaves
the work under the key; the wait before it takes the work from there. A model that is cut by a plan does the same by itself
(`tensor_parallel.half_batches`), in its own layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_comm
from deepspeed._ours.base.raising import refused
from ds_accel import get_accelerator
from ds_comm import Group, as_group
from ds_comm.groups import self_group

Handles = MutableMapping[str, Any]
_layers: weakref.WeakSet[DominoAsyncColumnParallelLinear] = (
    weakref.WeakSet()
)  # they know the ranks, which the function is not told


class DominoUtil:
    """Keys of the two halves, and a place for their works."""

    BATCH_0 = "BATCH0"
    BATCH_1 = "BATCH1"
    HANDLE_DIC: ClassVar[dict[str, Any]] = {BATCH_0: None, BATCH_1: None}


class DominoModule(nn.Module):
    """A module; what upstream's layers are."""


class NoOper(torch.autograd.Function):
    """`x` as it is; its backward waits for the work under the key."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle_dic: Handles, h_id: str) -> Tensor:
        ctx.handle_dic, ctx.h_id = handle_dic, h_id
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        handle = ctx.handle_dic.get(ctx.h_id)
        if handle is None:
            raise refused("domino-wait", ctx.h_id)
        handle.wait()
        ctx.handle_dic[ctx.h_id] = None  # it holds the group
        return grads[0], None, None


def _Wait_bwd_comm(input_: Tensor, dic_: Handles, h_id: str) -> Tensor:  # noqa: N802  upstream's name
    """Return `input_`, whose gradient is waited for: the sum that a column layer has started under the key `h_id` of `dic_`."""
    result: Tensor = NoOper.apply(input_, dic_, h_id)
    return result


class DominoAsyncColumnParallelLinearImpl:
    """`apply(x, weight, bias, handles, key)`: a linear layer whose backward starts the sum of its input's gradient first.

    The ranks are those of the `DominoAsyncColumnParallelLinear` layers there are, if they have the same.
    """

    @staticmethod
    def apply(inp: Tensor, weight: Tensor, bias: Tensor | None, handle_dic: Handles, h_id: str) -> Tensor:
        groups = {layer.group.ranks: layer.group for layer in _layers}
        if len(groups) != 1:
            raise refused("domino-groups", len(groups))
        result: Tensor = _AsyncColumn.apply(inp, weight, bias, (handle_dic, h_id, *groups.values()))
        return result


class _AsyncColumn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None, target: tuple[Handles, str, Group]
    ) -> Tensor:
        ctx.save_for_backward(inp, weight)
        ctx.has_bias, ctx.target = bias is not None, target
        return functional.linear(inp, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        inp, weight = ctx.saved_tensors
        grad_input = grad @ weight
        handles, key, group = ctx.target
        handles[key] = ds_comm.all_reduce(grad_input, group=group, async_op=True)
        rows = grad.flatten(0, -2)
        grad_bias = rows.sum(0) if ctx.has_bias else None
        return grad_input, rows.t() @ inp.flatten(0, -2), grad_bias, None


class _Linear(nn.Module):
    def __init__(
        self, input_size: int, output_size: int, config: Any, init_method: Callable[[Tensor], Any], bias: bool
    ) -> None:
        super().__init__()
        place = {"device": get_accelerator().device(), "dtype": config.params_dtype}
        self.weight = nn.Parameter(torch.empty(output_size, input_size, **place))
        self.bias = nn.Parameter(torch.zeros(output_size, **place)) if bias else None
        if config.perform_initialization:
            init_method(self.weight)


class DominoAsyncColumnParallelLinear(_Linear):
    """This rank's part of a linear layer that is cut by outputs.

    Args:
        output_size: Of this rank's part.
        _tp_group: torch's group of the tensor-parallel ranks, the same for all layers; None: this rank alone.
        config: Its `params_dtype` and `perform_initialization` are read.
        init_method: Fills the weight in place.
        skip_bias_add: The bias is returned beside the result instead of added.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        _tp_group: Any,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        skip_bias_add: bool = False,
    ) -> None:
        super().__init__(input_size, output_size, config, init_method, bias)
        self.skip_bias_add = skip_bias_add
        self.group = self_group("tensor") if _tp_group is None else as_group(_tp_group)
        _layers.add(self)

    def forward(self, input_: Tensor, handle_dic: Handles, h_id: str) -> tuple[Tensor, Tensor | None]:
        """Return (this rank's outputs, the bias if it is to be added elsewhere)."""
        bias = None if self.skip_bias_add else self.bias
        out: Tensor = _AsyncColumn.apply(input_, self.weight, bias, (handle_dic, h_id, self.group))
        return out, self.bias if self.skip_bias_add else None


class RowParallelLinearNoComm(_Linear):
    """This rank's part of a linear layer that is cut by inputs, whose result the caller sums over the ranks."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        stride: int = 1,
        skip_bias_add: bool = False,
    ) -> None:
        del stride  # of a way to initialize that upstream's layer does not have
        super().__init__(input_size, output_size, config, init_method, bias)
        self.skip_bias_add = skip_bias_add

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (this rank's share of the outputs, the bias if it is to be added elsewhere)."""
        bias = None if self.skip_bias_add else self.bias
        return functional.linear(input_, self.weight, bias), self.bias if self.skip_bias_add else None
