"""Tensor parallelism with DTensors as parameters: what torch's own FSDP2, clipping, optimizers and checkpoints make of it equals one process."""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import ds_ckpt
import ds_moe
import ds_zero
from ds_comm import as_group
from ds_comm.shm import shm_group
from ds_config.errors import PlanError, UnsupportedError
from ds_ops import optim
from ds_parallel.tensor import TensorOptions, clip_grad_norm_, facts_of, make_tensor_plan, parallelize_model
from ds_parallel.tensor.dtensor_params import parallelize_module
from ds_pipe.stage import PipelineStage
from ds_testing import world

pytestmark = pytest.mark.skipif(bool(shm_group.available()), reason=f"no shm backend here: {shm_group.available()}")
CLIP = 0.5


@contextmanager
def shared_memory(meet):
    """A group without threads: torch's caches of DTensors keep the mesh, and with it the group, for as long as the process lives."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("shm", store=dist.FileStore(str(meet / "store"), size), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def llama(heads=2, **more):
    transformers = pytest.importorskip("transformers", reason="the model is one of transformers")
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=66, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=heads, head_dim=8,
        intermediate_size=44, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def batch(step, part):
    ids = torch.randint(1, 66, (2, 9), generator=torch.Generator().manual_seed(10 * step + part))
    return {"input_ids": ids, "labels": ids}


def sharded(model, mesh, fsdp=True):
    parallelize_module(model, mesh["tp"])
    if fsdp:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def compare(model, whole, tolerance=2e-5):
    for name, param in model.named_parameters():
        other = dict(whole.named_parameters())[name]
        assert isinstance(param, DTensor)
        assert torch.allclose(param.full_tensor(), other, atol=tolerance), name


@world(4, backend=None)
def test_tp_beside_fsdp2_equals_one_process(tmp_path):
    with shared_memory(tmp_path):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for build in (
            lambda params: torch.optim.AdamW(params, 0.01),
            lambda params: optim.AdamW(params, 0.01),
            lambda params: optim.Lamb(params, 0.01),
            lambda params: optim.Muon(params, 0.01, adam_lr=0.01),
        ):
            check_training(mesh, build)
        check_checkpoints(mesh, tmp_path)


def check_training(mesh, build):
    model, part = llama(), mesh.get_local_rank("dp")
    whole = copy.deepcopy(model)
    sharded(model, mesh)
    ours, theirs = build(model.parameters()), build(whole.parameters())
    for step in range(3):
        model(**batch(step, part)).loss.backward()
        for number in range(2):
            (whole(**batch(step, number)).loss / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        assert float(norm.full_tensor()) == pytest.approx(float(wanted), rel=1e-4)
        assert float(wanted) > CLIP
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    compare(model, whole)


def check_checkpoints(mesh, folder):
    """What is saved of one layout is read into others, by DCP and by ds-ckpt."""
    model = sharded(llama(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model(**batch(0, mesh.get_local_rank("dp"))).loss.backward()
    optimizer.step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ds_ckpt.save(folder / "ds", ds_ckpt.full_shards(state), {"state": ds_ckpt.full_meta(state)})
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}

    again = sharded(llama(), mesh, fsdp=False)
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    loaded = {"model": again.state_dict()}
    dcp.load(loaded, checkpoint_id=folder / "dcp")
    same(again, full)
    for make in (lambda: sharded(llama(), mesh, fsdp=False), lambda: sharded(llama(), mesh), llama):
        again = make()
        with torch.no_grad():
            for param in again.parameters():
                param.zero_()
        weights = ds_ckpt.LoadOptions(prefixes=("model.",))
        ds_ckpt.load(folder / "ds", ds_ckpt.full_shards({"model": again.state_dict()}), options=weights)
        same(again, full)
    fresh = sharded(llama(), mesh)
    steps = torch.optim.AdamW(fresh.parameters(), 0.02)
    fresh(**batch(1, 0)).loss.backward()
    steps.step()
    state = {"model": fresh.state_dict(), "optimizer": steps.state_dict()}
    meta = ds_ckpt.load(folder / "ds", ds_ckpt.full_shards(state))
    steps.load_state_dict(ds_ckpt.fill_state(meta["state"], state)["optimizer"])
    assert steps.param_groups[0]["lr"] == 0.01
    for one, two in zip(steps.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(one["exp_avg"].full_tensor(), two["exp_avg"].full_tensor())


@world(2, backend=None)
def test_what_dtensors_cannot_be_is_refused_by_name(tmp_path):
    with shared_memory(tmp_path):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = make_tensor_plan(facts_of(one_head()), TensorOptions(2))
        with pytest.raises(UnsupportedError, match="would cut it into") as error:
            parallelize_module(one_head(), mesh["tp"], plan)
        assert error.value.code == "tensor-dtensor"
        with pytest.raises(PlanError, match="over one dim of a mesh, this one has 2"):
            parallelize_module(llama(), init_device_mesh("cpu", (1, 2)))
        model = parallelize_module(llama(), mesh["tp"])
        assert {type(p.placements[0]) for p in model.parameters()} == {Shard, Replicate}
        calls = (
            lambda: ds_zero.shard(model, torch.optim.AdamW(model.parameters()), stage=2),
            lambda: PipelineStage(0, model, False),
            lambda: ds_moe.reduce_gradients(model),
        )
        for call in calls:
            with pytest.raises(PlanError, match="is a DTensor") as refusal:
                call()
            assert refusal.value.code == "comm-dtensor"
        with pytest.raises(PlanError, match="torch's own functions are right"):
            clip_grad_norm_(model, 1.0)


def one_head():
    return llama(heads=1)


@world(2, backend=None)
def test_a_model_that_is_cut_and_then_fully_sharded_over_its_parts_is_refused(tmp_path):
    with shared_memory(tmp_path):
        mesh = init_device_mesh("cpu", (2,))
        model = llama()
        parallelize_model(model, make_tensor_plan(facts_of(model), TensorOptions(2)), as_group(None))
        fully_shard(model, mesh=mesh)
        with pytest.raises(PlanError, match="other values on ranks") as error:
            model(**batch(0, 0))
        assert error.value.code == "comm-fsdp"


def same(model, full):
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, full[name]), name
