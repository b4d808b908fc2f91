"""Experts of a model that was written for one rank, cut over ranks: found, replaced, and given back.

cut = apply_expert_parallel(model, ExpertParallelConfig(enabled=True, autoep_size=2))
...                           # ds_zero.shard(model, optimizer), train
cut.undo()                    # the model as it was, all experts on every rank
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_comm import Mesh, ParamSharding, broadcast, param_sharding, set_param_sharding
from ds_config.errors import UnsupportedConfigError
from ds_moe.config import ExpertParallelConfig
from ds_moe.detect import MoEBlock, recognise
from ds_moe.expert_groups import ExpertGroups, alone, make_places
from ds_moe.module_list_block import ListedBlock
from ds_moe.packed_block import HeldBlock
from ds_moe.packed_experts import PackedExperts, gather_experts
from ds_moe.selection import weigh

__all__ = ["ExpertParallelModel", "apply_expert_parallel"]

Layer = PackedExperts | ListedBlock


@dataclass(slots=True, eq=False)
class ExpertParallelModel:
    """What `apply_expert_parallel` made.

    Attributes:
        layers: What runs in place of the model's own modules, by their names.
        blocks: What was recognised.
    """

    model: nn.Module
    layers: dict[str, Layer]
    blocks: tuple[MoEBlock, ...]
    places: ExpertGroups
    _hooks: list[Any] = field(default_factory=list)
    _blocks: dict[str, nn.Module] = field(default_factory=dict)

    def undo(self) -> None:
        """Give the model back as it was, with trained values; all experts on every rank. Collective.

        Parameters must be whole: close ZeRO before.
        """
        for name, layer in self.layers.items():
            _put(self.model, name, _whole(layer, self.places))
        for name, block in self._blocks.items():
            _put(self.model, name, block)
        for hook in self._hooks:
            hook.remove()
        self.places.close()
        self.layers, self._hooks, self._blocks = {}, [], {}


def apply_expert_parallel(
    model: nn.Module,
    section: ExpertParallelConfig,
    mesh: Mesh | None = None,
    *,
    data_first: bool = False,
    required: bool = True,
    take: Callable[[nn.Parameter], None] = lambda param: None,
) -> ExpertParallelModel:
    """Replace the blocks with experts of `model` by ones that have this rank's experts only.

    Args:
        model: With the same values on every rank; or on the meta device, to be loaded (`ds_moe.load_experts`).
        mesh: The groups of this rank; None: all ranks split the batch.
        data_first: Ranks with the same experts are neighbours.
        required: Whether a model without experts is an error; a pipeline stage may have none.
        take: Called with each parameter of a block's experts before the block is cut, on every rank in one order: afterwards the
            parameter is whole, and nobody's but the model's (`ds_zero.Init` leaves shards).

    Raises:
        PlanError: nothing was recognised, experts or ranks do not divide ("moe-model", "moe-router", "moe-places").
        UnsupportedConfigError: experts themselves are to be cut ("moe-unbuilt").
    Everything is looked at before anything is changed. Collective over the world; no values are sent.
    """
    if section.expert_tensor_parallel_size > 1:
        raise UnsupportedConfigError(
            f"expert_tensor_parallel_size = {section.expert_tensor_parallel_size}: experts are cut by number only",
            code="moe-unbuilt",
            fix="Use 1 and a larger autoep_size: tensor-parallel ranks take a part of the tokens each.",
        )
    moe_blocks = recognise(model, section, required=required)
    ready = [(one, _ready(model, one)) for one in moe_blocks]
    places = (
        alone()
        if section.autoep_size == 1 and mesh is None
        else make_places(
            section.autoep_size,
            mesh,
            data_first=data_first,
            across_tensor=mesh is not None
            and (mesh["gradient"].size % section.autoep_size) > 0
            and mesh["tensor"].size > 1,
        )
    )
    for one in moe_blocks:
        places.local(one.experts)
    cut = ExpertParallelModel(model, {}, (), places)
    for one, module in ready:
        _put(model, one.name, module)
        layer: Layer
        if isinstance(module, HeldBlock):  # from here on its experts are packed ones like others
            cut._blocks[one.name] = module.original[0]
            router, experts = (f"{one.name}.{part}" for part in (module.parts.router, module.parts.experts))
            one, layer = replace(one, name=experts, router=router, parts=None), module.packed
        else:
            layer = module
        layer.how = replace(
            layer.how, weigh_first=section.score_apply == "pre", compare=section.validate_folding_routing
        )
        for param in (
            layer.get_submodule(layer.parts.experts) if isinstance(layer, ListedBlock) else layer
        ).parameters():
            take(param)
        layer.settle(places, one.name)
        cut.layers[one.name] = layer
        cut.blocks += (one,)
        if isinstance(module, PackedExperts):
            cut._hooks.append(model.get_submodule(one.router).register_forward_hook(_replayed(module, one)))
    return cut


def _ready(model: nn.Module, one: MoEBlock) -> Layer | HeldBlock:
    module = model.get_submodule(one.name)
    if one.parts is None or one.rule is None:
        return PackedExperts(module, one.experts)
    if not isinstance(module.get_submodule(one.parts.experts), nn.ModuleList):
        return HeldBlock(module, one.parts, one.rule)
    returns = _returns_logits(module, one.parts.router) if one.family is None else one.family.returns_logits
    return ListedBlock(module, one.parts, one.rule, returns)


def _returns_logits(block: nn.Module, router: str) -> bool:
    """Whether a user's own block returns router logits besides its output: it is called once, and taken for one that does where it cannot be."""
    weight = getattr(block.get_submodule(router), "weight", None)
    if weight is None or any(param.is_meta for param in block.parameters()):
        return True
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # the model's own draws are not disturbed
            return isinstance(block(weight.new_zeros(1, 2, weight.shape[1])), tuple)
    except Exception:  # the author's code, with an input of another shape than it may expect
        return True


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent).register_module(child, module)


