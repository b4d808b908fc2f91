"""Names of upstream's small modules: types, exceptions, getters for values of dicts and of other libraries' groups."""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import ds_comm
from deepspeed._ours._torch import tree_map

__all__ = [
    "GATED_ACTIVATION_TYPES", "ActivationFuncType",
    "DeepSpeedFlopsProfilerConfig", "DummyOptim", "aio_config",
    "bwc_pipeline_parallel_group", "bwc_pipeline_parallel_world_size", "bwc_tensor_model_parallel_group",
    "bwc_tensor_model_parallel_rank", "bwc_tensor_model_parallel_world_size", "copy_to_device",
    "ensure_directory_exists", "get_global_norm", "get_grad_norm",
    "get_value", "is_model_parallel_parameter", "prime_factors", "total_norm",
]  # fmt: skip


class ActivationFuncType(enum.IntEnum):
    """Kinds of activation."""

    UNKNOWN = 0
    GELU = 1
    ReLU = 2
    GATED_GELU = 3
    GATED_SILU = 4


GATED_ACTIVATION_TYPES = [ActivationFuncType.GATED_GELU, ActivationFuncType.GATED_SILU]


# ---- values of configurations


def get_value(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Return the value of a key, or the default."""
    return param_dict.get(param_name, param_default_value)


class _Section(SimpleNamespace):
    """Values of a section as attributes."""


class DeepSpeedFlopsProfilerConfig(_Section):
    """The section `flops_profiler` of a configuration."""

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        defaults = {
            "enabled": False, "recompute_fwd_factor": 0.0, "profile_step": 1, "module_depth": -1, "top_modules": 1,
            "detailed": True, "output_file": None,
        }  # fmt: skip
        super().__init__(**defaults | dict(param_dict.get("flops_profiler") or {}))


def aio_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `aio` of a configuration, with defaults."""
    defaults = {
        "block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True,
        "use_gds": False,
    }  # fmt: skip
    return defaults | dict(param_dict.get("aio") or {})


# ---- groups of another library


def _of_mpu(default: Any, meaning: str, *names: str) -> Callable[..., Any]:
    """Build a function that calls the first existing method of `names` on Megatron's mpu; `default` without any."""

    def ask(mpu: Any = None) -> Any:
        return next((getattr(mpu, name)() for name in names if hasattr(mpu, name)), default)

    ask.__doc__ = meaning
    return ask


_TENSOR, _STAGE = (
    ("tensor_model_parallel", "slice_parallel", "model_parallel"),
    ("pipeline_model_parallel", "pipe_parallel"),
)
bwc_tensor_model_parallel_rank = _of_mpu(0, "The tensor-parallel rank.", *(f"get_{name}_rank" for name in _TENSOR))
bwc_tensor_model_parallel_world_size = _of_mpu(1, "Their number.", *(f"get_{name}_world_size" for name in _TENSOR))
bwc_tensor_model_parallel_group = _of_mpu(None, "Their group.", *(f"get_{name}_group" for name in _TENSOR))
bwc_pipeline_parallel_world_size = _of_mpu(1, "The number of stages.", *(f"get_{name}_world_size" for name in _STAGE))
bwc_pipeline_parallel_group = _of_mpu(None, "Their group.", *(f"get_{name}_group" for name in _STAGE))


def is_model_parallel_parameter(p: Tensor) -> bool:
    """Whether another library, or ds-parallel, has cut a parameter over ranks."""
    marked = getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False)
    return bool(marked) or ds_comm.param_sharding(p).box is not None


# ---- tensors, memory, folders


def copy_to_device(item: Any, device: Any, criterion_func: Any) -> Any:
    """Copies of nested tensors on `device`, of those that `criterion_func` takes; others as they are."""
    return tree_map(lambda v: v.clone().to(device) if isinstance(v, Tensor) and criterion_func(v) else v, item)


def ensure_directory_exists(filename: str) -> None:
    """Make the folder that a file is to lie in."""
    os.makedirs(os.path.dirname(os.path.abspath(filename)), exist_ok=True)


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Combine the norms of parts into the norm of the whole."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def get_grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Compute the norm of the gradients of unsharded parameters on this rank.

    `engine.get_global_grad_norm` is the norm of the run.
    """
    del mpu
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = [param.grad for param in listed if param.grad is not None]
    return float(total_norm(grads, norm_type))


def total_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all elements of all tensors, fp64, where the first is. Torch's own sums squares in fp32, and is off by 8e-3 at 50 M."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = [torch.linalg.vector_norm(t.detach(), norm_type, dtype=torch.float64) for t in tensors]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)


class DummyOptim:
    """Stands for an optimizer that changes nothing.

    Attributes:
        param_groups: One group of all parameters.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": params}]


def prime_factors(number: int) -> list[int]:
    """Compute the prime factors of a positive number, ascending; [] of 1.

    Raises:
        ValueError: below 1.
    """
    if number < 1:
        raise ValueError(f"{number} has no prime factors: it is not positive")
    factors, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return [*factors, number] if number > 1 else factors
