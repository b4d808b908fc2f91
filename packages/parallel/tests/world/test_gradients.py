"""A loop of one's own around a model that tensor parallelism has cut: averaged and clipped as in one process."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist

from ds_comm import Mesh, MeshSpec
from ds_config.errors import PlanError, ShardedAccessError, UnsupportedError
from ds_ops import optim as ops
from ds_parallel.config import LayerSpecConfig
from ds_parallel.tensor import (
    TensorOptions,
    clip_grad_norm_,
    facts_of,
    make_tensor_plan,
    parallelize_model,
    reduce_gradients,
)
from ds_testing import world

CLIP = 0.1


def part_of(batch, number):
    """Other tokens for every data rank."""
    return {
        name: value.roll(number, dims=-1) if name in ("input_ids", "labels") else value for name, value in batch.items()
    }


def check(tiny, family, spec, norm_type=2.0, assign=False):
    model, batch = tiny(family)
    whole, mesh = copy.deepcopy(model), Mesh.build(spec)
    cut = parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(spec.tensor)), mesh["tensor"])
    if assign:
        cut.assign(mesh["data"], mesh["data"].size)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.5) for m in (model, whole))
    copies = mesh["data"].size
    for step in range(3):
        model(**part_of(batch, step + mesh["data"].rank)).loss.backward()
        for rank in range(copies):
            (whole(**part_of(batch, step + rank)).loss / copies).backward()
        reduce_gradients(model, None if assign or copies == 1 else mesh)
        norm = clip_grad_norm_(model, CLIP, norm_type)
        wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP, norm_type)
        assert float(wanted) > CLIP
        assert float(norm) == pytest.approx(float(wanted), rel=1e-4)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = cut.state_dict()
    for name, value in whole.state_dict().items():
        assert torch.allclose(state[name], value, atol=2e-5), name
    cut.undo()


@world(2)
def test_parts_are_clipped_as_in_one_process(tiny) -> None:
    for family in ("llama", "gpt2"):
        check(tiny, family, MeshSpec(tensor=2))
    check(tiny, "gemma", MeshSpec(tensor=2))  # one key-value head, which both ranks hold
    check(tiny, "llama-tied", MeshSpec(tensor=2))


@world(4)
def test_parts_of_two_replicas_are_averaged_and_clipped(tiny) -> None:
    check(tiny, "llama", MeshSpec(tensor=2, data_shard=2))
    check(tiny, "gemma", MeshSpec(tensor=2, data_shard=2), assign=True)


@world(2)
def test_torch_clips_no_part_by_its_own_norm(tiny) -> None:
    """Each rank scaled by another number, and what they hold both drifted apart."""
    model, batch = tiny("llama")
    mesh = Mesh.build(MeshSpec(tensor=2))
    cut = parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(2)), mesh["tensor"])
    model(**batch).loss.backward()
    for foreach in (None, False):
        with pytest.raises(ShardedAccessError, match=r"ds_parallel.tensor.clip_grad_norm_") as error:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=foreach)
        assert error.value.code == "comm-part-norm"
    own = next(iter(cut.shards.values())).param.grad.to_local()
    assert type(own) is torch.Tensor
    assert float(own.norm()) > 0
    largest = max(float(held.param.grad.abs().max()) for held in cut.shards.values())
    peaks = [None, None]
    others = [p.grad for p in model.parameters() if p not in {h.param for h in cut.shards.values()}]
    dist.all_gather_object(peaks, max([largest, *(float(g.abs().max()) for g in others)]))
    assert float(clip_grad_norm_(cut, CLIP, math.inf)) == pytest.approx(max(peaks))
    torch.optim.AdamW(model.parameters()).step()
    cut.undo()
    model.zero_grad()
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    with pytest.raises(PlanError, match="tensor-gradients"):
        clip_grad_norm_(model, CLIP)


@world(4)
def test_replicas_that_nobody_named_are_refused(tiny) -> None:
    model, _ = tiny("llama")
    mesh = Mesh.build(MeshSpec(tensor=2, data_shard=2))
    parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(2)), mesh["tensor"])
    with pytest.raises(PlanError, match=r"reduce_gradients\(model, mesh\)") as error:
        reduce_gradients(model)
    assert error.value.code == "tensor-gradients"


@world(2)
def test_optimizers_of_whole_tensors_step_no_part_by_its_own_norm(tiny) -> None:
    """LAMB, Muon and LBFGS took norms of parts in silence: the copies of ranks parted."""
    mesh = Mesh.build(MeshSpec(tensor=2))
    makers = (
        lambda parts: torch.optim.Adafactor(parts, lr=0.1),
        lambda parts: torch.optim.LBFGS(parts, lr=0.1),
        lambda parts: torch.optim.Muon([p for p in parts if p.ndim == 2], lr=0.1),
        lambda parts: ops.Lamb(parts, lr=0.1),
        lambda parts: ops.Muon(parts, lr=0.1),
    )
    for make in makers:
        model, batch = tiny("llama")
        cut = parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(2)), mesh["tensor"])
        optimizer = make([held.param for held in cut.shards.values()])

        def closure(model=model, batch=batch, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            return loss

        with pytest.raises((ShardedAccessError, UnsupportedError), match="parallelize_module") as error:
            optimizer.step(closure)
        assert error.value.code in ("comm-part-norm", "optimizer-part")
        cut.undo()


@world(2)
def test_elementwise_optimizers_step_parts(tiny) -> None:
    mesh = Mesh.build(MeshSpec(tensor=2))
    for make in (torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam, torch.optim.Adagrad, ops.AdamW, ops.Lion):
        model, batch = tiny("llama")
        whole = copy.deepcopy(model)
        cut = parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(2)), mesh["tensor"])
        for one, optimizer in ((m, make(m.parameters(), lr=0.01)) for m in (model, whole)):
            for _ in range(2):
                one(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        state = cut.state_dict()
        for name, value in whole.state_dict().items():
            assert torch.allclose(state[name], value, atol=2e-4), (make, name)
        cut.undo()


def test_a_weight_that_is_computed_is_not_cut() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    torch.nn.utils.parametrizations.weight_norm(model[0])
    specs = (LayerSpecConfig(patterns=(r"0\..*",), partition_type="column"),)
    with pytest.raises(UnsupportedError, match=r"0\.weight is computed from other parameters") as error:
        make_tensor_plan(facts_of(model), TensorOptions(2, specs=specs))
    assert error.value.code == "tensor-layer"