def _replayed(layer: PackedExperts, one: MoEBlock) -> Callable[..., Any]:
    """Return a hook for the family's router that replays the choices of a routing trace while the trace plays.

    The choices are weighted by the current scores.
    """

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        track = layer.track
        if track is None or not track.playing or one.rule is None:
            return None
        logits: Tensor = output[0]
        choices = track.next_choices(logits.shape[0])
        if choices is None:
            return None
        raw = logits.float()
        scores = {"sigmoid": raw.sigmoid, "softmax": lambda: raw.softmax(-1), "softmax_of_chosen": lambda: raw}
        weights = weigh(scores[one.rule.score](), choices, one.rule).to(output[1].dtype)
        return (logits, weights, choices)

    return hook


def _whole(layer: Layer, places: ExpertGroups) -> nn.Module:
    """Gather the values of all experts into the module that was replaced, and return that module. Collective."""
    original: nn.Module = layer.original[0]
    for param in layer.parameters():  # whole again: of no family, and no part
        if param_sharding(param).family is not None:
            set_param_sharding(param, ParamSharding(None, param_sharding(param).name))
    if isinstance(layer, PackedExperts):
        for param in layer.parameters(recurse=False):
            param.data = gather_experts(param, places)
        return original
    if places.expert.size == 1:
        return original
    local_expert = next(iter(layer.get_submodule(layer.parts.experts).children()))
    for number, expert in enumerate(original.get_submodule(layer.parts.experts).children()):
        owner = number // (layer.num_experts // places.expert.size)
        for param, like in zip(expert.parameters(), local_expert.parameters(), strict=True):
            if owner != places.expert.rank:
                param.data = torch.empty_like(like)
            broadcast(param.detach(), group_src=owner, group=places.expert, unit="experts")
    return original
