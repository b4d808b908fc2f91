"""`deepspeed.runtime.utils` and its like: types, values of dicts, other libraries' groups, tensors, loaders, parts of lists, nested values."""

from __future__ import annotations

import enum
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import ds_comm
from deepspeed._ours.base._torch import tree_leaves, tree_map, used_in_backward
from deepspeed._ours.base.raising import refused
from ds_accel import get_accelerator
from ds_pipe.partition import balanced, uniform

F = TypeVar("F", bound=Callable[..., Any])


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


def asked_of(mpu: Any, axes: Sequence[str], what: str, default: Any) -> Any:
    """Return what Megatron's mpu says of the first axis of `axes` that it knows; `default` without any."""
    methods = (f"get_{axis}_{what}" for axis in axes)
    return next((getattr(mpu, name)() for name in methods if hasattr(mpu, name)), default)


def _asks(axes: Sequence[str], what: str, default: Any) -> Callable[..., Any]:
    def ask(mpu: Any = None) -> Any:
        return asked_of(mpu, axes, what, default)

    ask.__doc__ = f"Return the {what} that another library's mpu says of {axes[0]}; {default} without it."
    return ask


_TENSOR, _STAGE = (
    ("tensor_model_parallel", "slice_parallel", "model_parallel"),
    ("pipeline_model_parallel", "pipe_parallel"),
)
bwc_tensor_model_parallel_rank = _asks(_TENSOR, "rank", 0)
bwc_tensor_model_parallel_world_size = _asks(_TENSOR, "world_size", 1)
bwc_tensor_model_parallel_group = _asks(_TENSOR, "group", None)
bwc_pipeline_parallel_world_size = _asks(_STAGE, "world_size", 1)
bwc_pipeline_parallel_group = _asks(_STAGE, "group", None)


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


def total_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all elements of all tensors, fp64, where the first is. Torch's own sums squares in fp32, and is off by 8e-3 at 50 M."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device="cpu")
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


# ---- data, devices


