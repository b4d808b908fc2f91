"""Chunked layers on ranks that share a sequence, against plain ones in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from deepspeed.sequence.fpdt_layer import FPDT_FFN, FPDT_Attention, FPDT_InputConstruct, FPDT_LogitsLoss
from torch import Tensor
from torch.nn import functional as F

from ds_comm import world_group
from ds_config.errors import UnsupportedError
from ds_testing import world

TOKENS, BATCH, WIDTH, HEADS, SIZE, WORDS = 16, 2, 24, 4, 6, 11
CONFIG = SimpleNamespace(
    kv_channels=SIZE, num_attention_heads=HEADS, num_key_value_heads=2, hidden_size=WIDTH, attention_dropout=0.0,
    ds_sequence_parallel_fpdt_chunk_size=8,
)  # fmt: skip


def drawn() -> list[Tensor]:
    torch.manual_seed(3)
    shapes = [(48, WIDTH), (48,), (WIDTH, 24), (WIDTH,), (32, WIDTH), (32,), (WIDTH, 32), (WIDTH,), (WORDS, WIDTH)]
    return [torch.randn(shape).mul_(0.3).requires_grad_() for shape in shapes]


def plain(x: Tensor, labels: Tensor, p: list[Tensor]) -> Tensor:
    q, k, v = F.linear(x, p[0], p[1]).transpose(0, 1).unflatten(-1, (-1, SIZE)).transpose(1, 2).split([HEADS, 2, 2], 1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    x = F.linear(out.transpose(0, 1), p[2], p[3])
    x = F.linear(F.gelu(F.linear(x, p[4], p[5]), approximate="tanh"), p[6], p[7])
    return F.cross_entropy(F.linear(x, p[8]).flatten(0, 1), labels.t().flatten(), reduction="none").view(TOKENS, BATCH)


@world(2)
def test_losses_and_gradients_are_those_of_plain_layers():
    ranks, params = world_group(), drawn()
    whole, labels = torch.randn(TOKENS, BATCH, WIDTH), torch.randint(WORDS, (BATCH, TOKENS))
    expected = plain(whole, labels, params)
    want = torch.autograd.grad(expected.square().sum(), params)
    places = torch.arange(TOKENS).expand(BATCH, -1)
    given = FPDT_InputConstruct(places, labels, places, None, None, CONFIG, 2, ranks.rank).generate()
    mine, own_labels, order, *_ = given
    x = whole[mine[0]]
    layer = FPDT_Attention(CONFIG, *params[:4], ranks.pg, return_bias=False, chunk_size=8)
    x, none = layer(x, None, None, None)
    assert none is None
    x, _ = FPDT_FFN.apply(x, *params[4:8], True, 4)
    found = FPDT_LogitsLoss.apply(x, own_labels, params[8], ranks.rank, 2, ranks.pg, 2)
    torch.testing.assert_close(found, expected[order[0]])
    grads = torch.autograd.grad(found.square().sum(), params)
    for grad, whole_grad in zip(grads, want, strict=True):
        torch.distributed.all_reduce(grad)
        assert (grad - whole_grad).norm() < 1e-5 * whole_grad.norm()
    with pytest.raises(UnsupportedError, match="a mask"):
        layer(x, torch.ones(1), None, None)
