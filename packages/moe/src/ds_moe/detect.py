"""Finding the blocks with experts in a model that was written for one rank, and saying what each of them is. Changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ds_config.errors import PlanError
from ds_moe.config import ExpertParallelConfig
from ds_moe.module_list_block import BlockParts
from ds_moe.moe_families import FAMILIES, PRESETS, MoEFamily, family_of
from ds_moe.packed_block import held_experts
from ds_moe.selection import RouterOptions

__all__ = ["MoEBlock", "recognise"]

_ROUTERS = ("gate", "router")
_SHARED = ("shared_expert", "shared_experts")


@dataclass(frozen=True, slots=True)
class MoEBlock:
    """One block.

    Attributes:
        name: Of what is replaced: the experts of a packed block, the whole of a listed one and of one that only holds weights.
        experts: Their number.
        family: What it is of; None for a user's pattern.
        rule: How its router chooses; None if that is unknown; only replay needs it.
        router: Name of the router.
        parts: Of a block that is replaced whole; None for packed experts.
    """

    name: str
    experts: int
    family: MoEFamily | None
    rule: RouterOptions | None
    router: str
    parts: BlockParts | None = None


def recognise(model: nn.Module, section: ExpertParallelConfig, *, required: bool = True) -> tuple[MoEBlock, ...]:
    """Find the MoE blocks of `model`.

    Args:
        section: A preset, names and patterns; None values are detected.
        required: Whether it is an error if there is none.

    Raises:
        PlanError: there is none, a block has a part that cannot be cut, or the configuration names another router than
        the
            family has ("moe-model", "moe-router").
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    family = _family(section, config)
    pattern = re.compile(section.moe_layer_pattern) if section.moe_layer_pattern else None
    blocks: list[MoEBlock] = []
    for name, block in model.named_modules():
        if pattern is not None and not pattern.search(name):
            continue
        if any(name.startswith(f"{other.name}.") for other in blocks):
            continue
        one = _look(name, block, section)
        if one is not None:
            blocks.append(one)
    if not blocks and not required:
        return ()
    if not blocks:
        raise PlanError(
            f"{type(model).__name__} (model_type {getattr(config, 'model_type', None)!r}) has no block of experts that can be cut"
            + (f", none that {section.moe_layer_pattern!r} matches" if pattern else ""),
            code="moe-model",
            fix="Set expert_parallel.moe_layer_pattern, expert_pattern and router_pattern to the names of its parts, or leave "
            "expert_parallel out. Packed experts of transformers 5 and ModuleLists of experts are known.",
        )
    rule = _rule(section, family, config, blocks[0].experts)
    return tuple(_complete(one, family, rule) for one in blocks)


def _family(section: ExpertParallelConfig, config: Any) -> MoEFamily | None:
    if section.preset_model is None:
        return family_of(config)
    name = PRESETS.get(section.preset_model, section.preset_model)
    if name not in FAMILIES:
        raise PlanError(
            f"preset_model {section.preset_model!r}",
            code="moe-model",
            fix=f"Use one of {sorted({*FAMILIES, *PRESETS})}, or leave it out: families are recognised.",
        )
    return FAMILIES[name]


