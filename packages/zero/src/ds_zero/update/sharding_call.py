"""`shard(model, optimizer)`: what a plain loop calls, with every option by its name and type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ds_comm import Group
from ds_zero.layout.dtypes_plan import Precision
from ds_zero.layout.elements import Kind
from ds_zero.layout.model_members import set_outside
from ds_zero.layout.shard_options import CommFormat, NodeTopology, OffloadPolicy, ShardOptions
from ds_zero.layout.units import ShardingStrategy, UnitSizePolicy, UnitSpec
from ds_zero.runtime.sharded_model import ShardedModel
from ds_zero.update.sharded_optimizer import ShardedOptimizer

__all__ = ["shard"]


class _Options(TypedDict, total=False):
    stage: int | ShardingStrategy
    group: Group | dist.ProcessGroup | None
    precision: Precision | str | None
    reduce_dtype: torch.dtype | None
    clip: float | None
    norm: Group | dist.ProcessGroup | None
    overlap: bool
    policy: UnitSizePolicy
    strict: bool
    layout: Kind | None
    shard_size: int | None
    nodes: NodeTopology | None
    sparse: bool
    memory: Literal["auto", "private", "shared"]
    offload_optimizer: str | OffloadPolicy | Callable[[UnitSpec], str | OffloadPolicy]
    offload_params: str | OffloadPolicy
    quantized_comm: CommFormat


@overload
def shard(model: nn.Module, optimizer: Optimizer, **options: Unpack[_Options]) -> ShardedOptimizer: ...
@overload
def shard(model: nn.Module, optimizer: None = None, **options: Unpack[_Options]) -> ShardedModel: ...
def shard(
    model: nn.Module, optimizer: Optimizer | None = None, **options: Unpack[_Options]
) -> ShardedOptimizer | ShardedModel:
    """Shard a model's training state over the ranks; the loop stays `loss.backward(); optimizer.step()`.

    Args:
        model: The same on every rank; values of rank 0 win. Its parameters keep identity, shape and dtype.
        optimizer: Built on the model's parameters, and perhaps others that are in no module; it then updates shards. None for a model that is not trained.
        options: The fields of `ShardOptions`.
    Returns:
        A ShardedOptimizer, or the bare Sharding without an optimizer. `close()` gives the model back.
    Raises:
        PlanError: the ranks hold different models ("zero-models-differ"), the optimizer was built for another model
            ("zero-foreign-parameters"), or an option is not known.
    Collective over the group. Cost: one pass over the parameters. Gradients are used up: they are summed where they lie, so a hook
    that keeps one clones it; between a backward and the step `param.grad` is a `ShardedGradient`.
    """
    chosen = ShardOptions(**options)
    if optimizer is None:
        set_outside(model, ())
        return ShardedModel(model, {}, chosen)
    made = ShardedOptimizer(model, optimizer, chosen)
    made.show_gradients()
    return made
