"""The attributes that clients read on the parameters of a stage 3 model: ds_id, ds_shape, ds_numel, ds_status, ds_tensor.

A parameter of ours has its true shape at all times and changes its class when it is released, so `ds_status` is a small
object that looks at the parameter when it is compared. It equals the member of `ZeroParamStatus` that it stands for.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.utils._pytree import tree_map_only

from deepspeed._ours.base.forwarding import reads
from deepspeed._ours.zero.module_marks import list_external, unlist_external
from deepspeed._ours.zero.param_verbs import Verb, all_gather, all_gather_coalesced, partition
from ds_comm import Group
from ds_zero import ShardedModel, ShardedParameter, safe_get_local_fp32_param, safe_set_local_fp32_param
from ds_zero.runtime.init_shards import chunk_of, is_scattered

_NAMES = (
    "ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "ds_persist", "ds_active_sub_modules", "is_external_param",
    "partition_numel", "all_gather", "all_gather_coalesced", "partition", "ds_zero_placement_family", "ds_zero_partition_group_name", "ds_zero_partition_rank", "ds_zero_partition_world_size",
)  # fmt: skip
_ids = itertools.count()


class ZeroParamStatus(enum.Enum):
    """Whether this rank holds a parameter whole."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


ZeroParamType = enum.Enum("ZeroParamType", "NORMAL PARTITIONED REMOTE")


class Status:
    """The status of one parameter, read when it is asked for. Equal to a `ZeroParamStatus`; pickles as one."""

    __slots__ = ("_param",)

    def __init__(self, param: Parameter) -> None:
        self._param = weakref.ref(param)

    @property
    def now(self) -> ZeroParamStatus:
        """What it is at this moment."""
        return ZeroParamStatus.NOT_AVAILABLE if type(self._param()) is ShardedParameter else ZeroParamStatus.AVAILABLE

    name = reads("now.name", "As an enum member has it.")
    value = reads("now.value", "As an enum member has it.")

    def __eq__(self, other: object) -> bool:
        return self.now is (other.now if isinstance(other, Status) else other)

    def __hash__(self) -> int:
        return hash(self.now)

    def __repr__(self) -> str:
        return repr(self.now)

    def __deepcopy__(self, memo: dict[int, Any]) -> Status:
        param: Any = self._param()
        return Status(memo.get(id(param), param))

    def __reduce__(self) -> tuple[Callable[[int], ZeroParamStatus], tuple[int]]:
        return ZeroParamStatus, (self.value,)


class Partition(Tensor):
    """This rank's elements of a parameter as it has them now, in its master's dtype: what `ds_tensor` is. Or a view of them.

    A write, also of `data` or through a view, goes to the parameter: the next forward uses it. Collective where the whole parameter is kept.
    """

    _param: weakref.ref[Parameter]
    _base_elements: Tensor | None  # all elements, where this is a view of them

    @classmethod
    def of(cls, param: Parameter) -> Partition | None:
        """Return that of a parameter, None where it has none."""
        local = _local(param)
        if local is None:
            return None
        partition = cls._wrap(local, weakref.ref(param), None)
        partition.ds_numel, partition.status = local.numel(), ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
        return partition

    @classmethod
    def _wrap(cls, tensor: Tensor, param: weakref.ref[Parameter], elements: Tensor | None) -> Partition:
        partition: Partition = tensor.as_subclass(cls)
        partition._param, partition._base_elements = param, elements
        return partition

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        used: list[tuple[weakref.ref[Parameter], Tensor, Tensor, int]] = []

        def plain_of(partition: Partition) -> Tensor:
            param, elements = partition._param(), partition._base_elements
            local = None if param is None or elements is not None else _local(param)
            tensor = partition.as_subclass(Tensor) if local is None else local
            if param is not None:
                used.append((partition._param, tensor, tensor if elements is None else elements, tensor._version))
            return tensor

        with torch._C.DisableTorchFunctionSubclass():
            plain, named = tree_map_only(Partition, plain_of, (args, dict(kwargs or {})))
            if getattr(func, "__name__", "") == "__set__" and used and isinstance(plain[1], Tensor):
                with torch.no_grad():
                    plain[0].copy_(plain[1].view_as(plain[0]))
                result = None
            else:
                result = func(*plain, **named)
            for param, tensor, elements, version in used:
                holder = param()
                if tensor._version != version and holder is not None and not is_scattered(holder):
                    safe_set_local_fp32_param(holder, elements)
                if isinstance(result, Tensor) and result.is_set_to(tensor):
                    return args[0] if isinstance(args[0], Partition) else result
                if isinstance(result, Tensor) and result.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                    return cls._wrap(result, param, elements)
        return result


def _local(param: Parameter) -> Tensor | None:
    return chunk_of(param) if is_scattered(param) else safe_get_local_fp32_param(param)


def mark(sharding: ShardedModel) -> None:
    """Give every parameter of a stage 3 model its attributes, and its modules their lists. Other stages have none, as upstream."""
    if not sharding.options.residency.shard_params:
        return
    for module in sharding.model.modules():
        list_external(module)
    for unit in sharding.units:
        for param in unit.params:
            _set(param, unit.groups.shard_group, persists=not unit.releases)


def mark_scattered(param: Parameter, ranks: Group) -> None:
    """Set upstream's attributes on a parameter that `zero.Init` has sharded over `ranks`.

    Does nothing for a parameter that has the attributes.
    """
    if not is_zero_param(param):
        _set(param, ranks, persists=False)


def _set(param: Parameter, ranks: Group, *, persists: bool) -> None:
    expert = not getattr(param, "allreduce", True)
    values: dict[str, Any] = {
        "ds_id": param.__dict__.get("ds_id", next(_ids)),
        "ds_shape": param.shape,
        "ds_numel": param.numel(),
        "ds_status": Status(param),
        "ds_tensor": Partition.of(param),
        "ds_persist": persists,
        "ds_active_sub_modules": set(),
        "is_external_param": False,
        "partition_numel": partial(_share, param.numel(), ranks.size),
        **{verb.__name__: Verb(verb, param) for verb in (all_gather, all_gather_coalesced, partition)},
        "ds_zero_placement_family": "autoep_expert" if expert else "replicated",
        "ds_zero_partition_group_name": getattr(param, "group_name", None) if expert else None,
        "ds_zero_partition_rank": ranks.rank,
        "ds_zero_partition_world_size": ranks.size,
    }
    for name, value in values.items():
        setattr(param, name, value)


def unmark(model: nn.Module) -> None:
    """Take the attributes of `mark` away."""
    unlist_external(model)
    for param in model.parameters():
        for name in _NAMES:
            param.__dict__.pop(name, None)


def is_zero_param(parameter: object) -> bool:
    """Whether a parameter is one of a stage 3 model."""
    return hasattr(parameter, "ds_id")


def get_allgather_dtype(param: Parameter, param_ds_tensor: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's all-gather: its compute dtype, whatever its master's dtype is."""
    del param_ds_tensor
    return param.dtype


def _share(numel: int, ranks: int) -> int:
    """Return the elements of a rank's shard of an even split, as upstream counts elements."""
    return -(-numel // ranks)
