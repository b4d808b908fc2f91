"""`deepspeed.runtime.domino.transformer`: layers of a GPT over tensor-parallel ranks, which run the halves of a batch in turn.

While the sum over the ranks of one half's outputs travels, the other half is computed; so in backward. A half is a generator that stops where the
other's turn is. Parameters have upstream's names, and numbers are those of the layers without halves. Attention is causal, whatever the mask.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_comm
from deepspeed._ours.base.raising import not_supported
from deepspeed._ours.parallel.domino_layers import (
    DominoAsyncColumnParallelLinear,
    DominoModule,
    DominoUtil,
    RowParallelLinearNoComm,
    _Wait_bwd_comm,
)

Half = Generator[None, None, Tensor]
Rotate = Callable[[Tensor, Any], Tensor]

LayerType = enum.Enum("LayerType", "encoder decoder")
AttnType = enum.Enum("AttnType", "self_attn cross_attn")
AttnMaskType = enum.Enum("AttnMaskType", "padding causal")
ModelType = enum.Enum("ModelType", "encoder_or_decoder encoder_and_decoder")


class bias_dropout_add(nn.Module):  # noqa: N801  upstream's name
    """`dropout(x + bias) + residual`."""

    def __init__(self, prob: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(prob)

    def forward(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        out: Tensor = self.dropout(x if bias is None else x + bias)
        return out + residual


class ShardedAttention(DominoModule):
    """This rank's heads of a causal self-attention."""

    def __init__(self, config: Any, mpu: Any, apply_rotary_pos_emb: Rotate | None) -> None:
        super().__init__()
        self.apply_rotary_pos_emb, self.dropout = apply_rotary_pos_emb, config.attention_dropout
        self.heads, self.each = (
            config.num_attention_heads // mpu.get_tensor_model_parallel_world_size(),
            config.kv_channels,
        )
        inner, bias = self.heads * self.each, config.add_bias_linear
        self.query_key_value = DominoAsyncColumnParallelLinear(
            config.hidden_size, 3 * inner, mpu.get_tensor_model_parallel_group(), config, config.init_method, bias
        )
        self.dense = RowParallelLinearNoComm(
            inner, config.hidden_size, config, config.output_layer_init_method, bias, skip_bias_add=True
        )

    def forward(self, hidden_states: Tensor, key: str, rotary_pos_emb: Any = None) -> tuple[Tensor, Tensor | None]:
        """Return (this rank's share of the outputs, [s, b, h]; the bias of their sum)."""
        mixed, _ = self.query_key_value(hidden_states, DominoUtil.HANDLE_DIC, key)
        length, batch = mixed.shape[:2]
        query, keys, values = mixed.view(length, batch, self.heads, 3 * self.each).permute(1, 2, 0, 3).chunk(3, dim=3)
        if rotary_pos_emb is not None and self.apply_rotary_pos_emb is not None:
            of_query, of_key = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            query, keys = self.apply_rotary_pos_emb(query, of_query), self.apply_rotary_pos_emb(keys, of_key)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(query, keys, values, dropout_p=dropout, is_causal=True)
        out: tuple[Tensor, Tensor | None] = self.dense(seen.permute(2, 0, 1, 3).reshape(length, batch, -1))
        return out


