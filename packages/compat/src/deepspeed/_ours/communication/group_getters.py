"""`deepspeed.utils.groups`: who shares what, as the last engine of the process has it. Without one, data parallelism is the world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from deepspeed._ours.base.forwarding import method
from deepspeed._ours.base.raising import refused
from ds_comm import Group, Mesh, MeshSpec, common_group, self_group, world_group
from ds_parallel.sequence.hf_attention import SequenceRanks

mpu = None
_shared: list[SequenceRanks] = []  # who shares sequences, when somebody has said so
_cut: list[Mesh] = []  # who shares layers or sequences, or holds other stages
_near: list[tuple[Mesh, Group]] = []  # who keeps what stage 3 has gathered


def share_sequences(ranks: SequenceRanks | None) -> None:
    """Note who shares sequences; None: nobody."""
    _shared[:] = [] if ranks is None else [ranks]


def share_layers(mesh: Mesh | None) -> None:
    """Note who shares the model or sequences, and so who trains on different samples; None, or a mesh of data alone: nobody."""
    _cut[:] = [] if mesh is None or mesh["model"].size == mesh["sequence"].size == 1 else [mesh]


def forget_layers(mesh: Mesh) -> None:
    """Drop the shared groups of a mesh whose engine has ended."""
    if _cut and _cut[0] is mesh:
        share_layers(None)
    if _near and _near[0][0] is mesh:
        _near.clear()


def share_gathered(mesh: Mesh, size: int) -> None:
    """Note which neighbours keep what stage 3 has gathered (`zero_hpz_partition_size`); 1: nobody. Collective over the mesh."""
    ranks, rank = mesh["gradient"].ranks, mesh["gradient"].rank
    first = rank // size * size
    group = common_group(ranks[first : first + size], "zero_hpz") if size > 1 else None
    _near[:] = [] if group is None else [(mesh, group)]


def _get_zero_param_intra_parallel_group() -> Any:
    """Return torch's group of the neighbours that keep what stage 3 has gathered; None where nobody does."""
    return _near[0][1].pg if _near else None


_get_zero_param_intra_parallel_rank_in_mygroup = method(
    lambda: _neighbours().rank, "Return this rank's place among them, or in the world."
)
_get_zero_param_intra_parallel_group_world_size = method(
    lambda: _neighbours().size, "Return how many they are, or how many the world has."
)
_get_zero_param_intra_parallel_group_ranks = method(
    lambda: list(_neighbours().ranks), "Return their world ranks, or all."
)


def _neighbours() -> Group:
    return _near[0][1] if _near else world_group()


def _init_tp_mesh_device(tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None) -> tuple[Any, Any]:
    """Make the groups of so many tensor-parallel neighbours. Collective over the world.

    Returns:
        torch's groups: data-parallel, tensor-parallel.
    """
    world = world_group().size
    if data_parallel_size not in (None, world // tensor_model_parallel_size):
        raise refused("mesh-of-world", data_parallel_size, tensor_model_parallel_size, world)
    share_layers(Mesh.build(MeshSpec.fit(world, tensor=tensor_model_parallel_size)))
    return get_data_parallel_group(), get_model_parallel_group()


def _group(name: str) -> Any:
    """torch's group of a noted mesh; of one rank where that is alone."""
    return _cut[0][name].pg


def _asks(what: str, axis: str, sequences: str = "", whole: bool = False) -> Callable[[], Any]:
    """Build a function that returns the group, rank or world_size of this rank on an axis of the mesh.

    Args:
        sequences: Name of the axis for the ranks that share sequences, which take precedence where there are any.
        whole: Where the axis is not in use, it is the world; else this rank only.
    """

    def ask() -> Any:
        if sequences and _shared:
            return getattr(_shared[0], f"get_{sequences}_parallel_{what}")()
        cut = bool(_cut) and (axis != "sequence" or _cut[0][axis].size > 1)
        if what == "group":
            return _group(axis) if cut else dist.group.WORLD if whole else None
        place = _cut[0][axis] if cut else world_group() if whole else self_group(axis)
        return place.rank if what == "rank" else place.size

    return ask


_WHAT = ("group", "rank", "world_size")
get_data_parallel_group, get_data_parallel_rank, get_data_parallel_world_size = (
    _asks(what, "data", "data", whole=True) for what in _WHAT
)
get_model_parallel_group, get_model_parallel_rank, get_model_parallel_world_size = (
    _asks(what, "tensor") for what in _WHAT
)
_get_model_parallel_world_size = _asks("world_size", "model")  # stages count, too, as for an mpu of a pipeline
_get_sequence_data_parallel_group, _get_sequence_data_parallel_rank, _get_sequence_data_parallel_world_size = (
    _asks(what, "gradient", whole=True) for what in _WHAT
)
_get_sequence_parallel_group, _get_sequence_parallel_rank, _get_sequence_parallel_world_size = (
    _asks(what, "sequence", "sequence") for what in _WHAT
)


def get_tensor_model_parallel_src_rank() -> int:
    """Return the world rank of the first tensor-parallel rank, whose batch the other ranks of its group should have."""
    return _cut[0]["tensor"].ranks[0] if _cut else world_group().rank


def _get_world_group() -> Any:
    """Return torch's process group of all ranks."""
    return dist.group.WORLD
