"""From a plan and a model to an engine: the only place that knows concrete classes, and the order of transforms.

`initialize` in order: 1. the configuration; 2. the process group; 3. the plan, from the model's shapes; 4. what leaves the
model alone: data, monitor; 5. the model to its device; 6. the transforms, ZeRO last; 7. the engine. Whatever cannot work is
an error of 1 to 4, before anything is changed; what fails later, on any rank, is undone on all of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

import ds_monitor
import ds_ops
from ds_accel import get_accelerator
from ds_ckpt.config import make_engine, make_near
from ds_comm import Mesh, init_distributed, world_group
from ds_comm.logger import CommsLogger
from ds_comm.process_group import device_index
from ds_config.config_file import Source
from ds_config.errors import PlanError
from ds_data.sample_order import RankSlice
from ds_data.variable import ConstantSchedule, VariableBatchSizeLR
from ds_engine.all_or_nothing import all_or_nothing
from ds_engine.components import Components
from ds_engine.config import load_config, source_of
from ds_engine.device_placement import placed
from ds_engine.engine import Engine
from ds_engine.generating import HybridEngine
from ds_engine.health import HealthWatch
from ds_engine.init_args import InitArgs, OptimizerLike, SchedulerLike, without_overridden
from ds_engine.loader import PackedLoader, ResumableLoader, make_loader
from ds_engine.parallel_degrees import degrees_of, with_degrees
from ds_engine.pipelining import PipelineEngine
from ds_engine.plan import Plan, Shapes
from ds_engine.planner import make_plan
from ds_engine.rank_config import check_configuration
from ds_engine.step_telemetry import Telemetry
from ds_engine.transforms import TRANSFORMS, BuildContext, apply_all
from ds_engine.trial_recorder import TrialSetup, watch_of
from ds_monitor.config import make_sinks
from ds_parallel.tensor import facts_of
from ds_pipe import DecoderStages, PipelineModule, PipelineSpec
from ds_zero import ShardedOptimizer
from ds_zero.layout.shard_options import OptimizerTraits, describe
from ds_zero.runtime.sharded_model import end_sharding

__all__ = ["InitArgs", "assemble", "build", "check_model", "initialize", "shapes_of", "slices_of"]


_USUAL_PORT = 29500  # torch's; another one is a wish of the caller
_LOGGERS = ("ds_ckpt", "ds_comm", "ds_compress", "ds_config", "ds_engine", "ds_monitor", "ds_parallel", "ds_zero")


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
        mpu: An object with `get_*_parallel_world_size()` methods; its degrees must be those of the configuration.
        dist_init_required: False if the process group exists and must not be made.
        collate_fn: As in torch's DataLoader.
        config: A dict, a path, HJSON text or base64; `config_params` is its old name.
        mesh_param: (data, sequence) degrees, as `data_parallel_size` and `sequence_parallel_size` of the configuration.
    Returns:
        (engine, optimizer, dataloader, scheduler); the last three are the engine's own and may be None.
    Raises:
        ConfigError, PlanError, UnsupportedError: before anything is changed, with every problem at once; also where the ranks were given
            different configurations ("engine-ranks-differ").
    """
    model = check_model(model)
    resolved = with_degrees(load_config(source_of(config, config_params, args)), mesh_param, mpu, slices_of(model))
    if dist_init_required is not False:
        if distributed_port != _USUAL_PORT:
            os.environ.setdefault("MASTER_PORT", str(distributed_port))
        init_distributed()
    resolved = without_overridden(resolved, optimizer, warns=world_group().rank == 0)
    check_configuration(resolved, world_group())
    shapes = shapes_of(model, structure=degrees_of(resolved)["tensor"] > 1)
    plan = make_plan(resolved, shapes, world_group().size)
    engine = build(plan, model, InitArgs(optimizer, model_parameters, lr_scheduler, training_data, collate_fn))
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def shapes_of(model: nn.Module, *, structure: bool = True) -> Shapes:
    """Collect the shapes that planning needs from a model, possibly on the meta device.

    A model in pipeline stages says how the stages were split: `pipe_staging`.

    Args:
        structure: Whether to trace the model for what a tensor-parallel plan of more than one rank needs. No other plan does.
    """
    params, modules = describe(model, {id(p): 0 for p in model.parameters() if p.requires_grad}, OptimizerTraits())
    staging: PipelineSpec | None = getattr(model, "pipe_staging", None)
    stages = 1 if staging is None else staging.ranks
    return Shapes(tuple(params), tuple(modules), stages, facts_of(model, structure=structure), staging)


def slices_of(model: nn.Module) -> int:
    """Return how many ranks share each layer of a model in stages, by its topology; 1 of any other model."""
    return model.staged.places.slice.size if isinstance(model, PipelineModule | DecoderStages) else 1


