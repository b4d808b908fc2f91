"""`shard(model, optimizer)`: what a plain loop calls, with every option by its name and type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Literal, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ds_comm import Group
from ds_config.did_you_mean import nearest
from ds_config.errors import PlanError
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
    offload_params: Literal["device"] | OffloadPolicy
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
            ("zero-foreign-parameters"), or an option is not known or its value has no meaning ("config-option").
    Collective over the group. Cost: one pass over the parameters. Gradients are used up: they are summed where they lie, so a hook
    that keeps one clones it; between a backward and the step `param.grad` is a `ShardedGradient`.
    """
    _check_call(model, optimizer, options)
    chosen = ShardOptions(**options)
    if optimizer is None:
        set_outside(model, ())
        return ShardedModel(model, {}, chosen)
    made = ShardedOptimizer(model, optimizer, chosen)
    made.show_gradients()
    return made


def _check_call(model: object, optimizer: object, options: Iterable[str]) -> None:
    known = [option.name for option in fields(ShardOptions)]
    wrong = [
        f"no option {name} (the nearest is {nearest(name, known)[0]})" if nearest(name, known) else f"no option {name}"
        for name in options
        if name not in known
    ]
    if not isinstance(model, nn.Module):
        wrong.append(f"a torch.nn.Module for the model, not {type(model).__name__}")
    if not isinstance(optimizer, Optimizer | None):
        wrong.append(f"a torch.optim.Optimizer for its optimizer, not {type(optimizer).__name__}")
    if wrong:
        raise PlanError(
            f"shard takes {', '.join(wrong)}",
            code="config-option",
            fix=f"Call shard(model, optimizer, ...); the options are {', '.join(known)}.",
        )
