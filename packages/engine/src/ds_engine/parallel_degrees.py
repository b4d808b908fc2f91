"""Degrees of the mesh's axes, from wherever the user gives them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_config.errors import PlanError
from ds_engine.config import Config
from ds_parallel.config import TensorParallelConfig

__all__ = ["degrees_of", "with_degrees"]


def degrees_of(config: Config, stages: int = 1) -> dict[str, int]:
    """Return the parallel degrees of the axes in the configuration; the rest of the world is data parallel."""
    tensor, experts = config.tensor_parallel, config.expert_parallel
    return {
        "pipe": stages,
        "sequence": config.sequence_parallel_size,
        "tensor": 1 if tensor is None else tensor.degree,
        "expert": experts.autoep_size if experts is not None and experts.enabled else 1,
    }


# What Megatron's `mpu` and its like call the degrees, by axis; the first name that is there counts.
_OF_MPU: Mapping[str, tuple[str, ...]] = {
    "tensor": (
        "get_tensor_model_parallel_world_size",
        "get_model_parallel_world_size",
        "get_slice_parallel_world_size",
    ),
    "pipe": ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size"),
    "sequence": ("get_sequence_parallel_world_size",),
    "data": ("get_data_parallel_world_size",),
}
_KEYS = {"data": "data_parallel_size", "sequence": "sequence_parallel_size"}


def with_degrees(config: Config, mesh_param: tuple[int, int] | None = None, mpu: Any = None, slices: int = 1) -> Config:
    """Merge the degrees that `initialize` was given besides `config` into it.

    Args:
        mesh_param: (data, sequence).
        mpu: An object of another library that reports degrees, which must be the configuration's. Tensor-parallel ranks
            that the configuration does not mention are those of the model's own layers.
        slices: Tensor-parallel ranks of the topology that a model in stages was cut for; its own layers', as those of `mpu`.
    Raises:
        PlanError: invalid degrees, or others than the configuration's ("mesh-param", "mesh-mpu").
    """
    if mesh_param is not None:
        config = _with_param(config, mesh_param)
    if mpu is not None:
        config = _with_own_layers(config, _of_mpu(mpu).get("tensor", 1))
        _check_mpu(config, mpu)
    return _with_own_layers(config, slices)


def _with_own_layers(config: Config, tensor: int) -> Config:
    if tensor == 1 or degrees_of(config)["tensor"] > 1:
        return config
    return config.model_copy(update={"tensor_parallel": TensorParallelConfig(autotp_size=tensor, megatron_layers=True)})


def _of_mpu(mpu: Any) -> dict[str, int]:
    degrees = {
        axis: next((getattr(mpu, n)() for n in names if hasattr(mpu, n)), None) for axis, names in _OF_MPU.items()
    }
    return {axis: n for axis, n in degrees.items() if n is not None}


def _with_param(config: Config, mesh_param: tuple[int, int]) -> Config:
    degrees = tuple(mesh_param)
    if len(degrees) != 2 or not all(isinstance(n, int) and n >= 1 for n in degrees):
        raise PlanError(
            f"mesh_param = {mesh_param!r}", code="mesh-param", fix="Give (data, sequence): two whole numbers from 1."
        )
    updates = dict(zip(_KEYS.values(), degrees, strict=True))
    other = {
        key: value
        for key in updates
        if key in config.model_fields_set and (value := getattr(config, key)) != updates[key]
    }
    if other:
        raise PlanError(
            f"mesh_param = {degrees}, and the configuration says {', '.join(f'{k} = {v}' for k, v in other.items())}",
            code="mesh-param",
            fix="Give the degrees in one place.",
        )
    return config.model_copy(update=updates)


def _check_mpu(config: Config, mpu: Any) -> None:
    ours = degrees_of(config) | {"data": config.data_parallel_size}
    mpu_degrees = _of_mpu(mpu)
    if not mpu_degrees:
        raise PlanError(
            f"mpu is a {type(mpu).__name__} that says no degree: it has none of {_OF_MPU['tensor']} and their like",
            code="mesh-mpu",
            fix="Leave mpu out; degrees are set in the configuration.",
        )
    other = {axis: n for axis, n in mpu_degrees.items() if ours[axis] not in (None, n)}
    if other:
        raise PlanError(
            "; ".join(f"mpu says {axis} {n}, the configuration {ours[axis]}" for axis, n in other.items()),
            code="mesh-mpu",
            fix="Set the same degrees in the configuration: the engine makes the groups itself.",
        )
