"""The model's values out of the shards: a plain state dict on rank 0, and one file of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ds_ckpt.coordinator import TRANSFER_S, Coordinator
from ds_comm import (
    Box,
    Group,
    all_gather_json,
    all_gather_object,
    all_reduce,
    broadcast_json,
    broadcast_object_list,
    param_sharding,
)
from ds_config.regular_file import replacing
from ds_zero import GatheredParameters, ShardedModel

__all__ = ["full_state", "load_whole", "names_of_wholes", "save_whole", "shared_state"]


def full_state(
    module: nn.Module,
    sharding: ShardedModel,
    *,
    lead: bool,
    dtype: torch.dtype | None = None,
    exclude_frozen: bool = False,
) -> dict[str, Tensor]:
    """Return the full state dict of `module` in host memory where `lead` says so, and {} elsewhere. Collective.

    Args:
        lead: Whether this rank gets the state dict.
        dtype: Dtype of floating-point values; None keeps the compute dtype.
        exclude_frozen: Leave out parameters that need no gradient.
    Names, order and nesting are those of the module's `state_dict`; tied tensors are one tensor, what is no tensor (`get_extra_state`) is
    given as it is. Tensor-parallel shards are joined, under the name of the whole tensor. Cost: one all-gather of the parameters, unit by unit, and two for sharded tensors.
    """
    copies: dict[int, Tensor] = {}
    inside = set(map(id, module.parameters()))
    for unit in sharding.units:
        wanted = [param for param in unit.params if id(param) in inside]
        with GatheredParameters(wanted):
            if lead or sharding.families[unit.spec.family].group.rank == 0:  # experts are on ranks of their own
                copies |= {id(param): _copy(param, dtype) for param in wanted}
    names = _join(module, sharding, copies)
    if not lead:
        return {}

    given = module.state_dict(keep_vars=True)
    state: dict[str, Tensor] = _whole(given, names, copies, dtype, exclude_frozen)
    return state


def _whole(
    value: Any, names: Mapping[str, str], copies: dict[int, Tensor], dtype: torch.dtype | None, exclude_frozen: bool
) -> Any:
    """Return a state dict, or what is in one, with whole copies, which are added to `copies`."""
    if isinstance(value, Mapping):  # of a module whose `state_dict` gives one by part, as Megatron's do
        return {
            names.get(name, name): _whole(inner, names, copies, dtype, exclude_frozen)
            for name, inner in value.items()
            if not (exclude_frozen and _is_frozen(inner))
        }
    if not isinstance(value, Tensor):
        return value
    if id(value) not in copies:
        copies[id(value)] = _copy(value, dtype)
    return copies[id(value)]


def _is_frozen(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and not value.requires_grad


def _parts(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the parameters that are shards of larger tensors, and their names in the module."""
    parts: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if param_sharding(param).box is not None:
            parts.setdefault(param, []).append(name)
    return parts


def names_of_wholes(module: nn.Module) -> dict[str, str]:
    """Map the name of each parameter that is a shard of a larger tensor to that tensor's name in the unsharded module."""
    parts = _parts(module)
    return {name: name for names in parts.values() for name in names} | _names_of_wholes(parts)


def _names_of_wholes(parts: Mapping[nn.Parameter, Sequence[str]]) -> dict[str, str]:
    # Several shards of one tensor are numbered at the end.
    several = Counter(param_sharding(param).name for param in parts)
    numbered = [param for param in parts if several[param_sharding(param).name] > 1]
    return {name: name.rpartition("_")[0] for param in numbered for name in parts[param]}


def _join(module: nn.Module, sharding: ShardedModel, copies: dict[int, Tensor]) -> dict[str, str]:
    """Put wholes in the place of parts, in `copies`. Returns what names become. Collective over all ranks of the model.

    One rank of those that hold the same part gives it; the axis by which a tensor was cut does not matter.
    """
    parts, everyone = _parts(module), sharding.everyone
    by_name: dict[str, list[nn.Parameter]] = {}
    for param in parts:
        by_name.setdefault(str(param_sharding(param).name), []).append(param)
    local_parts = [
        (name, spec.shape, spec.box, copies[id(param)].dtype)
        for name, params in by_name.items()
        for param, spec in ((p, param_sharding(p)) for p in params)
        if id(param) in copies
    ]
    rank_parts: list[Any] = [None] * everyone.size
    all_gather_object(rank_parts, local_parts, group=everyone)
    wholes = {name: (shape, dtype) for rank in rank_parts for name, shape, _, dtype in rank}
    givers = {(name, box): rank for rank in reversed(range(everyone.size)) for name, _, box, _ in rank_parts[rank]}
    device = next((unit.device for unit in sharding.units), torch.device("cpu"))
    for name, (shape, dtype) in sorted(wholes.items()):
        whole = torch.zeros(shape, dtype=dtype, device=device)
        for param in by_name.get(name, ()):
            box = param_sharding(param).box
            if box is not None and givers[name, box] == everyone.rank:
                whole[_of(box)] = copies[id(param)]
        all_reduce(whole, group=everyone, unit=name)
        ours = [param for param in by_name.get(name, ()) if id(param) in copies]
        if ours:
            copies.update(dict.fromkeys(map(id, ours), whole.cpu()))
    return _names_of_wholes(parts)


def _of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))


def _copy(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return value.detach().to("cpu", wanted, copy=True)


def save_whole(state: Mapping[str, Tensor], path: Path, group: Group) -> None:
    """Write a state dict that rank 0 has: safetensors, or torch's pickle for other endings. Collective.

    The file is complete or not there. Safetensors hold tied tensors once, under their first name.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write it ("ckpt-io").
    """

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            if path.suffix == ".safetensors":
                first: dict[int, str] = {}
                once = {n: t.contiguous() for n, t in state.items() if first.setdefault(id(t), n) == n}
                save_file(once, draft, metadata={"format": "pt"})
            else:
                with draft.open("wb") as file:  # an archive is named after a path
                    torch.save(dict(state), file)

    Coordinator(group).first(write, patience_s=TRANSFER_S)


def shared_state(state: Mapping[str, Any], group: Group) -> Mapping[str, Any]:
    """Return the state dict of the first rank that has one, on ranks whose own is empty (as `full_state` leaves it). Collective.

    Cost: one broadcast of each value, if there are such ranks.
    """
    holders = [rank for rank, has in enumerate(all_gather_json(bool(state), group, unit="state_dict")) if has]
    if len(holders) in (0, group.size):
        return state
    whole: dict[str, Any] = {}
    for name in broadcast_json(list(state), group, group_src=holders[0]):
        value = [state.get(name)]
        broadcast_object_list(value, group=group, group_src=holders[0], unit=name)
        whole[name] = state.get(name, value[0])
    return whole


def load_whole(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
    """Load a whole state dict, the same on every rank, into a sharded model; ranks that hold parts take theirs. Collective.

    Returns: missing and unexpected keys, as torch's `load_state_dict` does.
    """
    parts = _parts(module)
    full_names, local_state = _names_of_wholes(parts), dict(state)
    for param, names in parts.items():
        box = param_sharding(param).box
        for name in names:
            whole = state.get(full_names.get(name, name))
            if box is not None and isinstance(whole, Tensor) and whole.shape == param_sharding(param).shape:
                local_state.pop(full_names.get(name, name), None)
                local_state[name] = whole[_of(box)]
    state = local_state
    with GatheredParameters(module, write=True):
        result = module.load_state_dict(state, strict=strict)
    return list(result.missing_keys), list(result.unexpected_keys)
