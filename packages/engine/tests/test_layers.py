"""Sections that change a model's layers: block-sparse attention, and frozen weights as codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_engine
from ds_config.errors import DsError, PlanError, UnsupportedError
from ds_engine.model_sections import SparseAttentionConfig
from ds_engine.transforms.quantized_weights import CodedLinear
from ds_testing import world

WIDTH = 32


class Adapted(nn.Module):
    """A frozen base and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.other, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.base.requires_grad_(False)
        self.other.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.other(torch.tanh(self.base(x))))).square().mean()


def made(model: nn.Module, **section: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **section}
    return ds_engine.initialize(model=model, config=config)[0]


@world(1)
@pytest.mark.parametrize("bits", [4, 8])
def test_frozen_matrices_are_codes_and_come_back_as_numbers(bits: int) -> None:
    model = Adapted()
    before, x = model.base.weight.detach().clone(), torch.randn(2, WIDTH)
    expected = model(x)
    named = {"post_init_quant": {"base": {"num_bits": bits, "group_size": 16}}}
    engine = made(model, weight_quantization=named)
    assert isinstance(model.base, CodedLinear)
    assert isinstance(model.other, nn.Linear)
    assert model.base.codes.nbytes <= before.nbytes * (bits + 4) / 32
    torch.testing.assert_close(engine(x), expected, atol=0.02, rtol=0.05 if bits == 4 else 0.01)
    engine.backward(engine(x))
    engine.step()
    engine.close()
    assert isinstance(model.base, nn.Linear)
    torch.testing.assert_close(model.base.weight, before, atol=0.04 if bits == 4 else 0.003, rtol=0)


@world(1)
def test_without_a_frozen_layer_there_is_nothing_to_quantise() -> None:
    with pytest.raises(PlanError, match="no frozen matrix") as caught:
        made(nn.Linear(4, 4), weight_quantization={})
    assert caught.value.code == "quantize-weights"


def attending(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **changes))


@world(1)
def test_a_transformers_model_sees_the_blocks_of_the_section() -> None:
    tokens = torch.arange(24).reshape(1, 24)
    plain = attending()(tokens, labels=tokens).loss
    engine = made(attending(), sparse_attention={"mode": "dense", "block": 4, "attention": "unidirectional"})
    torch.testing.assert_close(engine(tokens, labels=tokens).loss, plain)
    engine.close()
    window = {"mode": "fixed", "block": 4, "num_local_blocks": 1, "num_global_blocks": 0, "attention": "unidirectional"}
    model = attending()
    engine = made(model, sparse_attention=window)
    seen = engine(tokens).logits
    other = tokens.clone()
    other[0, :16] = 7
    torch.testing.assert_close(engine(other).logits[0, 16:], seen[0, 16:])  # the last two windows do not see the others
    engine.close()
    assert not torch.allclose(model(other).logits[0, 16:], seen[0, 16:])


@world(1)
def test_attention_of_ones_own_uses_the_module() -> None:
    with pytest.raises(UnsupportedError) as caught:
        made(Adapted(), sparse_attention={"mode": "fixed"})
    assert caught.value.code == "sparse-attention"
    attention = ds_engine.SparseSelfAttention(SparseAttentionConfig(mode="bigbird", block=4, num_random_blocks=1))
    query = torch.randn(1, 2, 10, 8)
    assert attention(query, query, query).shape == query.shape
    with pytest.raises(DsError, match="do not end"):
        made(
            Adapted(),
            sparse_attention={"mode": "variable", "global_block_indices": [3], "global_block_end_indices": [2]},
        )
