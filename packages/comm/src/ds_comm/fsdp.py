"""torch's FSDP2 around a model of which ranks hold different parts.

`fully_shard` takes rows of every rank's parameter and puts them together as one tensor: right for what its ranks hold alike, and a mixture
of different experts or parts otherwise, of which nobody would notice. `watch_fsdp` compares the ranks of its meshes with those of the parts in the
model's first forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_comm.ddp import others_of
from ds_comm.groups import world_group
from ds_config.errors import PlanError

__all__ = ["watch_fsdp"]

_SHOWN = 3  # names in a message


def watch_fsdp(model: nn.Module) -> RemovableHandle:
    """Refuse in the first forward of `model` that FSDP2 shards a parameter over ranks with other parts. Call when the parts are marked."""
    ranks = world_group().ranks
    unlike = {
        (id(module), name): set(others_of(param, ranks))
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None
    }

    def check(*_: Any) -> None:
        handle.remove()
        names = {id(module): name for name, module in model.named_modules()}
        touched = {
            f"{names[id(module)]}.{name}".lstrip("."): others & mesh
            for module, name, mesh in _sharded(model)
            if id(module) in names and (others := unlike.get((id(module), name), set())) & mesh
        }
        if touched:
            raise _refusal(touched)

    handle = model.register_forward_pre_hook(check)
    return handle


def _sharded(model: nn.Module) -> Iterator[tuple[nn.Module, str, set[int]]]:
    """Yield (module, parameter name, ranks) of what FSDP2 shards within `model`."""
    sharded_module: Any
    for sharded_module in model.modules():
        state = sharded_module._get_fsdp_state() if hasattr(sharded_module, "_get_fsdp_state") else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for sharded in getattr(group, "fsdp_params", ()):
                owner = sharded._module_info
                mesh = sharded.sharded_param.device_mesh.mesh
                yield owner.module, owner.param_name, set(mesh.flatten().tolist())


def _refusal(touched: dict[str, set[int]]) -> PlanError:
    listing = [f"{name} (other values on ranks {sorted(others)})" for name, others in list(touched.items())[:_SHOWN]]
    more = f", and {len(touched) - _SHOWN} more" if len(touched) > _SHOWN else ""
    return PlanError(
        f"fully_shard would put {len(touched)} tensors together from ranks that hold different parts: {', '.join(listing)}{more}",
        code="comm-fsdp",
        fix="Shard these modules over the ranks that hold the same parts (fully_shard(experts, mesh=...)) before the module around them, or use "
        "ds_parallel.tensor.dtensor_params.parallelize_module, or let ds_zero.shard reduce and shard.",
    )
