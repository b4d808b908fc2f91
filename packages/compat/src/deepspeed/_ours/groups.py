"""`deepspeed.utils.groups`: who shares what, as the last engine of the process has it. Without one, data parallelism is the world."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ds_comm import Mesh, MeshSpec, world_group
from ds_config.errors import PlanError
from ds_parallel.sequence.hf import SequenceRanks

__all__ = [
    "forget_layers", "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size",
    "get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size",
    "get_tensor_model_parallel_group", "get_tensor_model_parallel_rank", "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size", "mpu", "share_layers", "share_sequences",
]  # fmt: skip

mpu = None
_shared: list[SequenceRanks] = []  # who shares sequences, when somebody has said so
_cut: list[Mesh] = []  # who shares layers
_alone: list[tuple[Any, Any]] = []  # the world, and this rank's group of one in it


def share_sequences(ranks: SequenceRanks | None) -> None:
    """Note who shares sequences; None: nobody."""
    _shared[:] = [] if ranks is None else [ranks]


def share_layers(mesh: Mesh | None) -> None:
    """Note who shares layers, and so who trains on different samples; None, or a mesh whose layers are whole: nobody."""
    _cut[:] = [] if mesh is None or mesh["tensor"].size == 1 else [mesh]
    _alone.clear()


def forget_layers(mesh: Mesh) -> None:
    """The engine with this mesh has ended."""
    if _cut and _cut[0] is mesh:
        share_layers(None)


def _init_tp_mesh_device(tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None) -> tuple[Any, Any]:
    """Make the groups of so many tensor-parallel neighbours. Collective over the world.

    Returns:
        torch's groups: data-parallel, tensor-parallel.
    """
    world = world_group().size
    if data_parallel_size not in (None, world // tensor_model_parallel_size):
        raise PlanError(
            f"{data_parallel_size} data-parallel x {tensor_model_parallel_size} tensor-parallel ranks in a world of {world}",
            code="mesh-size",
            fix="Leave data_parallel_size out.",
        )
    share_layers(Mesh.build(MeshSpec.fit(world, tensor=tensor_model_parallel_size)))
    return get_data_parallel_group(), get_tensor_model_parallel_group()


def _group(name: str) -> Any:
    """torch's group of a noted mesh. None means the world to torch, so a rank that is alone gets a group of its own."""
    found = _cut[0][name].pg
    if found is not None:
        return found
    if not _alone or _alone[0][0] is not dist.group.WORLD:
        _alone[:] = [(dist.group.WORLD, dist.new_group([world_group().rank], use_local_synchronization=True))]
    return _alone[0][1]


def get_data_parallel_group() -> Any:
    """torch's group of the ranks that train on different samples."""
    if _shared:
        return _shared[0].get_data_parallel_group()
    return _group("data") if _cut else dist.group.WORLD


def get_data_parallel_rank() -> int:
    """This process's rank among them."""
    if _shared:
        return _shared[0].get_data_parallel_rank()
    return _cut[0]["data"].rank if _cut else world_group().rank


def get_data_parallel_world_size() -> int:
    """Ranks that train on different samples."""
    if _shared:
        return _shared[0].get_data_parallel_world_size()
    return _cut[0]["data"].size if _cut else world_group().size


def get_model_parallel_group() -> Any:
    """torch's group of the ranks that layers are cut over; None where they are whole."""
    return _group("tensor") if _cut else None


def get_model_parallel_rank() -> int:
    """This process's rank among them."""
    return _cut[0]["tensor"].rank if _cut else 0


def get_model_parallel_world_size() -> int:
    """Ranks that layers are cut over."""
    return _cut[0]["tensor"].size if _cut else 1


def get_tensor_model_parallel_src_rank() -> int:
    """The first of them, as a rank of the world: whose batch the others should have."""
    return _cut[0]["tensor"].ranks[0] if _cut else world_group().rank


def _get_world_group() -> Any:
    """torch's group of all ranks."""
    return dist.group.WORLD


def _get_sequence_data_parallel_group() -> Any:
    return _group("gradient") if _cut else dist.group.WORLD


def _get_sequence_data_parallel_rank() -> int:
    return _cut[0]["gradient"].rank if _cut else world_group().rank


def _get_sequence_data_parallel_world_size() -> int:
    return _cut[0]["gradient"].size if _cut else world_group().size


def _get_sequence_parallel_group() -> Any:
    """torch's group of the ranks that share a sequence; None where nobody does."""
    return _shared[0].get_sequence_parallel_group() if _shared else None


def _get_sequence_parallel_rank() -> int:
    return _shared[0].get_sequence_parallel_rank() if _shared else 0


def _get_sequence_parallel_world_size() -> int:
    return _shared[0].get_sequence_parallel_world_size() if _shared else 1


get_tensor_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = _get_model_parallel_world_size = get_model_parallel_world_size
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
