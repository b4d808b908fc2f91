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


class Ranks:
    def __init__(self, group: Any) -> None:
        self.group = group

    def get_tensor_model_parallel_group(self) -> Any:
        return self.group

    def get_tensor_model_parallel_world_size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


def turned(x: Tensor, by: Tensor) -> Tensor:
    return x * by


@pytest.mark.parametrize("post", [False, True])
@world(2)
def test_layers_in_two_halves_are_those_of_one_process(post: bool) -> None:
    from deepspeed.runtime.domino.transformer import DominoTransformer, ModelType

    torch.set_default_dtype(torch.float64)
    config = SimpleNamespace(
        **vars(CONFIG), num_layers=2, hidden_size=8, kv_channels=2, num_attention_heads=4, ffn_hidden_size=12,
        layernorm_epsilon=1e-5, attention_dropout=0.0, hidden_dropout=0.0, add_bias_linear=True, gated_linear_unit=False,
        apply_residual_connection_post_layernorm=post, domino_intra_layer_overlap=False,
        init_method=nn.init.normal_, output_layer_init_method=nn.init.normal_,
    )  # fmt: skip
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    whole = DominoTransformer(config, Ranks(None), turned, ModelType.encoder_or_decoder)
    part = DominoTransformer(config, Ranks(dist.group.WORLD), turned, ModelType.encoder_or_decoder)
    for (name, mine), full in zip(part.named_parameters(), whole.parameters(), strict=True):
        cut = [dim for dim in range(mine.dim()) if mine.shape[dim] != full.shape[dim]]
        assert bool(cut) == any(word in name for word in ("query_key_value", "fc1", "dense.weight", "fc2.weight"))
        mine.data.copy_(full.chunk(size, cut[0])[rank] if cut else full)
    x, weights, angles = torch.randn(5, 4, 8), torch.randn(5, 4, 8), torch.randn(5, 2)
    grads = []
    for model in (whole, part):
        again = x.clone().requires_grad_()
        out = model(again, None, rotary_pos_emb=angles)
        (out * weights).sum().backward()
        grads.append((out, again.grad))
    plain = x
    for layer in whole.layers:  # without halves
        normed = layer.input_layernorm(plain)
        mixed = layer.self_attention.query_key_value(normed, {}, "")[0].view(5, 4, 4, 6).permute(1, 2, 0, 3)
        query, key, value = mixed.split(2, dim=3)
        seen = functional.scaled_dot_product_attention(query * angles, key * angles, value, is_causal=True)
        out, bias = layer.self_attention.dense(seen.permute(2, 0, 1, 3).reshape(5, 4, 8))
        plain = out + bias + (normed if post else plain)
        normed = layer.post_attention_layernorm(plain)
        out, bias = layer.linear_fc2(functional.gelu(layer.linear_fc1(normed, {}, "")[0]))
        plain = out + bias + (normed if post else plain)
    torch.testing.assert_close(grads[0][0], whole.final_layernorm(plain))
    torch.testing.assert_close(grads[1], grads[0])
    for mine, full in zip(part.parameters(), whole.parameters(), strict=True):
        cut = [dim for dim in range(mine.dim()) if mine.shape[dim] != full.shape[dim]]
        torch.testing.assert_close(mine.grad, full.grad.chunk(size, cut[0])[rank] if cut else full.grad)
    config.gated_linear_unit = True
    with pytest.raises(UnsupportedError, match="gated_linear_unit"):
        DominoTransformer(config, Ranks(None), None, ModelType.encoder_or_decoder)
    torch.set_default_dtype(torch.float32)


def test_a_wait_without_a_sum_is_said() -> None:
    from deepspeed.runtime.domino import async_linear, transformer

    waited = transformer._Wait_bwd_comm(torch.ones(2, requires_grad=True), {}, "BATCH0")
    with pytest.raises(AssertionError, match="no column layer has started one under this key"):
        waited.sum().backward()
    with pytest.raises(AssertionError, match="layers of 0 groups say the ranks"):
        async_linear.DominoAsyncColumnParallelLinearImpl.apply(torch.ones(2, 2), torch.ones(2, 2), None, {}, "key")
    with pytest.raises(UnsupportedError, match="half_batches"):
        _ = transformer.CoreAttention
