"""Every language model of transformers that can be made small, over tensor and sequence ranks: one process's numbers, or a refusal with a code."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

from ds_comm import Mesh, MeshSpec
from ds_config.errors import DsError, UnsupportedError, set_place
from ds_parallel.sequence import check_parts, sequence_part
from ds_parallel.sequence.hf_attention import UlyssesAttention
from ds_parallel.tensor import TensorOptions, facts_of, make_tensor_plan, parallelize_model
from ds_testing import world

pytest.importorskip("transformers", reason="the models are transformers'")
pytestmark = pytest.mark.slow

# Heads are counted in masks that the model makes (Doge); a norm over all heads follows a layer that its own plan cuts (ESM C).
BY_SHAPE = {"DogeForCausalLM", "EsmcForMaskedLM"}
DRAWS = {"PhimoeForCausalLM"}  # its router draws numbers while it trains


def made(name: str, attention: str) -> Any:
    try:
        return tiny_models.make(name, attention)
    except Exception:
        return None  # not one that our sizes fit


def ids_of() -> Tensor:
    return torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any) -> Tensor:
    torch.manual_seed(5)
    ids = ids_of()
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def differing(name: str, mesh: Mesh) -> list[str] | str | None:
    """Names of gradients that differ; a code; None for a model that does not run here by itself."""
    whole = made(name, "eager")
    try:
        wanted = loss_of(whole)
    except Exception:
        return None
    model = made(name, "eager")
    try:
        plan = make_tensor_plan(facts_of(model), TensorOptions(mesh["tensor"].size))
        cut = parallelize_model(model, plan, mesh["tensor"])
        loss = loss_of(model)
    except DsError as error:
        return error.code
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    grads = {key: p.grad for key, p in whole.named_parameters(remove_duplicate=False)}
    found = [] if torch.allclose(loss, wanted, rtol=1e-5) else ["loss"]
    for key, param in model.named_parameters(remove_duplicate=False):
        held = cut.shards.get(key)
        grad = grads[held.name if held else key]
        if grad is not None and held is not None:
            box = held.box(cut.group.rank)
            for dim, (offset, size) in enumerate(zip(box.offset, box.shape, strict=True)):
                grad = grad.narrow(dim, offset, size)
        mine = torch.zeros(param.shape) if param.grad is None else torch.from_numpy(param.grad.numpy().copy())
        grad = torch.zeros(param.shape) if grad is None else grad
        if float((mine - grad).norm()) > 1e-3 * float(grad.norm()) + 1e-7:
            found.append(key)
    return found


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("ranks", [2, 4])
@world(4, timeout=280)
def test_over_tensor_ranks(ranks: int, part: int) -> None:
    mesh = Mesh.build(MeshSpec.fit(4, tensor=ranks))
    wrong, right = {}, 0
    for name in tiny_models.names()[part::4]:
        found = differing(name, mesh)
        right += found == []
        if isinstance(found, list) and found:
            wrong[name] = found[:4]
        if isinstance(found, str) and found.startswith("RuntimeError") and name not in BY_SHAPE:
            wrong[name] = [found]
    set_place("")
    assert not wrong
    assert right >= 25


@pytest.mark.parametrize("part", range(2))
@world(2, timeout=280)
def test_over_sequence_ranks(part: int) -> None:
    """What `check_parts` lets pass has the loss of one process."""
    group = Mesh.build(MeshSpec.fit(2, sequence=2))["sequence"]
    wrong, right, refused = {}, 0, 0
    for name in [name for name in tiny_models.names() if "CausalLM" in name and name not in DRAWS][part::2]:
        model = made(name, "sdpa")
        if model is None:
            continue
        batch = {"input_ids": ids_of(), "use_cache": False}
        try:
            whole = model(**sequence_part(batch, 0, 1)).logits
        except Exception:
            continue
        ulysses = UlyssesAttention.register("sdpa", group)
        try:
            mine = sequence_part(batch, group.rank, 2)
            assert check_parts(model, mine, group) is not None
            logits = model(**mine).logits
            if not torch.allclose(logits, whole.chunk(2, 1)[group.rank], rtol=1e-3, atol=1e-4):
                wrong[name] = float((logits - whole.chunk(2, 1)[group.rank]).abs().max())
            right += 1
        except UnsupportedError as error:
            refused += error.code == "sequence-parts"
        except (DsError, RuntimeError):
            pass  # no positions reach its attention, or it is none that takes parts
        finally:
            ulysses.remove()
    set_place("")
    assert not wrong
    assert right >= 30
    assert refused >= 5
