"""Fused kernels in transformers models: the same loss and gradients, in every family that is known; what is not known is said."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_engine
from ds_config.errors import ConfigError, PlanError
from ds_engine.fused_kernels import OWN_KERNELS, liger_kernels, select_kernels
from ds_engine.fused_layers import fuse_layers

transformers = pytest.importorskip("transformers")
KINDS: Any = ("norms", "rotary", "gated_mlp", "head")
IDS = torch.arange(32).reshape(2, 16) * 7 % 160


def make(family: str, **values: Any) -> nn.Module:
    torch.manual_seed(3)
    sizes = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **{**sizes, **values})
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for param in model.parameters():  # norms' weights begin as ones or zeros, which would hide them
            param.add_(torch.randn_like(param) * 0.1)
    return model  # type: ignore[no-any-return]


def gradients(model: nn.Module, **more: Any) -> tuple[Tensor, list[Tensor]]:
    out = model(input_ids=IDS, labels=IDS.masked_fill(IDS % 5 == 0, -100), **more)
    out.loss.backward()
    return out.loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
}
DEFAULT = ("llama", "qwen3", "mixtral", "gemma", "gemma2")


@pytest.mark.parametrize("family", [f if f in DEFAULT else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_loss_and_gradients_are_those_of_the_plain_model(family: str) -> None:
    plain = make(family, **FAMILIES[family])
    fused = copy.deepcopy(plain)
    layers = fuse_layers(fused, KINDS, OWN_KERNELS)
    absent = {"mixtral": {"gated_mlp"}, "gemma2": {"head"}}.get(family, set())  # packed experts; capped logits
    assert {kind for kind, count in layers.counts.items() if not count} == absent
    (loss, grads), (fused_loss, fused_grads) = gradients(plain), gradients(fused)
    assert len(grads) == len(fused_grads)
    torch.testing.assert_close(fused_loss, loss)
    for ours, theirs in zip(fused_grads, grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma", marks=pytest.mark.slow)])
def test_in_bf16_it_is_no_farther_from_the_exact_gradient_than_the_plain_model(family: str) -> None:
    plain = make(family).bfloat16()
    exact, fused = copy.deepcopy(plain).float(), copy.deepcopy(plain)
    fuse_layers(fused, KINDS, OWN_KERNELS)
    (_, right), (_, theirs), (_, ours) = gradients(exact), gradients(plain), gradients(fused)

    def error(grads: list[Tensor]) -> float:
        return sum(float((a.float() - b).square().sum()) for a, b in zip(grads, right, strict=True)) ** 0.5

    assert 0 < error(ours) < 1.2 * error(theirs)


def test_forward_of_the_head_keeps_transformers_arguments() -> None:
    plain = make("llama")
    fused = copy.deepcopy(plain)
    fuse_layers(fused, KINDS, OWN_KERNELS)
    for more in ({"num_items_in_batch": 7}, {"shift_labels": IDS}):
        torch.testing.assert_close(gradients(fused, **more)[0], gradients(plain, **more)[0])
    # positional arguments; logits where they are asked for: without labels, in evaluation, of some tokens
    assert fused(IDS, torch.ones_like(IDS)).logits.shape == (2, 16, 160)
    assert fused(IDS, labels=IDS).logits is None
    assert fused(IDS, labels=IDS[:, -4:], logits_to_keep=4).logits.shape == (2, 4, 160)
    assert fused.eval()(IDS, labels=IDS).logits.shape == (2, 16, 160)
    with torch.no_grad():
        assert fused.train()(IDS, labels=IDS).logits is not None


def test_a_loss_function_of_the_user_is_called() -> None:
    model: Any = make("llama")
    fuse_layers(model, KINDS, OWN_KERNELS)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum().detach() * 0 + vocab_size
    assert float(model(IDS, labels=IDS).loss) == 160


def test_a_copy_computes_with_its_own_weights_and_restore_leaves_nothing() -> None:
    model = make("llama")
    layers = fuse_layers(model, KINDS, OWN_KERNELS)
    other = copy.deepcopy(model)
    before = other(IDS, labels=IDS).loss.item()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert other(IDS, labels=IDS).loss.item() == before
    layers.restore()
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.slow
def test_compiled_as_one_graph() -> None:
    plain = make("llama")
    fused = copy.deepcopy(plain)
    fuse_layers(fused, KINDS, OWN_KERNELS)
    compiled: Any = torch.compile(fused, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled)[0], gradients(plain)[0])


def liger(calls: list[str]) -> SimpleNamespace:
    """Build a stand-in for Liger's functions, with its signatures, of torch operations."""

    def liger_rms_norm(x: Tensor, w: Tensor, eps: float, offset: float, mode: str, in_place: bool) -> Tensor:
        assert (offset, mode, in_place) in ((0.0, "llama", False), (1.0, "gemma", False))
        calls.append("norm")
        return functional.rms_norm(x, w.shape, offset + w, eps)

    def liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        calls.append("rotary")
        return OWN_KERNELS.rotary(q, k, cos, sin)

    def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
        calls.append("swiglu")
        return functional.silu(a) * b

    def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
        calls.append("geglu")
        return functional.gelu(a, approximate="tanh") * b

    def liger_fused_linear_cross_entropy(
        x: Tensor, weight: Tensor, target: Tensor, bias: Any = None, ignore_index: int = -100, reduction: str = "mean",
        accum_dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        assert accum_dtype is torch.float32
        calls.append("head")
        return functional.cross_entropy(x @ weight.T, target, ignore_index=ignore_index, reduction=reduction)

    return SimpleNamespace(
        liger_rms_norm=liger_rms_norm,
        liger_rope=liger_rope,
        liger_swiglu=liger_swiglu,
        liger_geglu=liger_geglu,
        liger_fused_linear_cross_entropy=liger_fused_linear_cross_entropy,
    )


@pytest.mark.parametrize(("family", "gated"), [("llama", "swiglu"), ("gemma", "geglu")])
def test_ligers_functions_are_called_as_they_are_declared(family: str, gated: str) -> None:
    calls: list[str] = []
    plain = make(family)
    fused = copy.deepcopy(plain)
    fuse_layers(fused, KINDS, liger_kernels(liger(calls)))
    torch.testing.assert_close(gradients(fused)[0], gradients(plain)[0])
    assert set(calls) == {"norm", "rotary", gated, "head"}


def test_ligers_kernels_are_taken_on_cuda_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", liger([]))
    assert select_kernels(torch.device("cuda", 0)).name == "Liger"
    assert select_kernels(torch.device("cpu")) is OWN_KERNELS
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", None)
    assert select_kernels(torch.device("cuda", 0)) is OWN_KERNELS
    # a head that sums its weight gradient in bf16 is not taken
    older = liger([])
    older.liger_fused_linear_cross_entropy = lambda x, weight, target, bias=None, reduction="mean": None
    assert liger_kernels(older).head is OWN_KERNELS.head


def test_names_are_checked_and_what_is_not_known_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
    with pytest.raises(ConfigError, match="gated_mlp"):
        ds_engine.load_config({**settings, "kernels": ["norm"]})
    assert ds_engine.load_config({**settings, "kernels": "auto"}).kernels == "auto"
    assert ds_engine.load_config(settings).kernels == "off"
    model = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4))
    with pytest.raises(PlanError) as caught:
        ds_engine.initialize(model=model, config={**settings, "kernels": ["norms"]})
    assert caught.value.code == "kernels-unknown"
    with caplog.at_level("INFO", "ds_engine"):
        engine, *_ = ds_engine.initialize(model=model, config={**settings, "kernels": "auto"})
    engine.close()
    assert "nothing; none of norms, rotary, gated_mlp, head has a known formula" in caplog.text
