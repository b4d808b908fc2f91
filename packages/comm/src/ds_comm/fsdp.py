"""torch's FSDP around a model of which ranks hold different parts.

`fully_shard` takes rows of every rank's parameter and puts them together as one tensor: right for what its ranks hold alike, and a mixture
of different experts, parts or stages otherwise, of which nobody would notice. `watch_fsdp` compares the ranks of its meshes with those of the
parts, in the first forward in which FSDP holds them: of the model or of the module with the part, whatever module FSDP was put around, and when.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.utils.hooks import RemovableHandle

from ds_comm.ddp import others_of
from ds_comm.groups import world_group
from ds_config.errors import PlanError

__all__ = ["unwatch_fsdp", "watch_fsdp"]

Unlike = Mapping[str, frozenset[int]]
"""Of a module's own parameters, the ranks of the world that hold other values."""

_SHOWN = 3  # names in a message


def watch_fsdp(model: nn.Module) -> list[RemovableHandle]:
    """Refuse in a forward that FSDP shards a parameter of `model` over ranks with other parts. Call when the parts are marked.

    Not every user calls `model` itself, so each module with such a parameter is watched besides. Nothing is sent.
    """
    ranks = world_group().ranks
    unlike: dict[str, Unlike] = {}
    for name, module in model.named_modules():
        params = ((key, param) for key, param in module._parameters.items() if param is not None)
        others = {key: frozenset(others_of(param, ranks)) for key, param in params}
        if any(others.values()):
            unlike[name] = others
    if not unlike:
        return []
    inner = [
        model.get_submodule(name).register_forward_pre_hook(_Check({"": of})) for name, of in unlike.items() if name
    ]
    return [model.register_forward_pre_hook(_Check(unlike)), *inner]


def unwatch_fsdp(model: nn.Module) -> None:
    """Remove the hooks of `watch_fsdp` from `model` and the modules within: for a model that is sharded otherwise and captured by a compiler."""
    for module in model.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, _Check):
                del module._forward_pre_hooks[number]


@dataclass(slots=True)
class _Check:
    """A hook that is copied and saved with its module: it has names, and no module of its own.

    It runs before every forward, so it looks at its modules only when FSDP has come to `model` or anywhere in the process since it last did;
    where FSDP came to a module within alone, that module's own hook sees it.
    """

    unlike: Mapping[str, Unlike]
    last_seen: tuple[int, bool] = (0, False)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.unlike,)  # what was looked at is another process's, or another module's

    def __call__(self, model: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        now = len(_composable_state._module_state_mapping), hasattr(model, "_is_fsdp_managed_module")
        if now == self.last_seen:
            return
        watched = {name: model.get_submodule(name) for name in self.unlike}
        managed = {name: module for name, module in watched.items() if hasattr(module, "_is_fsdp_managed_module")}
        names = {id(module): name for name, module in managed.items()}
        touched: dict[str, frozenset[int]] = {}
        sharded = set()
        for module, key, mesh in _sharded():
            name = names.get(id(module))
            if name is None:
                continue
            sharded.add(name)
            if others := self.unlike[name].get(key, frozenset()) & mesh:
                touched[f"{name}.{key}".lstrip(".")] = others
        if touched:
            raise _refusal("fully_shard", touched)
        # FSDP1 marks its modules alike; fully_shard leaves those of `ignored_params` as they are.
        for name in managed.keys() - sharded:
            held = managed[name]._parameters
            parts = {
                f"{name}.{key}".lstrip("."): others
                for key, others in self.unlike[name].items()
                if others and ((param := held.get(key)) is None or not others_of(param, others))
            }
            if parts:
                raise _refusal("FullyShardedDataParallel", parts)
        self.last_seen = now


def _sharded() -> Iterator[tuple[nn.Module, str, frozenset[int]]]:
    """Yield (module, parameter name, ranks) of all that `fully_shard` has sharded in this process.

    Which module FSDP was put around is not to be seen from within it, so all its states are asked.
    """
    for reference in list(_composable_state._module_state_mapping.values()):
        state: Any = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for sharded in getattr(group, "fsdp_params", ()):
                owner = sharded._module_info
                places = [
                    (owner.module, owner.param_name),
                    *zip(owner.shared_modules, owner.shared_param_names, strict=True),
                ]
                mesh = frozenset(sharded.sharded_param.device_mesh.mesh.flatten().tolist())
                for module, key in places:
                    yield module, key, mesh


def _refusal(function: str, touched: Mapping[str, frozenset[int]]) -> PlanError:
    listing = [f"{name} (other values on ranks {sorted(others)})" for name, others in list(touched.items())[:_SHOWN]]
    more = f", and {len(touched) - _SHOWN} more" if len(touched) > _SHOWN else ""
    return PlanError(
        f"{function} would put {len(touched)} tensors together from ranks that hold different parts: {', '.join(listing)}{more}",
        code="comm-fsdp",
        fix="Shard these modules over the ranks that hold the same parts (fully_shard(experts, mesh=...)) before the module around them, or use "
        "ds_parallel.tensor.dtensor_params.parallelize_module, or let ds_zero.shard reduce and shard.",
    )
