"""Operations that are counted equal what arithmetic says, for every way torch has to ask for a product, and for whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_engine.feature_table import FlopsProfilerConfig
from ds_engine.flops import ForwardCounter
from ds_engine.profiling import Profile, profile_text

transformers = pytest.importorskip("transformers")


class Of(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Tensor) -> Any:
        return self.call(*args)


def counted(call: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    counter, model = ForwardCounter(), Of(call)
    with counter.watch(model), torch.no_grad():
        model(*(torch.randn(shape) for shape in shapes))
    return counter.modules[0].flops


@pytest.mark.parametrize(
    ("call", "shapes", "flops"),
    [
        (lambda a, b: a @ b, [(3, 4), (4, 5)], 2 * 60),
        (lambda a, b: a @ b, [(7, 3, 4), (7, 4, 5)], 2 * 7 * 60),
        (lambda a, b: a @ b, [(3, 4), (4,)], 2 * 12),
        (lambda a, b: a @ b, [(4,), (4,)], 2 * 4),
        (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(2, 3, 4), (2, 5, 4)], 2 * 2 * 60),
        (F.linear, [(2, 3, 4), (5, 4)], 2 * 6 * 20),
        (F.conv2d, [(2, 3, 8, 8), (5, 3, 3, 3)], 2 * 2 * 5 * 36 * 27),
        (lambda x, w: F.conv1d(x, w, groups=2), [(2, 4, 8), (6, 2, 3)], 2 * 2 * 6 * 6 * 6),
        (F.scaled_dot_product_attention, [(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)], 2 * 2 * 4 * 6 * 5 * 16),
        (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            [(2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 8)],
            2 * 2 * 4 * 6 * 5 * 16,
        ),
    ],
)
def test_every_way_to_ask_for_a_product(call: Callable[..., Any], shapes: list[tuple[int, ...]], flops: int) -> None:
    assert counted(call, *shapes) == flops
    counter, model = ForwardCounter(), Of(call)
    with torch.inference_mode(), counter.watch(model):
        model(*(torch.randn(shape) for shape in shapes))
    assert counter.modules[0].flops == flops


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_counted(kind: Any) -> None:
    model, counter = kind(6, 8, 2, bidirectional=True), ForwardCounter()
    with counter.watch(model), torch.no_grad():
        model(torch.randn(5, 3, 6))
        under_way = counter.modules[0].flops
    flops = 2 * 5 * 3 * sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert (under_way, counter.modules[0].flops) == (flops, flops)


def test_layers_of_nn_transformer_are_counted_in_evaluation() -> None:
    model, counter = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(), ForwardCounter()
    with counter.watch(model), torch.no_grad():
        model(torch.randn(2, 6, 16))
    assert counter.modules[0].flops == 2 * (12 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 2 * 6 * 6 * 16)
    assert torch.backends.mha.get_fastpath_enabled()


def test_flex_attention_runs_and_is_counted() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    assert counted(flex_attention, (1, 2, 16, 8), (1, 2, 16, 8), (1, 2, 16, 8)) == 2 * 2 * 16 * 16 * 16


def decoder(config: Any, tokens: int, mlp: int) -> int:
    """Of a Llama-like model without its mlp's own sum: projections, attention, `mlp` operations a token, the head."""
    h, kv = config.hidden_size, config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    layer = tokens * (2 * 2 * h * h + 2 * 2 * h * kv + mlp) + 4 * tokens * tokens * h
    return config.num_hidden_layers * layer + 2 * tokens * h * config.vocab_size


def llama(attention: str) -> tuple[nn.Module, dict[str, Tensor], int]:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), ids(64), decoder(config, 64, 3 * 2 * 128 * 352)


def mixtral(attention: str) -> tuple[nn.Module, dict[str, Tensor], int]:
    config = transformers.MixtralConfig(
        vocab_size=512, hidden_size=128, intermediate_size=224, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, attn_implementation=attention,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), ids(64), decoder(config, 64, 2 * 128 * 4 + 2 * 3 * 2 * 128 * 224)


