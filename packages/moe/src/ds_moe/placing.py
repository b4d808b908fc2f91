"""Saying of a model's experts where they are and what they are called: before ZeRO, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import nn

from ds_comm import Assignment, Family, Mesh, all_gather_json, assign, world_group
from ds_moe.experts import Experts
from ds_moe.layer import MOELayer
from ds_moe.places import Places, alone, make_places

__all__ = ["Placed", "place"]


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """What `place` made."""

    layers: dict[str, MOELayer]
    places: tuple[Places, ...]

    def close(self) -> None:
        """End the groups that were made; layers whose experts are on several ranks cannot run any more. Collective."""
        for layer in self.layers.values():
            layer.places = alone() if layer.ep_size == 1 else None
        for places in self.places:
            places.close()


def place(model: nn.Module, mesh: Mesh | None = None, *, data_first: bool = False) -> Placed:
    """Give every MoE layer of `model` its ranks, and tell what its experts are to ds-zero and to checkpoints.

    Parameters are told their family (who holds them, who sums their gradients) and the name of the logical tensor: of
    the copies of an `Experts` that is their name with the number among all experts, so that checkpoints do not
    depend on the ranks.

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
    told = all_gather_json([layer.ep_size for layer in apart.values()])  # a pipeline stage may have no such layer
    sizes = sorted({size for of_rank in told for size in of_rank})
    made = {size: make_places(size, mesh, data_first=data_first) for size in sizes}
    for name, layer in layers.items():
        layer.gate.name = f"{name}.gate"
        if name not in apart:
            continue
        places = made[layer.ep_size]
        layer.places = places
        first = places.local(layer.num_experts).start
        split = layer.how.split
        family = places.family if split else Family(f"{places.family.name}-tensor", places.data, places.family.divisor)
        for number, expert in enumerate(cast(Experts, layer.experts).deepspeed_experts):
            for rest, param in [*expert.named_parameters(), *expert.named_buffers()]:
                full = f"{name}.experts.deepspeed_experts.{first + number}.{rest}"
                assign(param, Assignment(family if world_group().size > 1 else None, full.lstrip(".")))
    return Placed(dict(layers), tuple(made.values()))
