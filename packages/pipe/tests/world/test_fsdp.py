"""torch's FSDP2 around the stages of a pipeline: refused over other stages, and by name over the same ones."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ds_pipe
from ds_comm.shm import shm_group
from ds_config.errors import PlanError
from ds_pipe import LayerSpec, PipelineModule
from ds_testing import world

pytestmark = pytest.mark.skipif(bool(shm_group.available()), reason=f"no shm backend here: {shm_group.available()}")


def whole(cut):
    fully_shard(cut, mesh=DeviceMesh("cpu", [0, 1]))


def each(cut):
    for layer in [one for one in cut.modules() if isinstance(one, nn.Linear)]:
        fully_shard(layer, mesh=DeviceMesh("cpu", [0, 1]))


def both(cut):
    each(cut)
    whole(cut)


def train(cut):
    step = ds_pipe.pipeline(cut, 2)
    step([(torch.ones(2, 4), torch.ones(2, 4))] * 2)


@pytest.mark.parametrize("wrap", [whole, each, both])
@world(2, backend=None)
def test_fsdp2_over_stages_is_refused(tmp_path, wrap) -> None:
    """Rows of one stage's layers were put together with rows of the other's."""
    dist.init_process_group(
        "shm", store=dist.FileStore(str(tmp_path / "store"), 2), rank=int(os.environ["RANK"]), world_size=2
    )
    try:
        cut = PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(4)], num_stages=2, loss_fn=nn.MSELoss())
        wrap(cut)
        with pytest.raises(PlanError) as error:
            train(cut)
        assert error.value.code in ("comm-fsdp", "comm-dtensor")
    finally:
        dist.destroy_process_group()


@world(2, backend=None)
def test_a_layer_of_a_stage_that_is_called_by_hand(tmp_path) -> None:
    dist.init_process_group(
        "shm", store=dist.FileStore(str(tmp_path / "store"), 2), rank=int(os.environ["RANK"]), world_size=2
    )
    try:
        cut = PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(4)], num_stages=2, partition_method="uniform")
        each(cut)
        layer = next(one for one in cut.modules() if isinstance(one, nn.Linear))
        with pytest.raises(PlanError, match="other values on ranks") as error:
            layer(torch.ones(2, 4))
        assert error.value.code == "comm-fsdp"
    finally:
        dist.destroy_process_group()
