"""What will be done, decided: configuration, shapes and world size in, a `Plan` out. No tensor, no group.

The same function runs on a laptop for a thousand ranks (`ds plan`) and on every rank before anything is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from ds_engine.batch import BatchRequest, BatchSizes, resolve_batch
from ds_engine.compiling.backends import compiling_of
from ds_engine.config import Config
from ds_engine.config_rules import asked_batch, check_rules
from ds_engine.data_plan import reading_of
from ds_engine.health import Health
from ds_engine.mixed_precision import casting_of, low_precision_rules, precision_of
from ds_engine.optimizer_table import state_tensors
from ds_engine.plan import ForeignFiles, LoggingPlan, Plan, Shapes, ShardPlan
from ds_engine.transforms import TRANSFORMS, TransformInput, decide_all
from ds_pipe import PipelineSpec, Program, add_comms, mark_reduce, verify
from ds_zero import (
    QGZ,
    QWZ,
    STAGES,
    ErrorFeedbackOptions,
    NodeTopology,
    OffloadPolicy,
    Precision,
    PrecisionRule,
    QuantizedComm,
    ShardingStrategy,
    ShardOptions,
    UnitSizePolicy,
)
from ds_zero import plan as plan_sharding
from ds_zero.config import ZeroConfig
from ds_zero.layout.units import ModuleInfo

__all__ = ["known_axes", "make_plan", "rebatched"]


def make_plan(config: Config, shapes: Shapes, world: int) -> Plan:
    """Decide everything about a run of a model of `shapes` on `world` ranks. Pure.

    Raises:
        PlanError, ConfigError, UnsupportedError: see `check_rules`; all problems at once.
    Cost: linear in the number of parameters and modules; about 1 s for 100,000.
    """
    mesh = check_rules(config, world, known_axes(), shapes.stages)
    transforms, shapes = decide_all(TRANSFORMS, TransformInput(config, shapes, mesh))
    batch = resolve_batch(asked_batch(config, mesh.data), mesh.data)
    residency = STAGES[config.zero_optimization.stage]
    sharding = ShardPlan(
        _policy(config, shapes.modules),
        config.zero_optimization.overlap_comm is not False,
        config.zero_optimization.enable_sanity_checks,
        config.zero_optimization.mics_shard_size if config.zero_optimization.mics_shard_size > 0 else None,
        config.sparse_gradients,
        max(1, config.zero_optimization.zero_hpz_partition_size),
        config.zero_optimization.mics_hierarchical_params_gather,
        *_places(config, accumulates=batch.accumulation > 1),
        wire=_wire(config.zero_optimization),
        split=config.zero_optimization.zenflow,
        ignore_unused_parameters=config.zero_optimization.ignore_unused_parameters,
    )
    if sharding.split is not None:
        sharding.split.importance(1)  # whatever is wrong with it is said before anything is made
    rules = tuple(PrecisionRule(names, param=getattr(torch, dtype)) for names, dtype in shapes.formats)
    precision = replace(precision_of(config), rules=rules + low_precision_rules(config, shapes.modules, shapes.params))
    states = _states(config, shapes, precision)
    # The optimizer of the caller, and its groups, are not known yet; what is built is planned again from them, by the same function.
    state_count = state_tensors(config.optimizer) + (sharding.split is not None)
    options = ShardOptions(
        stage=residency,
        precision=precision if states is None else replace(precision, state=states),
        policy=sharding.policy,
        shard_size=sharding.shard_size,
        quantized_comm=sharding.wire,
        nodes=NodeTopology(sharding.near, secondary_partition=True) if sharding.near > 1 else None,
        offload_optimizer=sharding.offload_optimizer,
        offload_params=sharding.offload_params,
    )
    params = [replace(p, states=state_count, rule=precision.rule_of(p.name)) for p in shapes.params]
    ranks = mesh.data * mesh.sequence
    experts = {p.family: mesh.expert_data for p in params if p.family.startswith("expert")}
    zero = plan_sharding(params, ranks, options, modules=shapes.modules, families=experts)
    return Plan(
        config=config,
        mesh=mesh,
        batch=batch,
        program=_program(batch, residency, shapes.staging or PipelineSpec("1f1b", mesh.pipe)),
        residency=residency,
        precision=precision,
        zero=zero,
        states=states,
        casting=casting_of(config),
        sharding=sharding,
        clip=config.gradient_clipping or None,
        summed=ranks if config.gradient_allreduce_op == "sum" else 1,
        # A pipeline reads data in its own order, as DeepSpeed's does.
        reading=reading_of(config.data_efficiency, multiple=_multiple(config, batch), shuffle=shapes.staging is None),
        telling=_telling(config),
        health=Health(_on_nonfinite(config), config.loss_spike_threshold),
        predivide=float(mesh.data * mesh.sequence) if config.prescale_gradients else config.gradient_predivide_factor,
        managed=config.managed_gradient_accumulation,
        curriculum=curriculum.schedule()
        if (curriculum := config.curriculum_learning) is not None and curriculum.enabled
        else None,
        layer_drop=drop if (drop := config.progressive_layer_drop) is not None and drop.enabled else None,
        transforms=transforms,
        staging=shapes.staging,
        foreign=_foreign(config),
        universal=config.checkpoint.load_universal,
        tuning=tuning if (tuning := config.autotuning) is not None and tuning.enabled else None,
        pause_gc=config.disable_python_gc,
        compiling=compiling_of(config.compile, config.zero_optimization, mesh),
        answer_tokens=hybrid.max_out_tokens if (hybrid := config.hybrid_engine).enabled else None,
    )


def _places(config: Config, *, accumulates: bool) -> tuple[str | OffloadPolicy, Literal["device"] | OffloadPolicy]:
    """Return the offload targets of optimizer state and parameters between uses.

    Args:
        accumulates: Several backwards add up before a step.
    """
    zero, io = config.zero_optimization, config.aio.settings()
    tier = "device" if zero.offload_optimizer is None else zero.offload_optimizer.placement(io)
    if isinstance(tier, OffloadPolicy) and zero.zenflow is not None and zero.zenflow.overlaps:
        tier = replace(tier, overlap_ratio=tier.overlap_ratio or 1.0 - zero.zenflow.pt_reserved_cores_perc)
    if isinstance(tier, OffloadPolicy):
        tier = replace(tier, accumulates=accumulates)
    param_tier = "device" if zero.offload_param is None else zero.offload_param.placement(io)
    compiled = config.compile if zero.stage == 3 else None  # at other stages it is refused below, by its own name
    if param_tier == "device" and compiled is not None and compiled.deepcompile and compiled.offload_parameters:
        param_tier = OffloadPolicy("host")
    return tier, param_tier


def known_axes() -> frozenset[str]:
    """Return the mesh axes that some transform uses."""
    return frozenset(axis for transform in TRANSFORMS for axis in transform.axes)


def _program(batch: BatchSizes, residency: ShardingStrategy, staging: PipelineSpec) -> Program:
    """Build the schedule of a step; gradient accumulation is the schedule of a single stage."""
    program = add_comms(staging.program(batch.accumulation))
    program = mark_reduce(program, every_backward=residency.shard_grads)
    verify(program)
    return program


def rebatched(plan: Plan, request: BatchRequest) -> Plan:
    """Return the same plan with another batch.

    Raises:
        PlanError, ConfigError: the numbers do not fit; see `resolve_batch`.
    """
    batch = resolve_batch(request, plan.batch.ranks)
    program = _program(batch, plan.residency, plan.staging or PipelineSpec("1f1b", plan.mesh.pipe))
    order = replace(plan.reading.order, multiple=_multiple(plan.config, batch))
    return replace(plan, batch=batch, program=program, reading=replace(plan.reading, order=order))


def _multiple(config: Config, batch: BatchSizes) -> int:
    return batch.train if config.dataloader_drop_last else 1


def _wire(section: ZeroConfig) -> QuantizedComm:
    loco = section.zeropp_loco_param
    return QuantizedComm(
        QWZ if section.zero_quantized_weights else None,
        QWZ if section.zero_quantized_weights or section.zero_quantized_nontrainable_weights else None,
        QGZ if section.zero_quantized_gradients else None,
        None if loco is None else ErrorFeedbackOptions(loco.err_beta, loco.reset_T),
    )


def _states(config: Config, shapes: Shapes, precision: Precision) -> torch.dtype | None:
    params = None if config.optimizer is None else config.optimizer.params
    wide = getattr(params, "fp32_optimizer_states", True) and not config.bf16.bf16_optimizer_states
    of_model = next((getattr(torch, p.dtype) for p in shapes.params), None)
    return None if wide else precision.param or of_model


def _on_nonfinite(config: Config) -> Literal["warn", "skip", "stop"]:
    """Return what is done with a step whose gradient is not finite; by default the step is skipped, as DeepSpeed's ZeRO does in every format."""
    unchecked = config.bf16.enabled and not config.bf16.check_grad_overflow
    return config.on_nonfinite or ("warn" if unchecked else "skip")


