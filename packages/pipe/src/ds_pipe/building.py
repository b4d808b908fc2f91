"""Ties: which ranks hold a parameter together, and equal values to start from; and what ds-zero and checkpoints need to know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

import ds_comm
from ds_comm import Group, ParamSharding, ReductionGroup
from ds_comm.ddp import mark_unlike
from ds_comm.fsdp import watch_fsdp
from ds_comm.metadata import on_group
from ds_pipe.staged import StagedModel, Tie
from ds_pipe.topology import GRADIENT_AXES, PipelineGroups

__all__ = ["annotate_params", "broadcast_ties", "tie"]


def tie(
    places: PipelineGroups, holders: Mapping[str, Sequence[int]], params: Mapping[str, nn.Parameter]
) -> tuple[Tie, ...]:
    """Groups of the ranks that hold each tied parameter. Collective over the world.

    Args:
        holders: Of every tied parameter of the model, by name, the pipe indices of the ranks that hold it; the same on all ranks.
        params: This rank's.
    """
    grid = places.topology.grid
    summed = [axis for axis in grid.axes if axis in GRADIENT_AXES]
    created: dict[tuple[int, ...], Group | None] = {}
    ties: list[Tie] = []

    def groups(ranks_of: Sequence[tuple[int, ...]], name: str) -> Group | None:
        member_of = None
        for ranks in ranks_of:
            if ranks not in created:
                created[ranks] = ds_comm.common_group(ranks, name)
            member_of = created[ranks] or member_of
        return member_of

    for name in sorted(holders):
        stages = sorted(set(holders[name]))
        if len(stages) < 2:
            continue
        chains = [tuple(r for r in ranks if grid.coordinate(r)["pipe"] in stages) for ranks in grid.groups("pipe")]
        whole = grid.groups("pipe", *summed)
        all_of = [tuple(r for r in ranks if grid.coordinate(r)["pipe"] in stages) for ranks in whole]
        group, everyone = groups(chains, "tied"), groups(all_of, "tied")
        if name in params and group is not None and everyone is not None:
            ties.append(Tie(params[name], name, group, everyone))
    return tuple(ties)


def broadcast_ties(ties: Sequence[Tie]) -> None:
    """Give every copy the values of the first one. Collective over the ties' groups."""
    for one in ties:
        values = one.param.data
        sent = on_group(values, one.group)  # a model is built on the host and moved later
        ds_comm.broadcast(sent, group=one.group, group_src=0, unit="tied")
        if sent is not values:
            values.copy_(sent)


def annotate_params(model: StagedModel) -> None:
    """Label every parameter with its name in the unsplit model, and tied parameters with a reduction group.

    Gradients of tied parameters are summed over stages.
    """
    tied = {id(one.param): one for one in model.ties}
    copies = model.places.gradient.size
    families: dict[tuple[int, ...], ReductionGroup] = {}
    for name, param in model.module.named_parameters():
        one = tied.get(id(param))
        if one is not None:
            ranks = one.everyone.ranks
            title = f"tied over {','.join(map(str, ranks))}"
            family = families.setdefault(ranks, ReductionGroup(title, one.everyone, copies))
            ds_comm.set_param_sharding(param, ParamSharding(family, one.name))
        elif model.logical_name(name) != name:
            ds_comm.set_param_sharding(param, ParamSharding(None, model.logical_name(name)))
    grid = model.places.topology.grid
    stage = grid.coordinate(model.places.world.global_rank)["pipe"]
    elsewhere = [rank for rank in model.places.world.ranks if grid.coordinate(rank)["pipe"] != stage]
    if elsewhere:  # the same name is another layer there, which DDP over all ranks would not notice
        mine = [*model.module.parameters(), *model.module.buffers()]
        mark_unlike((t for t in mine if id(t) not in tied), elsewhere)
        watch_fsdp(model.module)
