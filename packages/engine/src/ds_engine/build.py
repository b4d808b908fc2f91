"""From a plan and a model to an engine: the only place that knows concrete classes, and the order of transforms.

`initialize` in order: 1. the process group; 2. the configuration; 3. the plan, from the model's shapes; 4. the model to its
device; 5. the optimizer on its parameters; 6. ZeRO, which cuts both; 7. schedule, data, monitor; 8. the engine.
Whatever cannot work is an error of 2 or 3, before anything is changed.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import ds_monitor
from ds_accel import get_accelerator
from ds_ckpt.config import make_engine
from ds_comm import Group, Mesh, init_distributed, world_group
from ds_comm.logger import CommsLogger
from ds_config.errors import PlanError, UnsupportedError
from ds_config.reading import Source
from ds_engine.config import load_config, source_of
from ds_engine.engine import Components, Engine
from ds_engine.loader import Lane, ResumableLoader
from ds_engine.optimizers import make_optimizer, make_torch_scheduler, takes_whole
from ds_engine.plan import Plan, Shapes, ShardPlan
from ds_engine.planning import make_plan
from ds_engine.schedules import Schedule, Scheduler
from ds_engine.sections import TorchSchedulerSection
from ds_engine.telemetry import Telemetry
from ds_monitor.config import make_sinks
from ds_parallel import ActivationCheckpointing, checkpoint_modules
from ds_zero import Nodes, ShardedOptimizer, Sharding, ShardOptions, shard
from ds_zero.layout import Kind
from ds_zero.scattered import place
from ds_zero.sharding import describe

__all__ = ["Parts", "assemble", "build", "initialize", "shapes_of"]

_log = logging.getLogger("ds_engine")

_USUAL_PORT = 29500  # torch's; another one is a wish of the caller
_LOGGERS = ("ds_ckpt", "ds_comm", "ds_config", "ds_engine", "ds_monitor", "ds_parallel", "ds_zero")

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer] | None
SchedulerLike = Any


@dataclass(frozen=True, slots=True)
class Parts:
    """What the caller brings besides the model; everything else comes from the plan.

    Attributes:
        optimizer: An optimizer over the model's parameters, a function that makes one from parameters, or None.
        params: Parameters or groups that an optimizer of the configuration gets; the model's by default.
        scheduler: A scheduler, a function that makes one from the optimizer, or None.
        data: A map-style dataset, or None.
        collate_fn: As in torch's DataLoader.
        sharded: Class of the sharded optimizer: one that adds names to it.
    """

    optimizer: OptimizerLike = None
    params: Iterable[Any] | None = None
    scheduler: SchedulerLike = None
    data: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    sharded: type[ShardedOptimizer] = ShardedOptimizer


def initialize(
    args: argparse.Namespace | Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: SchedulerLike = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Source | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Source | None = None,
) -> tuple[Engine, ShardedOptimizer | None, ResumableLoader | None, Any]:
    """Make an engine from a model and a configuration. Collective. The signature is that of DeepSpeed's `initialize`.

    Args:
        args: Parsed command line; its `deepspeed_config` is used when `config` is None.
        model: Any module. Its values on rank 0 win. It is changed in place; `engine.close()` gives it back.
        optimizer: Overrides the configuration's: an optimizer, or a function from parameters to one.
        model_parameters: Parameters or groups for an optimizer of the configuration.
        training_data: A map-style dataset.
        lr_scheduler: Overrides the configuration's: a scheduler, or a function from the optimizer to one.
        distributed_port: Port of the rendezvous where no launcher gave one.
        mpu: Not supported; other parallelism is configured.
        dist_init_required: False if the process group exists and must not be made.
        collate_fn: As in torch's DataLoader.
        config: A dict, a path, HJSON text or base64; `config_params` is its old name.
        mesh_param: (data, sequence) degrees.
    Returns:
        (engine, optimizer, dataloader, scheduler); the last three are the engine's own and may be None.
    Raises:
        ConfigError, PlanError, UnsupportedError: before anything is changed, with every problem at once.
    """
    _check_arguments(model, mpu, mesh_param)
    if model is None:
        raise PlanError("initialize() was called without a model", code="engine-no-model", fix="Pass model=.")
    resolved = load_config(source_of(config, config_params, args))
    if dist_init_required is not False:
        if distributed_port != _USUAL_PORT:
            os.environ.setdefault("MASTER_PORT", str(distributed_port))
        init_distributed()
    plan = make_plan(resolved, shapes_of(model), world_group().size)
    engine = build(plan, model, Parts(optimizer, model_parameters, lr_scheduler, training_data, collate_fn))
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def shapes_of(model: nn.Module) -> Shapes:
    """The shapes that planning needs. Works on a model on meta, too."""
    params, modules = describe(model, {id(p): 0 for p in model.parameters() if p.requires_grad}, "flat")
    return Shapes(tuple(params), tuple(modules))


def build(plan: Plan, model: nn.Module, parts: Parts) -> Engine:
    """Make the components of a plan and the engine that holds them. Collective; `model` is changed in place."""
    return Engine(plan, assemble(plan, model, parts))


def assemble(plan: Plan, model: nn.Module, parts: Parts) -> Components:
    """Make the components of a plan, for an engine of any class. Collective; `model` is changed in place."""
    if plan.telling.level is not None:
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(plan.telling.level.upper())
    mesh = Mesh.build(plan.mesh)
    accelerator = get_accelerator()
    index = int(os.environ.get("LOCAL_RANK", "0"))  # init_distributed has set it, whatever the launcher
    accelerator.set_device(index)
    device = accelerator.device(index)
    place(model, device)
    _cast_buffers(model, plan.casting.buffers)
    # Later transforms go here, in this order: tensor parallel, expert parallel, sequence parallel.
    activations = ActivationCheckpointing(plan.keeping, mesh["tensor"])
    checkpointed = checkpoint_modules(model, plan.checkpointed, activations)
    # Compilation goes here.
    inner = _optimizer(plan, model, parts, mesh["gradient"])
    options: dict[str, Any] = {
        "stage": plan.residency,
        "group": mesh["gradient"],
        "precision": plan.precision,
        "policy": plan.sharding.policy,
        "overlap": plan.sharding.overlap,
        "strict": plan.sharding.strict,
        "shard_size": plan.sharding.shard_size,
        "sparse": plan.sharding.sparse,
        "nodes": _nodes(plan.sharding, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)),
    }
    sharded: ShardedOptimizer | Sharding
    if inner is None:
        sharded = shard(model, None, **options)
    else:
        layout: Kind = "whole" if takes_whole(inner) else "flat"
        sharded = parts.sharded(model, inner, ShardOptions(clip=plan.clip, layout=layout, **options))
    optimizer = sharded if isinstance(sharded, ShardedOptimizer) else None
    comms = None if plan.telling.comms is None else CommsLogger(plan.telling.comms)
    sinks = (*make_sinks(plan.config, rank=mesh.rank), *([] if comms is None else [comms]))
    ds_monitor.attach(sinks)
    ds_monitor.event("engine/plan", plan=str(plan), config=plan.config.model_dump_json())
    if plan.telling.state and mesh.rank == 0:
        _log.info("configuration:\n%s\nplan:\n%s", plan.config.model_dump_json(indent=1), plan)
    return Components(
        module=model,
        optimizer=optimizer,
        sharding=sharded.sharding if isinstance(sharded, ShardedOptimizer) else sharded,
        scheduler=_scheduler(plan, optimizer, inner, parts.scheduler),
        loader=_loader(plan, mesh, parts),
        mesh=mesh,
        device=device,
        telemetry=Telemetry(plan.telling, mesh.rank == 0, accelerator, comms),
        checkpointer=make_engine(plan.config.checkpoint, mesh["world"]),
        activations=activations,
        checkpointed=checkpointed,
        sinks=sinks,
    )


def _nodes(sharding: ShardPlan, local: int) -> Nodes | None:
    """Which ranks are close to each other: as many as were told to keep copies, else those of a host."""
    if sharding.near > 1:
        return Nodes(sharding.near, two_steps=sharding.two_steps, secondary=True)
    return Nodes(local, two_steps=True) if sharding.two_steps else None


def _cast_buffers(model: nn.Module, dtype: torch.dtype | None) -> None:
    for module in model.modules() if dtype is not None else ():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def _check_arguments(model: object, mpu: object, mesh_param: tuple[int, int] | None) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise PlanError(
            f"model is a {type(model).__name__}, not a torch.nn.Module", code="engine-no-model", fix="Pass a module."
        )
    if mpu is not None:
        raise UnsupportedError(
            "initialize(mpu=...) is not supported: groups of another library cannot be checked",
            code="engine-mpu",
            fix="Set the degrees in the configuration; the engine makes the groups.",
        )
    if mesh_param is not None and mesh_param[1] != 1:
        raise UnsupportedError(
            f"mesh_param = {mesh_param} asks for sequence parallelism",
            code="engine-mesh-param",
            fix="Use (data, 1), or leave it out.",
        )


def _optimizer(plan: Plan, model: nn.Module, parts: Parts, group: Group) -> torch.optim.Optimizer | None:
    params = list(parts.params) if parts.params is not None else [p for p in model.parameters() if p.requires_grad]
    if isinstance(parts.optimizer, torch.optim.Optimizer):
        return parts.optimizer
    if callable(parts.optimizer):
        return parts.optimizer(params)
    if parts.optimizer is not None:
        raise PlanError(
            f"optimizer is a {type(parts.optimizer).__name__}",
            code="engine-optimizer",
            fix="Pass a torch.optim.Optimizer, or a function that makes one from parameters.",
        )
    section = plan.config.optimizer
    return None if section is None else make_optimizer(section, params, model, plan.states, group)


def _scheduler(
    plan: Plan, optimizer: ShardedOptimizer | None, inner: torch.optim.Optimizer | None, given: SchedulerLike
) -> Any:
    """The caller's scheduler writes into the groups of the inner optimizer, which are also the sharded one's."""
    section = plan.config.scheduler
    if optimizer is None or inner is None:
        return None
    if given is not None:
        return given(inner) if callable(given) and not hasattr(given, "state_dict") else given
    if section is None:
        return None
    if isinstance(section, TorchSchedulerSection):
        return make_torch_scheduler(section, optimizer)
    schedule: Schedule = section.params
    return Scheduler(schedule, optimizer.param_groups)


def _loader(plan: Plan, mesh: Mesh, parts: Parts) -> ResumableLoader | None:
    if parts.data is None:
        return None
    data = mesh["data"]
    return ResumableLoader(
        parts.data,
        Lane(data.rank, data.size, plan.batch.micro),
        multiple=plan.data_multiple,
        options={"collate_fn": parts.collate_fn},
    )