def _foreign(config: Config) -> ForeignFiles | None:
    zero = config.zero_optimization
    if config.checkpoint.layout != "deepspeed":
        return None
    return ForeignFiles(zero.round_robin_gradients, zero.parameter_alignment, zero.sub_group_size)


def _telling(config: Config) -> LoggingPlan:
    throughput = config.timers.throughput
    return LoggingPlan(
        every=config.steps_per_print,
        phases=config.wall_clock_breakdown or config.flops_profiler.enabled,
        breakdown=config.wall_clock_breakdown,
        speed=throughput.enabled,
        synchronize=throughput.enabled and throughput.synchronized,
        state=config.dump_state,
        level=config.log_level,
        memory=config.memory_breakdown,
        flops=config.flops_profiler if config.flops_profiler.enabled else None,
        comms=config.comms_logger if config.comms_logger.enabled else None,
        peak_flops_per_s=None if config.monitor.peak_tflops is None else config.monitor.peak_tflops * 1e12,
    )


def _policy(config: Config, modules: Sequence[ModuleInfo]) -> UnitSizePolicy:
    zero = config.zero_optimization
    leaf = zero.leaf_module
    leaves = {m.name for m in modules if m.name in leaf.names or (m.name and m.name.endswith(leaf.name_suffixes))}
    # The schema's default (half a billion elements) would make one unit of most models, with nothing to overlap. Stage 0 is plain
    # data parallelism, whose reductions no key of this section cuts; clients fill in tiny sizes for small models at any stage.
    configured = zero.stage > 0 and "reduce_bucket_size" in zero.model_fields_set
    return UnitSizePolicy(
        max_numel=zero.reduce_bucket_size if configured else None,
        persist_numel=zero.param_persistence_threshold,
        persist_total=zero.model_persistence_threshold,
        leaves=frozenset(leaves),
    )
