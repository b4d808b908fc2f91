"""What must follow when a model's layers are cut: heads, arguments that hold something for every head, sums of gradients.

And a check: ranks that compute parts of one layer must be given one batch.
"""

from __future__ import annotations

import copy as copying
import inspect
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import ds_comm
from ds_comm import Group
from ds_config.errors import PlanError
from ds_parallel.tensor.module_info import KEY_VALUE_COUNTS, QUERY_COUNTS
from ds_parallel.tensor.tp_plan import TensorPlan
from ds_parallel.trees import tensors_in

__all__ = ["InputCheck", "follow_heads", "sum_over"]


def follow_heads(plan: TensorPlan, rank: int, modules: Mapping[str, nn.Module]) -> list[RemovableHandle]:
    """Make attention modules compute with this rank's heads: set attributes, configurations and hooks."""
    handles = []
    for name, heads in plan.heads.items():
        module = modules[name]
        for key, values in plan.attributes[name].items():
            module.__dict__[key] = values[rank]
        (first, last), (key_first, key_last) = heads[rank]
        forward = inspect.unwrap(type(module).forward)  # transformers wraps some, to rename arguments
        code = getattr(forward, "__code__", None)
        config = getattr(module, "config", None)
        if config is not None and code is not None and set(code.co_names) & {"num_attention_heads", *KEY_VALUE_COUNTS}:
            local = copying.copy(config)
            for key in QUERY_COUNTS:
                if isinstance(getattr(config, key, None), int) and key != "encoder_attention_heads":
                    setattr(local, key, last - first)
            for key in KEY_VALUE_COUNTS:
                if isinstance(getattr(config, key, None), int):
                    setattr(local, key, key_last - key_first)
            module.__dict__["config"] = local
        if plan.head_arguments:
            total = heads[-1][0][1]
            hook = _HeadArguments(plan.head_arguments, total, (first, last))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return handles


@dataclass(frozen=True, slots=True)
class _HeadArguments:
    """Gives an attention module its heads' part of arguments that hold something for every head."""

    names: tuple[str, ...]
    total: int
    local_range: tuple[int, int]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = dict(kwargs)
        for name in self.names:
            value = kwargs.get(name)
            if isinstance(value, Tensor):
                changed[name] = self._part(value)
        return args, changed

    def _part(self, value: Tensor) -> Tensor:
        start, stop = self.local_range
        if value.dim() == 4:  # [batch, heads or 1, queries, keys]
            return value[:, start:stop] if value.shape[1] == self.total > 1 else value
        folded = value.view(-1, self.total, *value.shape[1:])  # [batch * heads, ...]
        return folded[:, start:stop].flatten(0, 1)


def sum_over(param: nn.Parameter, group: Group, slot: int = 0, slots: int = 1) -> list[RemovableHandle]:
    """Sum a parameter's gradient over the ranks that hold the same of `slots` stretches, and use it for their own activations.

    A hook on the parameter: it sees the whole gradient of a backward once, before it is accumulated or sharded.
    """
    return [param.register_hook(_Sum(group, slot, slots))] if param.requires_grad else []


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    """Sums a gradient over the ranks that hold the same of `slots` stretches, which are of one size.

    All ranks take part, each with its own stretch filled in: a group for every set of sharers would have to be made by the
    whole world. Cost: an all-reduce of `slots` times the gradient's bytes.
    """

    group: Group
    slot: int
    slots: int

    def __call__(self, grad: Tensor) -> Tensor:
        total = grad.new_zeros((self.slots, *grad.shape))
        total[self.slot].copy_(grad)
        ds_comm.all_reduce(total, group=self.group)
        return total[self.slot]


class InputCheck:
    """Compares the first batch on all ranks: ranks that compute parts of one batch and read different ones train nonsense, silently."""

    def __init__(self, group: Group, axis: str = "tensor") -> None:
        self.group, self._axis = group, axis
        self._handle: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> RemovableHandle:
        self._handle = model.register_forward_pre_hook(self, with_kwargs=True)
        return self._handle

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # who compiles a model asks before: `TensorParallelModel.check_inputs`
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        digests = {str(index): _digest(value) for index, value in enumerate(args)}
        digests |= {key: _digest(value) for key, value in kwargs.items()}
        everyones = ds_comm.all_gather_json(digests, self.group)
        differing = sorted(key for key in digests if any(other.get(key) != digests[key] for other in everyones))
        missing = sorted({key for other in everyones for key in other} - set(digests))
        if differing or missing:
            raise PlanError(
                f"{self._axis}-parallel ranks were given different batches: arguments {', '.join(differing + missing)} differ "
                f"between ranks {list(self.group.ranks)}",
                code="tensor-inputs",
                fix=f"Give all ranks of a {self._axis}-parallel group the same samples: sample by the data-parallel rank.",
            )


def _digest(value: Any) -> list[Any]:
    digests: list[Any] = []
    for tensor in tensors_in(value):
        local = tensor.detach().cpu().contiguous()
        digests.append([list(local.shape), str(local.dtype), zlib.crc32(local.view(-1).view(torch.uint8).numpy().data)])
    return digests