def _look(name: str, block: nn.Module, section: ExpertParallelConfig) -> MoEBlock | None:
    """Identify `block` by its parts; return None if `block` is no block of experts."""
    children = dict(block.named_children())
    experts = children.get(section.expert_pattern or "experts")
    router = next((r for r in _names(section.router_pattern, _ROUTERS) if r in children), None)
    if experts is None or router is None:
        return None
    if isinstance(experts, nn.ModuleList):
        kinds = {type(expert) for expert in experts}
        if len(experts) < 2 or len(kinds) != 1:
            return None
        shared = next((s for s in _names(section.shared_experts_pattern, _SHARED) if s in children), None)
        gates = _names(section.shared_experts_gate_pattern, ("shared_expert_gate",))
        gate = next((g for g in gates if g in children), None)
        known = {router, section.expert_pattern or "experts", shared, gate}
        strange = [child for child, module in children.items() if child not in known and list(module.parameters())]
        if strange or (section.has_shared_experts is not None and section.has_shared_experts != (shared is not None)):
            raise PlanError(
                f"{name}: a block with experts has parts {sorted(children)}; of {strange or shared} it is not known what they do",
                code="moe-model",
                fix="Name shared experts and their gate in expert_parallel, or leave this block out of moe_layer_pattern.",
            )
        parts = BlockParts(router, section.expert_pattern or "experts", shared, gate)
        return MoEBlock(name, len(experts), None, None, router, parts)
    num_experts = held_experts(experts, children[router])
    others = [
        c for c in children if c not in (router, section.expert_pattern or "experts") and list(children[c].parameters())
    ]
    if num_experts and not others:
        return MoEBlock(name, num_experts, None, None, router, BlockParts(router, section.expert_pattern or "experts"))
    packed = [p for p in experts.parameters(recurse=False) if p.dim() == 3]
    if not packed or not hasattr(experts, "has_gate"):
        return None
    count = packed[0].shape[0]
    return MoEBlock(
        f"{name}.{section.expert_pattern or 'experts'}".lstrip("."), count, None, None, f"{name}.{router}".lstrip(".")
    )


def _names(configured: str | None, usual: tuple[str, ...]) -> Iterator[str]:
    yield from ((configured,) if configured is not None else usual)


def _complete(block: MoEBlock, family: MoEFamily | None, rule: RouterOptions | None) -> MoEBlock:
    if block.parts is not None and rule is None:
        raise PlanError(
            f"{block.name}: a block with a list of experts, or their weights alone, of a family that is not known; how does its router choose?",
            code="moe-router",
            fix="Set expert_parallel.top_k and score_func (and route_norm, route_scale, num_expert_groups if it has them).",
        )
    return replace(block, family=family, rule=rule)


def _rule(section: ExpertParallelConfig, family: MoEFamily | None, config: Any, experts: int) -> RouterOptions | None:
    """Return the router options: those of the family, which `section` must not contradict; else those of `section`."""
    options: dict[str, Any] = {}
    if section.top_k != "auto":
        options["k"] = section.top_k
    elif section.top_k_attr is not None:
        options["k"] = int(_attr(config, section.top_k_attr))
    if section.score_func != "auto":
        options["score"] = section.score_func
    if section.route_norm is not None:
        options["normalize"] = section.route_norm
    if section.routed_scaling_factor != "auto":
        options["scale"] = section.routed_scaling_factor
    elif section.route_scale != 1.0:
        options["scale"] = section.route_scale
    if section.num_expert_groups is not None:
        options |= {"groups": section.num_expert_groups, "limited_groups": section.num_limited_groups}
    count = int(_attr(config, section.num_experts_attr)) if section.num_experts_attr is not None else experts
    wrong = [] if count == experts else [f"{section.num_experts_attr} = {count}, and there are {experts} experts"]
    if family is None:
        if wrong:
            raise _disagree(wrong)
        return RouterOptions(**options) if "k" in options else None
    rule = family.selection(config)
    wrong += [
        f"{key} = {value}, and the router of {family.name} has {getattr(rule, key)}"
        for key, value in options.items()
        if getattr(rule, key) != value
    ]
    if wrong:
        raise _disagree(wrong)
    return rule


def _attr(config: Any, name: str) -> Any:
    if not hasattr(config, name):
        raise _disagree([f"the model's configuration has no {name!r}"])
    return getattr(config, name)


def _disagree(wrong: list[str]) -> PlanError:
    return PlanError(
        "expert_parallel speaks of another router than the model has:\n  " + "\n  ".join(wrong),
        code="moe-router",
        fix="Leave these keys out: the model's own router stays. Change the model's configuration to change it.",
    )