class RepeatingLoader:
    """Begins its loader again whenever it ends; an iterator without end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice:
    """Modules made inside are on `device`, with floating-point parameters of `dtype`. Torch's own settings do it.

    Args:
        device: Also `"meta"`, which allocates nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self.enabled:
            self.device.__exit__(*raised)
            torch.set_default_dtype(self._before)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Move tensors of nested lists, tuples and dicts to `device`.

    Other values, and tensors that `criterion_func` refuses, are returned unchanged.
    """
    return tree_map(
        lambda v: v.to(device) if isinstance(v, Tensor) and (not criterion_func or criterion_func(v)) else v, item
    )


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy, whose legacy generator takes 32 bits, and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def empty_cache() -> None:
    """Give unused device memory back."""
    get_accelerator().empty_cache()


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Format a call as the text `base(args, key=value)`."""
    parts = [repr(arg) for arg in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{base}({', '.join(parts)})"


def noop_decorator(func: F) -> F:
    """Return the decorated function itself, unchanged."""
    return func


# ---- cutting lists


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` parts that differ by at most one item, the larger parts first; the last are empty where parts are more."""
    return _one_each(num_items, num_parts) if num_items < num_parts else list(uniform(num_items, num_parts))


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` parts of consecutive items whose heaviest is as light as possible.

    With fewer items than parts the last parts are empty, as upstream's are.
    """
    if len(weights) < num_parts:
        return _one_each(len(weights), num_parts)
    return list(balanced(weights, num_parts))


def _one_each(num_items: int, num_parts: int) -> list[int]:
    return [min(part, num_items) for part in range(num_parts + 1)]


class ProgressiveLayerDrop:
    """How likely a layer is kept, by the engine's rule (`progressive_layer_drop`)."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta, self.gamma, self.current_theta = theta, gamma, 1.0

    def get_state(self) -> dict[str, Any]:
        """Return the keyword arguments for a model's forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        """Return theta of the last updated step."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Go to a step."""
        # NumPy's exponential, as upstream: math.exp, which tells the model, differs from it in the last bit.
        self.current_theta = (1.0 - self.theta) * float(np.exp(-self.gamma * global_step)) + self.theta


class EngineLayerDrop(ProgressiveLayerDrop):
    """The rule at an engine's steps: theta is what the forwards of its last step were told.

    Args:
        steps: Returns how many steps the engine has made.
    """

    def __init__(self, theta: float, gamma: float, steps: Callable[[], int]) -> None:
        super().__init__(theta, gamma)
        self._steps = steps

    def get_theta(self) -> float:
        """Return theta of the engine's last step; 1 before the first."""
        self.update_state(max(self._steps() - 1, 0))
        return self.current_theta


noop_context = nullcontext


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the one value that all items are.

    Raises:
        ConfigError: they differ, or there are none; a RuntimeError, too ("compat-argument").
    """
    unique = set(items)
    if len(unique) != 1:
        raise refused("one-value", sorted(unique, key=repr))
    return unique.pop()


def get_tensor_bytes(item: Any) -> int:
    """Return the bytes of all tensors in nested lists, tuples and dicts."""
    return sum(leaf.nbytes for leaf in tree_leaves(item) if isinstance(leaf, Tensor))


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Return whether an element is not finite, as a tensor on the device."""
    return ~torch.isfinite(x).all()


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Whether two nested structures have the same form, equal tensors and equal other values."""
    if isinstance(inputs1, Tensor) or isinstance(inputs2, Tensor):
        both = isinstance(inputs1, Tensor) and isinstance(inputs2, Tensor)
        return both and torch.equal(inputs1, inputs2.to(inputs1.device))
    if type(inputs1) is not type(inputs2):
        return False
    if isinstance(inputs1, Mapping):
        same = inputs1.keys() == inputs2.keys()
        return same and all(compare_tensors_in_structures(inputs1[key], inputs2[key]) for key in inputs1)
    if isinstance(inputs1, list | tuple):
        same = len(inputs1) == len(inputs2)
        return same and all(map(compare_tensors_in_structures, inputs1, inputs2))
    return bool(inputs1 == inputs2)


def filter_empty_parameters(params: Any) -> Any:
    """Leave out parameters without elements, of a list or of each group's; a parameter stays as it is."""
    if isinstance(params, Tensor):
        return params
    given = list(params)
    if given and isinstance(given[0], Mapping):
        return [{**group, "params": filter_empty_parameters(group["params"])} for group in given]
    return [param for param in given if param.numel() > 0]


def get_ma_status() -> int:
    """Return the bytes that the device holds."""
    return get_accelerator().memory().allocated


def count_used_parameters_in_backward(parameters: Iterable[Tensor]) -> int:
    """Count the parameters that the backward whose hook calls this computes a gradient of.

    Raises:
        PlanError: no backward runs; a RuntimeError, too ("compat-call-order").
    """
    used = used_in_backward(parameters)
    if used is None:
        raise refused("outside-backward")
    return used


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return what a dotted name inside a module stands for."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Put `module` where a dotted name inside a module points to."""
    parent, _, name = module_name.rpartition(".")
    setattr(attrgetter(parent)(model) if parent else model, name, module)


class DtypeEnum(Enum):
    """Formats of inference, each with the words for it."""

    fp16 = (torch.float16, "torch.float16", "fp16", "float16", "half")
    fp32 = (torch.float32, "torch.float32", "fp32", "float32", "float")
    bf16 = (torch.bfloat16, "torch.bfloat16", "bf16", "bfloat16", "bfloat")
    int8 = (torch.int8, "torch.int8", "int8")

    @classmethod
    def from_str(cls, value: str) -> DtypeEnum:
        """Return the format of a word.

        Raises:
            ConfigError: there is none; a ValueError, too ("compat-argument").
        """
        for member in cls:
            if value in member.value:
                return member
        raise refused("format-word", value, ", ".join(cls.__members__))


@dataclass
class fragment_address:  # noqa: N801  upstream's name
    """Where a parameter lies in a flat tensor, in elements. Files that DeepSpeed wrote name it: `torch.serialization.add_safe_globals` takes it."""

    numel: int
    start: int


fragment_address.__module__ = "deepspeed.utils.tensor_fragment"


def autocast_if_enabled(engine: Any) -> AbstractContextManager[Any]:
    """Return the context of `torch_autocast` that the engine's forward runs in; one that does nothing where it is off."""
    context: AbstractContextManager[Any] = engine._autocast()
    return context


class MultiTensorApply:
    """Calls an operation over lists of tensors, which goes through them by `chunk_size` elements."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        """Call `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch is at least, and at most, a version written as a number (2.11 is two point eleven)."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low = min_version is None or version >= _parts(min_version)
    return low and (max_version is None or version <= _parts(max_version))


def _parts(version: float) -> tuple[int, ...]:
    return tuple(int(part) for part in str(version).split("."))
