"""The trainable BERT layer is BERT's, whatever is computed again; its weights go back into a model's own layers."""

from __future__ import annotations

import json

import deepspeed
import pytest
import torch
from deepspeed.module_inject import revert_transformer_layer
from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from torch import nn

from ds_config.errors import UnsupportedError
from ds_testing import world

SIZES = {"hidden_size": 16, "intermediate_size": 24, "heads": 4, "num_hidden_layers": 2, "initializer_range": 0.2}


def _layer(**options):
    torch.manual_seed(3)
    config = DeepSpeedTransformerConfig(**SIZES, attn_dropout_ratio=0.0, hidden_dropout_ratio=0.0, **options)
    layer = DeepSpeedTransformerLayer(config)
    with torch.no_grad():
        for param in layer.parameters():
            param.add_(torch.randn(param.shape) * 0.1)
    return layer


def _bert(**options):
    transformers = pytest.importorskip("transformers")
    from transformers.models.bert.modeling_bert import BertLayer

    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=4, hidden_act="gelu_new", attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0, attn_implementation="eager", **options,
    )  # fmt: skip
    return config, lambda config: BertLayer(config)


def test_it_is_transformers_layer_after_revert():
    config, make = _bert()
    layer = _layer(pre_layer_norm=False)
    model = nn.Sequential(nn.Linear(16, 16), nn.ModuleDict({"layer": layer}))
    x, mask = torch.randn(2, 7, 16), torch.zeros(2, 1, 1, 7)
    mask[1, ..., 4:] = -1e4
    want = layer(x, mask)
    assert revert_transformer_layer(make, model, config) is model
    plain = model[1]["layer"]
    assert type(plain).__name__ == "BertLayer"
    out = plain(x, mask)
    torch.testing.assert_close(out[0] if isinstance(out, tuple) else out, want, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(module, DeepSpeedTransformerLayer) for module in model.modules())


def test_norms_that_come_first():
    layer = _layer(return_tuple=True)
    x = torch.randn(2, 5, 16)
    (out,) = layer(x)
    norm, mid = nn.LayerNorm(16, eps=1e-12), nn.LayerNorm(16, eps=1e-12)
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    with torch.no_grad():
        for mine, theirs in (
            (norm.weight, layer.norm_w), (norm.bias, layer.norm_b), (mid.weight, layer.attn_nw), (mid.bias, layer.attn_nb),
            (attention.in_proj_weight, layer.attn_qkvw), (attention.in_proj_bias, layer.attn_qkvb),
            (attention.out_proj.weight, layer.attn_ow), (attention.out_proj.bias, layer.attn_ob),
        ):  # fmt: skip
            mine.copy_(theirs)
    y = norm(x)
    rest = x + attention(y, y, y, need_weights=False)[0]
    inner = nn.functional.gelu(mid(rest) @ layer.inter_w.T + layer.inter_b, approximate="tanh")
    torch.testing.assert_close(out, rest + inner @ layer.output_w.T + layer.output_b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("option", ["gelu_checkpoint", "attn_dropout_checkpoint", "normalize_invertible"])
def test_what_is_computed_again_changes_nothing(option, first):
    grads = []
    for on in (False, True):
        layer = _layer(pre_layer_norm=first, **{option: on})
        layer.config.attn_dropout_ratio = layer.config.hidden_dropout_ratio = 0.3
        torch.manual_seed(5)
        x = torch.randn(2, 5, 16, requires_grad=True)
        layer(x).square().sum().backward()
        grads.append([x.grad, *(param.grad for param in layer.parameters())])
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right)


def test_options(tmp_path):
    config = DeepSpeedTransformerConfig(hidden_size=8, heads=2, num_hidden_layers=2)
    assert (config.intermediate_size, config.pre_layer_norm, config.layer_id) == (32, True, -1)
    number = DeepSpeedTransformerLayer.layer_id
    layer = deepspeed.DeepSpeedTransformerLayer(config)
    assert (config.layer_id, DeepSpeedTransformerLayer.layer_id) == (number, number + 1)
    assert layer.attn_nw.eq(1).all()
    assert layer.attn_qkvw.eq(0).all()  # initializer_range was not given
    (tmp_path / "c.json").write_text(json.dumps({"hidden_size": 8, "max_seq_length": 3}), encoding="utf-16")
    read = DeepSpeedTransformerConfig.from_json_file(tmp_path / "c.json")
    assert (read.hidden_size, read.max_seq_length) == (8, 3)
    big = DeepSpeedTransformerConfig(hidden_size=256, heads=2, num_hidden_layers=8, initializer_range=0.02)
    drawn = DeepSpeedTransformerLayer(big)
    assert drawn.attn_qkvw.std().item() == pytest.approx(0.02, rel=0.05)
    assert drawn.output_w.std().item() == pytest.approx(0.005, rel=0.05)
    weights = [torch.randn(8, 8) for _ in range(4)] + [
        torch.ones(8),
        torch.randn(32, 8),
        torch.randn(8, 32),
        torch.ones(8),
    ]
    given = DeepSpeedTransformerLayer(config, weights)
    assert torch.equal(given.attn_qkvw, torch.cat(weights[:3]))
    assert torch.equal(given.output_w, weights[6])
    with pytest.raises(ValueError, match="heads = -1, num_hidden_layers = -1"):
        DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(hidden_size=8))
    with pytest.raises(ValueError, match="3 heads do not divide hidden_size = 8"):
        DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(hidden_size=8, heads=3, num_hidden_layers=1))
    with pytest.raises(UnsupportedError, match="head_mask"):
        layer(torch.ones(1, 2, 8), head_mask=torch.ones(2))


@world(2)
def test_it_trains_at_stage_3_as_alone() -> None:
    x = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(1))
    alone = _layer()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    config = {
        "train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=_layer(gelu_checkpoint=True), config=config)
    for _ in range(2):
        alone(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(x.chunk(2)[torch.distributed.get_rank()]).square().mean())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for (name, mine), theirs in zip(engine.module.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-5, msg=name)
    engine.destroy()