class DominoTransformerLayer(DominoModule):
    """One layer: attention, then two linear layers with a gelu between; each with a norm before it and what it got added.

    Args:
        config: Megatron's. `gated_linear_unit` is refused: upstream computes a plain gelu.
        mpu: Its tensor-parallel group is read.
        apply_rotary_pos_emb: Turns queries, or keys, by `rotary_pos_emb`.
    """

    def __init__(
        self,
        config: Any,
        mpu: Any,
        apply_rotary_pos_emb: Rotate | None,
        layer_number: int,
        layer_type: Any = LayerType.encoder,
        self_attn_mask_type: Any = AttnMaskType.causal,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        del layer_type, self_attn_mask_type  # one kind of layer, one mask
        if config.gated_linear_unit or drop_path_rate:
            raise not_supported(
                f"DominoTransformerLayer with gated_linear_unit = {config.gated_linear_unit}, drop_path_rate = {drop_path_rate}",
                "Leave both out, or give your own layers to tensor_parallel.half_batches.",
            )
        self.layer_number, group = layer_number, mpu.get_tensor_model_parallel_group()
        self.apply_residual_connection_post_layernorm = config.apply_residual_connection_post_layernorm
        hidden, bias = config.hidden_size, config.add_bias_linear
        inner = config.ffn_hidden_size // mpu.get_tensor_model_parallel_world_size()
        self.input_layernorm = nn.LayerNorm(hidden, eps=config.layernorm_epsilon)
        self.self_attention = ShardedAttention(config, mpu, apply_rotary_pos_emb)
        self.post_attention_layernorm = nn.LayerNorm(hidden, eps=config.layernorm_epsilon)
        self.linear_fc1 = DominoAsyncColumnParallelLinear(hidden, inner, group, config, config.init_method, bias)
        self.linear_fc2 = RowParallelLinearNoComm(
            inner, hidden, config, config.output_layer_init_method, bias, skip_bias_add=True
        )
        self.bias_dropout_add_func = bias_dropout_add(config.hidden_dropout)

    def forward(
        self, hidden_states: tuple[Tensor, Tensor], attention_mask: Any = None, rotary_pos_emb: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return both halves' outputs. `attention_mask` is not read."""
        del attention_mask
        first, second = in_turn(
            *(self.turns(x, key, rotary_pos_emb) for x, key in zip(hidden_states, _KEYS, strict=True))
        )
        return first, second

    def turns(self, x: Tensor, key: str, rotary_pos_emb: Any) -> Half:
        """Run one half; stop where the other's turn is."""

        def attend(normed: Tensor) -> tuple[Tensor, Tensor | None]:
            result: tuple[Tensor, Tensor | None] = self.self_attention(normed, key, rotary_pos_emb)
            return result

        def widen(normed: Tensor) -> tuple[Tensor, Tensor | None]:
            inner, _ = self.linear_fc1(normed, DominoUtil.HANDLE_DIC, key)
            result: tuple[Tensor, Tensor | None] = self.linear_fc2(functional.gelu(inner))
            return result

        for norm, part in ((self.input_layernorm, attend), (self.post_attention_layernorm, widen)):
            normed = norm(x)  # as a residual it goes by the wait: autograd would add its gradient to a sum under way
            waited = _Wait_bwd_comm(normed, DominoUtil.HANDLE_DIC, key)
            yield  # in backward the gradient's sum travels while the other half's part runs
            out, bias = part(waited)
            work = ds_comm.all_reduce(out.detach(), group=self.linear_fc1.group, async_op=True)
            yield
            work.wait()
            x = self.bias_dropout_add_func(out, bias, normed if self.apply_residual_connection_post_layernorm else x)
        return x


class DominoTransformer(DominoModule):
    """`config.num_layers` layers over [s, b, h], whose batch runs in two halves, and a norm at the end.

    Args:
        post_layer_norm, post_process: Both: there is the norm at the end.
        model_type, layer_type, self_attn_mask_type, pre_process: Change nothing, as upstream.
    """

    def __init__(
        self,
        config: Any,
        mpu: Any,
        apply_rotary_pos_emb: Rotate | None,
        model_type: Any,
        layer_type: Any = LayerType.encoder,
        self_attn_mask_type: Any = AttnMaskType.causal,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        del pre_process
        self.model_type, self.num_layers = model_type, config.num_layers
        self.layers = nn.ModuleList(
            DominoTransformerLayer(
                config, mpu, apply_rotary_pos_emb, number, layer_type, self_attn_mask_type, drop_path_rate
            )
            for number in range(1, config.num_layers + 1)
        )
        has_norm = post_process and post_layer_norm
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon) if has_norm else None

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, rotary_pos_emb: Any = None) -> Tensor:
        """Return the outputs, [s, b, h]. `attention_mask` is not read."""
        del attention_mask
        halves = zip(hidden_states.chunk(2, dim=1), _KEYS, strict=True)
        return torch.cat(in_turn(*(self._half(x, key, rotary_pos_emb) for x, key in halves)), dim=1)

    def _half(self, x: Tensor, key: str, rotary_pos_emb: Any) -> Half:
        for layer in self.layers:
            x = yield from layer.turns(x, key, rotary_pos_emb)  # type: ignore[operator]
        return x if self.final_layernorm is None else self.final_layernorm(x)


_KEYS = (DominoUtil.BATCH_0, DominoUtil.BATCH_1)


def in_turn(*halves: Half) -> tuple[Tensor, ...]:
    """Run generators of as many stops each in turn, and return what they return."""
    done: list[Tensor] = []
    while not done:
        for half in halves:
            try:
                next(half)
            except StopIteration as end:
                done.append(end.value)
    return tuple(done)
