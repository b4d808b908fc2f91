"""`deepspeed.utils.groups`: who shares what. Data parallelism is the world, unless ranks share sequences."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ds_comm import world_group
from ds_parallel.sequence.hf import SequenceRanks

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
    "share_sequences",
]

mpu = None
_shared: list[SequenceRanks] = []  # who shares sequences, when somebody has said so


def share_sequences(ranks: SequenceRanks | None) -> None:
    """Note who shares sequences; None: nobody."""
    _shared[:] = [] if ranks is None else [ranks]


def get_data_parallel_group() -> Any:
    """torch's group of the ranks that train on different samples."""
    return _shared[0].get_data_parallel_group() if _shared else dist.group.WORLD


def get_data_parallel_rank() -> int:
    """This process's rank among them."""
    return _shared[0].get_data_parallel_rank() if _shared else world_group().rank


def get_data_parallel_world_size() -> int:
    """Ranks that train on different samples."""
    return _shared[0].get_data_parallel_world_size() if _shared else world_group().size


def get_model_parallel_group() -> None:
    """None: the engine holds its groups itself."""


def get_model_parallel_rank() -> int:
    """0."""
    return 0


def get_model_parallel_world_size() -> int:
    """1."""
    return 1


def _get_world_group() -> Any:
    """torch's group of all ranks."""
    return dist.group.WORLD


def _get_sequence_data_parallel_rank() -> int:
    return world_group().rank


def _get_sequence_data_parallel_world_size() -> int:
    return world_group().size


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
_get_sequence_data_parallel_group = _get_world_group
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
