"""ZeRO: the optimizer on the parameters that the other transforms have left, then both cut over the ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_config.errors import PlanError
from ds_engine.all_or_nothing import all_or_nothing
from ds_engine.config_sections import TorchSchedulerSection
from ds_engine.lr_schedules import LRScheduler, Schedule
from ds_engine.optimizer_table import make_optimizer, make_torch_scheduler
from ds_engine.plan import ShardPlan
from ds_engine.transforms.transform import BuildContext, Transform, TransformInput
from ds_zero import (
    STAGES,
    NodeTopology,
    QuantizedComm,
    ShardedModel,
    ShardedOptimizer,
    ShardingStrategy,
    ShardOptions,
    shard,
)

__all__ = ["Zero"]


@dataclass(frozen=True, slots=True)
class ZeroTransform:
    """The ZeRO stage, by number and as a value."""

    stage: int
    residency: ShardingStrategy


class Zero(Transform[ZeroTransform, ShardedOptimizer | ShardedModel]):
    """The last one, on every stage and any number of ranks: stage 0 and one rank take the same path."""

    name = "ZeRO"

    def decide(self, inputs: TransformInput) -> ZeroTransform:
        stage = inputs.config.zero_optimization.stage
        return ZeroTransform(stage, STAGES[stage])

    def plan_rows(self, what: ZeroTransform) -> Mapping[str, str]:
        return {"ZeRO": f"stage {what.stage}: {_residency_text(what.residency)}"}

    def apply(self, what: ZeroTransform, site: BuildContext) -> ShardedOptimizer | ShardedModel:
        plan, group = site.plan, site.mesh["gradient"]
        # What comes of the caller's functions and of the data of one rank fails here, before anything is cut.
        inner, site.scheduler = all_or_nothing(site.mesh["world"], lambda: _optimizer_and_scheduler(site))
        options: dict[str, Any] = {
            "stage": what.residency,
            "group": group,
            "norm": site.mesh["world"],
            "precision": plan.precision,
            "policy": plan.sharding.policy,
            "overlap": plan.sharding.overlap,
            "strict": plan.sharding.strict,
            "ignore_unused_parameters": plan.sharding.ignore_unused_parameters,
            "shard_size": plan.sharding.shard_size,
            "sparse": plan.sharding.sparse,
            "offload_optimizer": plan.sharding.offload_optimizer,
            "offload_params": plan.sharding.offload_params,
            "quantized_comm": _wire(plan.sharding, group.size),
            "nodes": _nodes(plan.sharding, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)),
        }
        if inner is None:
            site.sharding = shard(site.model, None, **options)
            return site.sharding
        if plan.sharding.split is not None:
            options["updates"] = plan.sharding.split.importance(_steps_of_an_epoch(site))
        # Without a layout ds-zero asks the optimizer whether it needs whole parameters, group by group.
        site.optimizer = site.parts.sharded(site.model, inner, ShardOptions(clip=plan.clip or math.inf, **options))
        site.optimizer.show_gradients(
            sharded=False
        )  # `param.grad` at stage 0 and None from stage 1 on, as DeepSpeed has it
        site.sharding = site.optimizer.sharding
        return site.optimizer

    def undo(self, applied: ShardedOptimizer | ShardedModel) -> None:
        applied.close()


def _residency_text(residency: ShardingStrategy) -> str:
    sharded = {
        "optimizer state": residency.shard_optim,
        "gradients": residency.shard_grads,
        "parameters": residency.shard_params,
    }
    named = [name for name, cut in sharded.items() if cut]
    return f"{', '.join(named)} sharded" if named else "nothing sharded"


def _steps_of_an_epoch(site: BuildContext) -> int | None:
    """Return the steps per epoch of the engine's data; None where the caller feeds the batches."""
    data = site.parts.data
    return None if data is None else max(1, -(-len(data) // site.plan.batch.train))


def _nodes(sharding: ShardPlan, local: int) -> NodeTopology | None:
    """Return the node topology: as many ranks as hold a secondary partition, else the ranks of a host."""
    if sharding.near > 1:
        return NodeTopology(sharding.near, hierarchical=sharding.two_steps, secondary_partition=True)
    return NodeTopology(local, hierarchical=True) if sharding.two_steps else None


def _wire(sharding: ShardPlan, ranks: int) -> QuantizedComm:
    """Sums of gradients inside the same nodes first, where there are several of equal size."""
    node = sharding.near if sharding.near > 1 else int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    shards = sharding.shard_size or ranks
    return replace(sharding.wire, node=node if 1 < node < shards and shards % node == 0 else 1)


def _optimizer_and_scheduler(site: BuildContext) -> tuple[torch.optim.Optimizer | None, Any]:
    inner = _optimizer(site)
    listed = [] if inner is None else [id(p) for group in inner.param_groups for p in group["params"]]
    if len(set(listed)) < len(listed):
        raise PlanError(
            f"the optimizer lists {len(listed)} parameters, {len(set(listed))} of which are different ones",
            code="engine-optimizer",
            fix="List each once: [*a.parameters(), *b.parameters()] lists what a and b share twice.",
        )
    if inner is not None and site.mesh["pipe"].size > 1:
        _check_stage(site.model, inner)
    if inner is not None and site.mesh["pipe"].size == 1 and not hasattr(site.parts.scheduler, "state_dict"):
        # As DeepSpeed does. Stages keep theirs, so that all have as many; so does the optimizer of a scheduler that has counted them.
        inner.param_groups[:] = [group for group in inner.param_groups if group["params"]] or inner.param_groups[:1]
    return inner, None if inner is None else _scheduler(site, inner)


def _check_stage(stage: nn.Module, inner: torch.optim.Optimizer) -> None:
    known = set(map(id, stage.parameters()))
    outside = [tuple(p.shape) for group in inner.param_groups for p in group["params"] if id(p) not in known]
    if outside:
        raise PlanError(
            f"the optimizer of a pipeline stage has {len(outside)} parameters that are not the stage's, of shapes {outside[:5]}",
            code="zero-foreign-parameters",
            fix="Put them into a layer of the pipeline, or use a mesh without stages.",
        )


def _optimizer(site: BuildContext) -> torch.optim.Optimizer | None:
    plan, parts = site.plan, site.parts
    params = list(parts.params) if parts.params is not None else [p for p in site.model.parameters() if p.requires_grad]
    passed, section = parts.optimizer, plan.config.optimizer
    if isinstance(passed, torch.optim.Optimizer) or (passed is None and section is None):
        return passed
    if parts.params is not None and not params and site.mesh["pipe"].size == 1:
        raise PlanError(
            "model_parameters is empty: the optimizer would train nothing",
            code="engine-optimizer",
            fix="Pass the parameters again (a generator can be read once only), or leave model_parameters out for all.",
        )
    if passed is None and section is not None:
        return make_optimizer(section, params, site.model, plan.states, site.mesh["gradient"])
    built = passed(params or [{"params": []}]) if callable(passed) else passed
    if not isinstance(built, torch.optim.Optimizer):
        raise PlanError(
            f"optimizer is a {type(passed).__name__}" + f" that returns a {type(built).__name__}" * callable(passed),
            code="engine-optimizer",
            fix="Pass a torch.optim.Optimizer, or a function that makes one from parameters.",
        )
    return built


def _scheduler(site: BuildContext, inner: torch.optim.Optimizer) -> Any:
    """Build the scheduler on the groups of the inner optimizer, which are also the sharded optimizer's."""
    scheduler, section = site.parts.scheduler, site.plan.config.scheduler
    if scheduler is not None:
        built = scheduler(inner) if callable(scheduler) and not hasattr(scheduler, "state_dict") else scheduler
        if not hasattr(built, "step"):
            raise PlanError(
                f"lr_scheduler is a {type(built).__name__}, which has no step()",
                code="engine-optimizer",
                fix="Pass a scheduler, or a function that makes one from an optimizer.",
            )
        return built
    if section is None:
        return None
    if isinstance(section, TorchSchedulerSection):
        return make_torch_scheduler(section, inner)
    schedule: Schedule = section.params
    return LRScheduler(schedule, inner)
