"""What programs ask about experts when they build an optimizer. Names and results are those of `deepspeed.moe.utils`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ds_config.errors import PlanError
from ds_moe.moe_layer import MOELayer

__all__ = [
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_grads_into_shared_and_expert_params",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]

Group = dict[str, Any]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether there is an MoE layer, and the number of experts of the first."""
    first = next((module for module in m.modules() if isinstance(module, MOELayer)), None)
    return (False, 0) if first is None else (True, first.num_experts)


def is_moe_param(param: Tensor) -> bool:
    """Whether it belongs to an expert: `param.allreduce` is False."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Whether it is a group of experts' parameters."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split parameters into those of all tokens and those of experts."""
    params = list(params)
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(group: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split the gradients that exist into those of shared parameters and those of experts."""
    shared, expert = split_params_into_shared_and_expert_params(p for p in group if p.grad is not None)
    return [p.grad.to(p.dtype) for p in shared if p.grad is not None], [
        p.grad.to(p.dtype) for p in expert if p.grad is not None
    ]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Group | Sequence[Group], max_group_size: float | None = 178956971
) -> list[Group]:
    """Take experts' parameters out of their groups into groups of their own, with the same settings.

    Args:
        param_groups: Changed: they keep what is not of experts. Each has a "name" if there are experts.
        max_group_size: Most elements in a group of experts; None for no limit. A larger parameter has a group of its own.
    Returns: The groups, then those of experts: "moe" is True and "name" the name of their expert group.
    """
    if isinstance(param_groups, dict):
        param_groups = [param_groups]
    if not isinstance(param_groups, list | tuple):
        raise PlanError(
            f"parameter groups are a dict or a list of dicts, got {type(param_groups).__name__}",
            code="moe-param-groups",
            fix='Pass {"params": [...], "name": "..."} or a list of those.',
        )
    groups = list(param_groups)
    extra: list[Group] = []
    for group in groups:
        shared, expert = split_params_into_shared_and_expert_params(group["params"])
        group["params"] = shared
        settings = {key: value for key, value in group.items() if key != "params"}
        for name in sorted({str(getattr(p, "group_name", None)) for p in expert}):
            group_params = [p for p in expert if str(getattr(p, "group_name", None)) == name]
            extra += [
                {**settings, "name": name, "moe": True, "params": part} for part in _parts(group_params, max_group_size)
            ]
    return groups + extra


def configure_moe_param_groups(model_parameters: Sequence[Any]) -> list[Any]:
    """Groups for an optimizer from parameters or groups; groups that were split before stay as they are."""
    if not isinstance(model_parameters, list) or not all(isinstance(p, Tensor | dict) for p in model_parameters):
        raise PlanError(
            "model_parameters must be a list of parameters or of groups",
            code="moe-param-groups",
            fix="Pass list(model.parameters()).",
        )
    if model_parameters and isinstance(model_parameters[0], dict):
        if any("moe" in group for group in model_parameters):
            return model_parameters
        return split_params_into_different_moe_groups_for_optimizer(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer({"params": model_parameters, "name": "dense-params"})


def _parts(params: list[Tensor], limit: float | None) -> list[list[Tensor]]:
    parts: list[list[Tensor]] = []
    room = 0.0
    for param in params:
        numel = getattr(param, "ds_numel", None) or param.numel()
        if not parts or numel > room:
            parts.append([])
            room = float("inf") if limit is None else limit
        parts[-1].append(param)
        room -= numel
    return parts