def build(plan: Plan, model: nn.Module, parts: InitArgs) -> Engine:
    """Make the components of a plan and the engine that holds them. Collective; `model` is changed in place."""
    plain = Engine if plan.answer_tokens is None else HybridEngine
    engine_class = PipelineEngine if plan.staging is not None else plain
    return engine_class(plan, assemble(plan, model, parts))


def assemble(plan: Plan, model: nn.Module, parts: InitArgs) -> Components:
    """Make the components of a plan, for an engine of any class. Collective; `model` is changed in place, or not at all."""
    if plan.telling.level is not None:
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(plan.telling.level.upper())
    mesh = Mesh.build(plan.mesh)
    accelerator = get_accelerator()
    # init_distributed has set the variable, whatever the launcher.
    index = device_index(int(os.environ.get("LOCAL_RANK", "0")), accelerator.device_count())
    accelerator.set_device(index)
    device = accelerator.device(index)
    if device.type == "cuda":
        ds_ops.compile_ahead(index, first=int(os.environ.get("LOCAL_RANK", "0")))
    watch = watch_of(plan, model, lambda: TrialSetup(mesh, accelerator, shapes_of(model)))
    loader, sinks, comms = all_or_nothing(mesh["world"], lambda: _beside(plan, mesh, parts))
    end_sharding(model)  # before it is cast
    with (
        placed(model, device, plan.casting),
        apply_all(TRANSFORMS, site := BuildContext(model, plan, mesh, device, parts)) as applied,
    ):
        checkpointer = make_engine(plan.config.checkpoint, mesh["world"])
        near = make_near(plan.config.checkpoint, mesh["world"])
    if site.sharding is None:
        raise RuntimeError("a plan without ZeRO")
    plan = replace(plan, zero=site.sharding.plan)
    sinks = sinks if watch is None else (*sinks, watch)
    run = ds_monitor.Run()
    ds_monitor.attach(sinks, run)
    with run:
        ds_monitor.event("engine/plan", plan=str(plan), config=json.dumps(plan.config.model_dump(mode="json")))
    if plan.telling.state and mesh.rank == 0:
        ds_monitor.log_requested(
            logging.getLogger("ds_engine.steps"),
            f"[Rank 0] configuration:\n{json.dumps(plan.config.model_dump(mode='json'), indent=1)}\nplan:\n{plan}",
        )
    return Components(
        module=site.model,
        optimizer=site.optimizer,
        sharding=site.sharding,
        scheduler=_following(site, loader),
        loader=loader,
        mesh=mesh,
        device=device,
        telemetry=Telemetry(plan.telling, mesh.rank == 0, accelerator, comms),
        checkpointer=checkpointer,
        near=near,
        activations=site.activations,
        executor=site.executor,
        applied=applied,
        shares=site.shares,
        followers=(*site.followers, *([] if watch is None else [watch])),
        run=run,
        health=HealthWatch(plan.health, site.model, mesh["world"], partial(_samples, loader)),
    )


def _samples(loader: ResumableLoader | None) -> Sequence[int]:
    """Return the sample indices of the microbatch that the loader returned last."""
    return () if loader is None else loader.samples


def _following(site: BuildContext, loader: ResumableLoader | None) -> Any:
    """Return the learning rate schedule; with batches of different size, a schedule that scales with their size."""
    batching, optimizer = site.plan.reading.batching, site.optimizer
    if batching is None or optimizer is None or not isinstance(loader, PackedLoader):
        return site.scheduler
    return VariableBatchSizeLR(
        site.scheduler or ConstantSchedule(optimizer),
        site.plan.batch.train,
        loader.packing.sizes,
        lr_scaling_method=batching.lr_scaling_method,
        verbose=batching.verbose,
        optimizer=optimizer,
    )


def _beside(
    plan: Plan, mesh: Mesh, parts: InitArgs
) -> tuple[ResumableLoader | None, tuple[ds_monitor.Sink, ...], CommsLogger | None]:
    """Build the parts that do not change the model: the data loader, and the sinks of metrics."""
    loader = _loader(plan, mesh, parts)
    comms = None if plan.telling.comms is None else CommsLogger(plan.telling.comms)
    return loader, (*make_sinks(plan.config, rank=mesh.rank), *([] if comms is None else [comms])), comms


def check_model(model: object) -> nn.Module:
    """Return `model`, or raise PlanError if it is no module."""
    if model is None:
        raise PlanError("initialize() was called without a model", code="engine-no-model", fix="Pass model=.")
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"model is a {type(model).__name__}, not a torch.nn.Module", code="engine-no-model", fix="Pass a module."
        )
    return model


def _loader(plan: Plan, mesh: Mesh, parts: InitArgs) -> ResumableLoader | None:
    if parts.data is None:
        return None
    data = mesh["data"]
    lane = RankSlice(data.rank, data.size, plan.batch.micro)
    return make_loader(plan, lane, parts.data, {"collate_fn": parts.collate_fn}, lead=mesh.rank == 0)
