"""Weights from files into parts, and a loss of logits that stay cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_comm import Mesh, MeshSpec, world_group
from ds_config.errors import CheckpointError, set_place
from ds_parallel.tensor import (
    TensorOptions,
    causal_loss,
    facts_of,
    load_sharded_weights,
    make_tensor_plan,
    parallelize_model,
    vocab_parallel_cross_entropy,
)
from ds_testing import world

Tiny = Callable[[str], tuple[nn.Module, dict[str, Tensor]]]


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
@world(4)
def test_safetensors_are_read_into_parts(name: str, tiny: Tiny, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    reference, _ = tiny(name)
    mesh = Mesh.build(MeshSpec.fit(4, tensor=4))
    if mesh["tensor"].rank == 0:
        state = {key: value.contiguous() for key, value in reference.state_dict().items()}
        if name == "gpt2":  # as it is published: without the tied head and the prefix
            state = {key.removeprefix("transformer."): value for key, value in state.items() if key != "lm_head.weight"}
        safetensors.save_file(state, tmp_path / "model.safetensors")
    torch.distributed.barrier()
    with torch.device("meta"):
        model, _ = tiny(name)
    cut = parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(4)), mesh["tensor"])
    load_sharded_weights(cut, tmp_path)
    assert not any(param.is_meta for param in model.parameters())
    whole = cut.state_dict()
    assert all(torch.equal(whole[key], value) for key, value in reference.state_dict().items())
    set_place("")


@world(2)
def test_what_is_missing_is_listed(tiny: Tiny, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, _ = tiny("chatglm")
    mesh = Mesh.build(MeshSpec.fit(2, tensor=2))
    file = tmp_path / f"model-{mesh['tensor'].rank}.safetensors"
    state = dict(model.state_dict())
    del state["output_layer.weight"]
    state["embedding.word_embeddings.weight"] = torch.zeros(3, 32)
    safetensors.save_file(state, file)
    cut = parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(2)), mesh["tensor"])
    with pytest.raises(CheckpointError, match=r"output_layer\.weight is missing") as caught:
        load_sharded_weights(cut, file)
    assert "word_embeddings.weight is (3, 32), the model's (67, 32)" in str(caught.value)
    set_place("")


@pytest.mark.parametrize("widths", [[4, 4, 4], [5, 6, 1]], ids=str)
@world(3)
def test_cross_entropy_of_a_cut_vocabulary(widths: list[int]) -> None:
    group = world_group()
    torch.manual_seed(1)
    whole = (torch.randn(7, 12) * 30).requires_grad_()
    labels = torch.tensor([0, 11, 5, -100, 4, 3, -100])
    weight = torch.rand(7)
    wanted = functional.cross_entropy(whole, labels, reduction="none")
    (wanted * weight).sum().backward()
    start = sum(widths[: group.rank])
    mine = whole.detach()[:, start : start + widths[group.rank]].clone().requires_grad_()
    found = vocab_parallel_cross_entropy(mine, labels, group, widths=widths)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    (found * weight).sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad[:, start : start + widths[group.rank]], atol=1e-6, rtol=1e-6)


@world(2)
def test_a_model_whose_logits_stay_cut(tiny: Tiny) -> None:
    reference, batch = tiny("llama")
    batch["labels"][0, :5] = -100
    mesh = Mesh.build(MeshSpec.fit(2, tensor=2))
    model, _ = tiny("llama")
    plan = make_tensor_plan(facts_of(model), TensorOptions(2, gather_logits=False))
    cut = parallelize_model(model, plan, mesh["tensor"])
    head = cut.shards["lm_head.weight"].cut
    model.loss_function = causal_loss(mesh["tensor"], [head.width(rank) for rank in range(2)])
    found, wanted = model(**batch), reference(**batch)
    assert found.logits.shape[-1] == head.width(mesh["tensor"].rank)
    torch.testing.assert_close(found.loss, wanted.loss, atol=1e-6, rtol=1e-6)
    found.loss.backward()
    wanted.loss.backward()
    box = cut.shards["lm_head.weight"].box(mesh["tensor"].rank)
    mine = reference.lm_head.weight.grad.narrow(0, box.offset[0], box.shape[0])
    torch.testing.assert_close(model.lm_head.weight.grad, mine, atol=1e-6, rtol=1e-5)
    norm = model.model.layers[0].input_layernorm.weight.grad
    torch.testing.assert_close(norm, reference.model.layers[0].input_layernorm.weight.grad, atol=1e-6, rtol=1e-5)
    set_place("")
