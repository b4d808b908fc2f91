"""Linear layers of `deepspeed.runtime.domino`, ordered by hand as upstream's layers do it: gradients of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ds_config.errors import UnsupportedError
from ds_testing import world

CONFIG = SimpleNamespace(params_dtype=torch.float64, perform_initialization=True)


def layers(inner: int, group: Any) -> tuple[nn.Module, nn.Module]:
    from deepspeed.runtime.domino import async_linear

    fill = nn.init.ones_
    column = async_linear.DominoAsyncColumnParallelLinear(8, inner, group, CONFIG, fill, bias=True)
    row = async_linear.RowParallelLinearNoComm(inner, 8, CONFIG, fill, bias=True, skip_bias_add=True)
    return column, row


@world(2)
def test_two_halves_ordered_by_hand() -> None:
    from deepspeed.runtime.domino import async_linear
    from deepspeed.runtime.domino.transformer import DominoUtil, _Wait_bwd_comm

    torch.manual_seed(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    up, down = nn.Linear(8, 12).double(), nn.Linear(12, 8).double()
    column, row = layers(6, dist.group.WORLD)
    with torch.no_grad():
        column.weight.copy_(up.weight.chunk(size)[rank])
        column.bias.copy_(up.bias.chunk(size)[rank])
        row.weight.copy_(down.weight.chunk(size, 1)[rank])
        row.bias.copy_(down.bias)
    x = torch.randn(4, 3, 8, dtype=torch.float64, requires_grad=True)
    handles: dict[str, Any] = {}

    def half(part: Tensor, key: str) -> tuple[Tensor, Any]:
        hidden, added = column(_Wait_bwd_comm(part, handles, key), handles, key)
        assert added is None
        out, bias = row(functional.gelu(hidden))
        assert bias is row.bias
        work = dist.all_reduce(out, async_op=True)
        return out, work

    pairs = [half(part, key) for part, key in zip(x.chunk(2), (DominoUtil.BATCH_0, DominoUtil.BATCH_1), strict=True)]
    for _, work in pairs:
        work.wait()
    (torch.cat([out for out, _ in pairs]) + row.bias).square().sum().backward()
    again = x.detach().clone().requires_grad_()
    down(functional.gelu(up(again))).square().sum().backward()
    torch.testing.assert_close(x.grad, again.grad)
    x.grad = None
    waited = _Wait_bwd_comm(x, handles, "key")
    async_linear.DominoAsyncColumnParallelLinearImpl.apply(waited, column.weight, None, handles, "key").sum().backward()
    torch.testing.assert_close(x.grad, up.weight.sum(0).expand_as(x))
    column.weight.grad -= x.detach().flatten(0, 1).sum(0)
    torch.testing.assert_close(column.weight.grad, up.weight.grad.chunk(size)[rank])
    torch.testing.assert_close(column.bias.grad, up.bias.grad.chunk(size)[rank])
    torch.testing.assert_close(row.weight.grad, down.weight.grad.chunk(size, 1)[rank])


def test_a_wait_without_a_sum_is_said() -> None:
    from deepspeed.runtime.domino import async_linear, transformer

    waited = transformer._Wait_bwd_comm(torch.ones(2, requires_grad=True), {}, "BATCH0")
    with pytest.raises(AssertionError, match="no column layer has started one under this key"):
        waited.sum().backward()
    with pytest.raises(AssertionError, match="layers of 0 groups say the ranks"):
        async_linear.DominoAsyncColumnParallelLinearImpl.apply(torch.ones(2, 2), torch.ones(2, 2), None, {}, "key")
    with pytest.raises(UnsupportedError, match="half_batches"):
        _ = transformer.DominoTransformer
