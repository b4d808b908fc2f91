"""`shard`, the verb to start with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict, Unpack, overload

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ds_comm import Group
from ds_zero.layout.elements import Kind
from ds_zero.layout.options import Messages, ShardOptions
from ds_zero.layout.precision import Precision
from ds_zero.layout.units import Residency, UnitPolicy, UnitSpec
from ds_zero.offload.placement import Placement
from ds_zero.runtime.nodes import Nodes
from ds_zero.runtime.sharding import Sharding
from ds_zero.update.optimizer import ShardedOptimizer

__all__ = ["shard"]


class _Options(TypedDict, total=False):
    stage: int | Residency
    group: Group | dist.ProcessGroup | None
    precision: Precision | str | None
    clip: float | None
    norm: Group | dist.ProcessGroup | None
    overlap: bool
    policy: UnitPolicy
    strict: bool
    layout: Kind | None
    shard_size: int | None
    nodes: Nodes | None
    sparse: bool
    memory: Literal["auto", "private", "shared"]
    tier: str | Placement | Callable[[UnitSpec], str | Placement]
    param_tier: str | Placement
    wire: Messages


@overload
def shard(model: nn.Module, optimizer: Optimizer, **options: Unpack[_Options]) -> ShardedOptimizer: ...
@overload
def shard(model: nn.Module, optimizer: None = None, **options: Unpack[_Options]) -> Sharding: ...
def shard(
    model: nn.Module, optimizer: Optimizer | None = None, **options: Unpack[_Options]
) -> ShardedOptimizer | Sharding:
    """Cut a model's training state over the ranks; the loop stays `loss.backward(); optimizer.step()`.

    Args:
        model: The same on every rank; values of rank 0 win. Its parameters keep identity, shape and dtype.
        optimizer: Built on the model's parameters; it then updates shards. None for a model that is not trained.
        options: The fields of `ShardOptions`: stage, group, precision, clip, norm, overlap, policy,
            strict, layout, shard_size, nodes, sparse, memory, tier, param_tier, wire.
    Returns:
        A ShardedOptimizer, or the bare Sharding without an optimizer. `close()` gives the model back.
    Raises:
        PlanError: the ranks hold different models ("zero-models-differ"), the optimizer has parameters the model does not
            ("zero-foreign-parameters"), or an option is not known.
    Collective over the group. Cost: one pass over the parameters. Gradients are used up: they are summed where they lie, so a hook
    that keeps one clones it.
    """
    chosen = ShardOptions(**options)
    if optimizer is None:
        return Sharding(model, {}, chosen)
    return ShardedOptimizer(model, optimizer, chosen)
