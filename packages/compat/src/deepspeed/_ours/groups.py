"""`deepspeed.utils.groups`: who shares what. Data parallelism is the world; the other axes have one rank each."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ds_comm import world_group

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "mpu",
]

mpu = None


def get_data_parallel_group() -> Any:
    """torch's group of all ranks."""
    return dist.group.WORLD


def get_data_parallel_rank() -> int:
    """This process's rank."""
    return world_group().rank


def get_data_parallel_world_size() -> int:
    """Ranks that train on different samples."""
    return world_group().size


def get_model_parallel_group() -> None:
    """None: every rank holds, or gathers, the whole model."""


def get_model_parallel_rank() -> int:
    """0."""
    return 0


def get_model_parallel_world_size() -> int:
    """1."""
    return 1


get_tensor_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_data_parallel_group = _get_sequence_data_parallel_group = _get_world_group = get_data_parallel_group
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_sequence_parallel_group = get_model_parallel_group
_get_sequence_parallel_rank = get_model_parallel_rank
_get_sequence_parallel_world_size = _get_model_parallel_world_size = get_model_parallel_world_size
