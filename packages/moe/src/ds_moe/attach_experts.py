"""Saying of a model's experts where they are and what they are called: before ZeRO, once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_comm import (
    Mesh,
    ParamSharding,
    ReductionGroup,
    all_gather_json,
    all_reduce,
    param_sharding,
    set_param_sharding,
    world_group,
)
from ds_comm.ddp import leave_out
from ds_comm.fsdp import watch_fsdp
from ds_comm.part_gradients import guard_gradients
from ds_moe.expert_groups import ExpertGroups, alone, make_places
from ds_moe.experts import Experts
from ds_moe.moe_layer import MOELayer

__all__ = ["ExpertPlacement", "place_experts"]

_NUMBER = re.compile(r"(experts\.deepspeed_experts\.)\d+\.")


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlacement:
    """What `place_experts` made."""

    layers: dict[str, MOELayer]
    places: tuple[ExpertGroups, ...]
    handles: list[RemovableHandle] = field(default_factory=list)

    def close(self) -> None:
        """End the groups that were made; layers whose experts are on several ranks cannot run any more. Collective."""
        while self.handles:
            self.handles.pop().remove()
        for layer in self.layers.values():
            layer.places = alone() if layer.ep_size == 1 else None
        for places in self.places:
            places.close()


def place_experts(model: nn.Module, mesh: Mesh | None = None, *, data_first: bool = False) -> ExpertPlacement:
    """Give every MoE layer of `model` its ranks, and tell what its experts are to ds-zero and to checkpoints.

    Parameters get their family (which ranks hold them and sum their gradients) and the name of the logical tensor: of
    the copies of an `Experts` that is their name with the number among all experts, so that checkpoints do not
    depend on the ranks.

    A `DistributedDataParallel` around `model` leaves the experts out: each rank keeps its own, and their gradients are summed over
    the ranks that hold them and divided by the ranks that the batch is split over, as DDP averages the others. Around a module
    that contains `model` it raises PlanError ("comm-ddp"): place that module instead. FSDP2 over ranks with different experts is refused in the
    first forward ("comm-fsdp"): shard the experts over the ranks that hold them first, docs/how-to/two-dimensions.md.

    Experts that tensor parallelism has cut before stay cut: their layer then gives all rows to every tensor-parallel rank, and
    compares the routing of those in every forward, because ranks that route differently would wait for each other for ever.

    Args:
        model: The whole model, so that names in checkpoints are those of its parameters.
        mesh: The groups of this rank; None: all ranks split the batch.
        data_first: Ranks with the same experts are neighbours.

    Raises:
        PlanError: experts or ranks cannot be cut evenly ("moe-places").
    Collective over the world, in the order of the layers' ep_size.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MOELayer)}
    apart = {name: layer for name, layer in layers.items() if layer.ep_size > 1 or (mesh and mesh["tensor"].size > 1)}
    sizes_here = [layer.ep_size for layer in apart.values()]  # a pipeline stage may have no such layer
    seeds_here = {name: cast(Experts, layer.experts).seed for name, layer in apart.items()}
    everywhere = all_gather_json([sizes_here, seeds_here])
    sizes = sorted({size for of_rank, _ in everywhere for size in of_rank})
    seeds = {name: seed for _, of_rank in reversed(everywhere) for name, seed in of_rank.items()}  # the first rank's
    groups_by_size = {size: make_places(size, mesh, data_first=data_first) for size in sizes}
    for name, layer in layers.items():
        layer.gate.name = f"{name}.gate"
        if name not in apart:
            continue
        places = groups_by_size[layer.ep_size]
        layer.places = places
        _settle(layer, places, name)
        if (seed := seeds[name]) is not None:
            cast(Experts, layer.experts).draw(seed, places.local(layer.num_experts).start)
    _leave_out_of_ddp(model, {name: layers[name] for name in apart})
    spread = {
        id(p): p for n, layer in layers.items() if n in apart and layer.ep_size > 1 for p in layer.experts.parameters()
    }
    handles = guard_gradients(
        spread.values(), "Call ds_moe.reduce_gradients(model, mesh) and ds_moe.clip_grad_norm_(model, max_norm)."
    )
    if spread:
        handles += watch_fsdp(model)
    return ExpertPlacement(dict(layers), tuple(groups_by_size.values()), handles)


def _leave_out_of_ddp(model: nn.Module, apart: dict[str, MOELayer]) -> None:
    own = {id(t) for layer in apart.values() for t in [*layer.experts.parameters(), *layer.experts.buffers()]}
    reduce: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        family = param_sharding(tensor).family
        if id(tensor) in own and family is not None:
            reduce[name] = partial(_averaged, family)
    if reduce:
        leave_out(model, reduce)


def _averaged(family: ReductionGroup, grad: Tensor) -> Tensor:
    """The gradient of the mean loss of all ranks. Collective over the family."""
    total = grad.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group=family.group, unit="moe.gradients")
    return total.div_(family.divisor)


def _settle(layer: MOELayer, places: ExpertGroups, name: str) -> None:
    """Record the reduction group and the checkpoint name of each expert parameter of `layer`.

    Parts that tensor parallelism made stay parts.
    """
    first, many = places.local(layer.num_experts).start, world_group().size > 1
    experts = cast(Experts, layer.experts).deepspeed_experts
    if places.tensor.size > 1 and any(param_sharding(param).box is not None for param in experts.parameters()):
        # A part of an expert is of use only if its peers see the same rows, and their sums wait for each other.
        layer.how = replace(layer.how, split=False, compare=True)
    families: dict[int, ReductionGroup] = {}
    for number, expert in enumerate(experts):
        for rest, param in [*expert.named_parameters(), *expert.named_buffers()]:
            was = param_sharding(param)
            full = was.name or f"{name}.experts.deepspeed_experts.0.{rest}".lstrip(".")
            full = _NUMBER.sub(lambda found, at=first + number: f"{found[1]}{at}.", full)  # type: ignore[misc]
            if layer.how.split:
                family = places.family
            else:
                copies = places.tensor.size if was.family is None else was.family.copies
                family = families.setdefault(copies, _whole_rows(places, copies))
            set_param_sharding(param, ParamSharding(family if many else None, full, was.shape, was.box))


def _whole_rows(places: ExpertGroups, copies: int) -> ReductionGroup:
    """Build the reduction group of parameters that see all rows of their tensor-parallel ranks.

    `copies` of these ranks have the same values.
    """
    title = f"{places.family.name}-tensor" + (f"-{copies}" if copies > 1 else "")
    return ReductionGroup(title, places.data, places.family.divisor, copies=copies)