def gpt2(attention: str) -> tuple[nn.Module, dict[str, Tensor], int]:
    config = transformers.GPT2Config(vocab_size=512, n_embd=128, n_layer=2, n_head=8, attn_implementation=attention)
    layer = 64 * 2 * 12 * 128 * 128 + 4 * 64 * 64 * 128
    return transformers.GPT2LMHeadModel(config), ids(64), 2 * layer + 2 * 64 * 128 * 512


def bert(attention: str) -> tuple[nn.Module, dict[str, Tensor], int]:
    config = transformers.BertConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=8, intermediate_size=512, attn_implementation=attention
    )  # fmt: skip
    layer = 64 * 2 * (4 * 128 * 128 + 2 * 128 * 512) + 4 * 64 * 64 * 128
    return transformers.BertForMaskedLM(config), ids(64), 2 * layer + 64 * 2 * (128 * 128 + 128 * 512)


def vit(attention: str) -> tuple[nn.Module, dict[str, Tensor], int]:
    config = transformers.ViTConfig(
        image_size=32, patch_size=4, hidden_size=128, num_hidden_layers=2, num_attention_heads=8, intermediate_size=512,
        num_labels=10, attn_implementation=attention,
    )  # fmt: skip
    tokens = 65
    layer = tokens * 2 * (4 * 128 * 128 + 2 * 128 * 512) + 4 * tokens * tokens * 128
    flops = 2 * layer + 64 * 2 * 48 * 128 + 2 * 128 * 10
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(1, 3, 32, 32)}, flops


def ids(tokens: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(512, (1, tokens))}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [llama, gpt2, bert, vit, mixtral], ids=lambda make: make.__name__)
def test_whole_models_within_one_percent(make: Callable[[str], Any], attention: str) -> None:
    model, inputs, flops = make(attention)
    counter = ForwardCounter()
    with counter.watch(model):
        out = model(**inputs)
    assert counter.modules[0].flops == pytest.approx(flops, rel=0.01)
    with counter.watch_backward(model):
        out.logits.sum().backward()
    # Each product of the forward is two of backward; fused attention computes its scores once more.
    assert 2 * 0.95 < counter.backward / flops < 2 * 1.1
    assert counter.again == 0


def test_modules_add_up_and_an_ignored_class_counts_as_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 4)))
    counter = ForwardCounter()
    with counter.watch(model):
        model(torch.ones(3, 8))
    assert {m.name: m.flops for m in counter.modules} == {"": 1152, "0": 768, "1": 384, "1.0": 0, "1.1": 384}
    assert 0 < counter.modules[1].seconds < counter.modules[0].seconds
    with counter.watch(model, [nn.Sequential]):
        model(torch.ones(3, 8))
    assert counter.modules[0].flops == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_backward_computes_again_is_told_apart(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=reentrant))

    model, counter = Checkpointed(), ForwardCounter()
    with counter.watch(model):
        out = model(torch.ones(3, 8, requires_grad=True)).sum()
    inner, last = 2 * 3 * 8 * 16, 2 * 3 * 8 * 8
    assert counter.modules[0].flops == 2 * inner + last
    with counter.watch_backward(model):
        out.backward()
    # Without reentrance the forward ends when it has what backward needs, before its last product.
    assert counter.again == (2 * inner if reentrant else inner)
    assert counter.backward == 2 * (2 * inner + last)


def test_the_report_names_classes_by_level_and_every_module() -> None:
    model, inputs, _ = llama("sdpa")
    counter = ForwardCounter()
    with counter.watch(model):
        model(**inputs)
    text = profile_text(Profile(counter.modules, {"forward": 0.01}, 1), FlopsProfilerConfig(top_modules=2))
    lines = text.splitlines()
    level = next(line for line in lines if line.startswith("    4: "))
    assert level.count(" | ") == 2
    assert "LlamaAttention" in level
    assert "LlamaMLP" in level
    assert sum("LlamaDecoderLayer" in line and "%" in line for line in lines) == 2
    assert "twice the forward" in text
    short = profile_text(Profile(counter.modules, {}, 0, 7, 3), FlopsProfilerConfig(detailed=False, module_depth=1))
    assert "backward            7 FLOPs, counted; computed again 3 FLOPs" in short
    assert "every module" not in short
