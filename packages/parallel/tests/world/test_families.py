"""Every family, cut over two and four ranks: logits, loss and gradients of one process; whole again afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ds_comm import Mesh, MeshSpec
from ds_config.errors import PlanError, set_place
from ds_parallel.tensor import TensorOptions, TensorParallelModel, facts_of, make_tensor_plan, parallelize_model
from ds_testing import world

FAMILIES = [
    "llama",
    "llama-uneven",
    "llama-tied",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma3",
    "phi",
    "phi3",
    "glm",
    "mixtral",
    "qwen3-moe",
    "gpt2",
    "gpt-neox",
    "opt",
    "bloom",
    "falcon-groups",
    "falcon-multi-query",
    "falcon-alibi",
    "bert",
    "roberta",
    "t5",
    "vit",
    "whisper",
    "chatglm",
    "codegen",
    "olmo2",
    "granite-tied",
    "deepseek-v2",
    "llama4",
    "longcat",
    "bart",
    "bigcode",
    "electra",
]
Tiny = Callable[[str], tuple[nn.Module, dict[str, Tensor]]]


def cut_over(model: nn.Module, mesh: Mesh, **options: object) -> TensorParallelModel:
    degree = mesh["tensor"].size
    return parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(degree, **options)), mesh["tensor"])


def part_of(whole: Tensor, cut: TensorParallelModel, name: str) -> Tensor:
    box = cut.shards[name].box(cut.group.rank)
    for dim, (offset, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def compare_gradients(model: nn.Module, reference: nn.Module, cut: TensorParallelModel) -> int:
    """How many gradients were compared; replicated ones are equal on all ranks, parts are their part of the whole."""
    wanted = {name: param.grad for name, param in reference.named_parameters(remove_duplicate=False)}
    compared = 0
    for name, param in model.named_parameters(remove_duplicate=False):
        held = cut.shards.get(name)
        grad = wanted[held.name if held else name]
        if grad is None:
            assert param.grad is None, name
            continue
        grad = part_of(grad, cut, name) if held else grad
        torch.testing.assert_close(param.grad, grad, atol=1e-5, rtol=1e-4, msg=lambda said, n=name: f"{n}: {said}")
        compared += 1
    return compared


@pytest.mark.parametrize("name", FAMILIES)
@world(4)
def test_family(name: str, tiny: Tiny) -> None:
    reference, batch = tiny(name)
    wanted = reference(**batch)
    wanted.loss.backward()
    state = {key: value.clone() for key, value in reference.state_dict().items()}
    for degree in (2, 4):
        mesh = Mesh.build(MeshSpec.fit(4, tensor=degree))
        model, _ = tiny(name)
        cut = cut_over(model, mesh)
        found = model(**batch)
        torch.testing.assert_close(found.logits, wanted.logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.loss, wanted.loss, atol=1e-6, rtol=1e-6)
        found.loss.backward()
        assert compare_gradients(model, reference, cut) > 5
        whole = cut.state_dict()
        assert whole.keys() == state.keys()
        assert all(torch.equal(whole[key], state[key]) for key in state)
        held, total = cut.plan.numel(cut.group.rank)
        assert held < total  # something was cut, and this rank holds less
        cut.undo()
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert torch.equal(model(**batch).logits, wanted.logits)
    set_place("")


@world(2)
def test_ranks_that_read_different_batches_are_told(tiny: Tiny) -> None:
    mesh = Mesh.build(MeshSpec.fit(2, tensor=2))
    model, batch = tiny("chatglm")
    cut_over(model, mesh)
    batch["input_ids"] = batch["input_ids"] + mesh["tensor"].rank
    with pytest.raises(PlanError, match="input_ids differ"):
        model(**batch)
    set_place("")


@world(2)
def test_a_layer_with_a_forward_of_its_own_is_refused_and_the_model_stays(tiny: Tiny) -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    mesh = Mesh.build(MeshSpec.fit(2, tensor=2))
    model, batch = tiny("chatglm")
    model.encoder["layers"][1].mlp.dense_4h_to_h.__class__ = Adapted
    before = model(**batch).loss.item()
    with pytest.raises(Exception, match="forward of its own"):
        cut_over(model, mesh)
    assert model(**batch).loss.item() == before
    set_place("")
