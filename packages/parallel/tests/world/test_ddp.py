"""torch's DistributedDataParallel around a model that tensor parallelism has cut: over ranks with the same parts, and no others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_comm import Mesh, MeshSpec
from ds_config.errors import PlanError
from ds_parallel.tensor import TensorOptions, facts_of, make_tensor_plan, parallelize_model
from ds_testing import world


@world(2)
def test_ddp_over_tensor_parallel_ranks_is_refused(tiny) -> None:
    """It made the parts of rank 1 those of rank 0."""
    model, batch = tiny("llama")
    mesh = Mesh.build(MeshSpec(tensor=2))
    cut = parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(2)), mesh["tensor"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for say in (lambda: None, lambda: cut.assign(mesh["data"])):
        say()
        for wrapped in (model, nn.ModuleDict({"inner": model})):
            with pytest.raises(PlanError, match="hold different parts") as error:
                DistributedDataParallel(wrapped)
            assert error.value.code == "comm-ddp"
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    alone = DistributedDataParallel(model, process_group=mesh["data"].pg)
    alone(**batch).loss.backward()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    cut.undo()
    DistributedDataParallel(model)


@world(4)
def test_ddp_over_ranks_with_the_same_parts(tiny) -> None:
    model, batch = tiny("llama")
    mesh = Mesh.build(MeshSpec(tensor=2, data_shard=2))
    cut = parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(2)), mesh["tensor"])
    cut.assign(mesh["data"], 2)
    DistributedDataParallel(model, process_group=mesh["data"].pg)(**batch).loss.backward()
    for held in cut.shards.values():
        grads = [torch.empty_like(held.param) for _ in range(2)]
        dist.all_gather(grads, held.param.grad, group=mesh["data"].pg)
        assert torch.equal(*grads)
    with pytest.raises(PlanError, match="comm-ddp"):
        DistributedDataParallel(model)
