"""What will be done, decided: configuration, shapes and world size in, a printable record out. No tensor, no group.

The same function runs on a laptop for a thousand ranks (`ds plan`) and on every rank before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ds_comm import MeshSpec
from ds_comm.config import CommsLoggerConfig
from ds_engine.batch import Batch, BatchRequest, resolve_batch
from ds_engine.config import Config
from ds_engine.features import FlopsProfilerConfig, LayerDropConfig
from ds_engine.optimizers import reduces_itself, state_tensors
from ds_engine.precision import Casting, casting_of, precision_of, precision_text
from ds_engine.rules import asked_batch, check_rules
from ds_parallel import Keeping, matching
from ds_pipe import Program, accumulation, mark_reduce, verify
from ds_zero import (
    STAGES,
    Nodes,
    Precision,
    Residency,
    UnitPolicy,
    UnitSpec,
    in_nodes,
    passing_bytes,
    plan_bytes,
    plan_units,
)
from ds_zero.units import ModuleInfo, ParamInfo

__all__ = ["Memory", "Plan", "Shapes", "ShardPlan", "Telling", "make_plan", "rebatched"]


@dataclass(frozen=True, slots=True)
class Shapes:
    """What planning knows of a model: its parameters and modules, from a model on any device (also meta)."""

    params: tuple[ParamInfo, ...]
    modules: tuple[ModuleInfo, ...]

    @property
    def numel(self) -> int:
        """Number of parameters (elements)."""
        return sum(p.numel for p in self.params)


@dataclass(frozen=True, slots=True)
class Memory:
    """Expected bytes of model state on one rank, padding included. Activations are not in it.

    Attributes:
        params_bytes, grads_bytes, master_bytes, optimizer_bytes: Kept between steps.
        passing_bytes: Most that comes and goes within a step: gathered units, gradients on their way.
    """

    params_bytes: int
    grads_bytes: int
    master_bytes: int
    optimizer_bytes: int
    passing_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All that is kept."""
        return self.params_bytes + self.grads_bytes + self.master_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How state is sharded.

    Attributes:
        policy: Sizes of units, what stays gathered.
        overlap: Communicate while computing.
        strict: Raise if the ranks of a step used different parameters.
        shard_size: Ranks that share one copy of what is sharded; None: all.
        sparse: Send only the rows of embedding gradients that are not zero.
        near: Neighbouring ranks that keep what was gathered until the next update; 1: nobody does.
        two_steps: Gather across nodes first, then inside; nodes are of `near` ranks, else as the launcher says.
    """

    policy: UnitPolicy
    overlap: bool
    strict: bool
    shard_size: int | None = None
    sparse: bool = False
    near: int = 1
    two_steps: bool = False


@dataclass(frozen=True, slots=True)
class Telling:
    """What is said about a run.

    Attributes:
        every: Log one line every so many steps; None is silent.
        phases: Time forward, backward and step.
        speed: Report samples per second.
        synchronize: Wait for the device where the speed is read.
        state: Log the plan at the start.
        level: Of the library's loggers; None leaves them alone.
        memory: Report memory in use after each phase.
        flops: Which step's operations are counted, and how they are told; None counts none.
        comms: Which collectives are counted; None counts none.
    """

    every: int | None
    phases: bool
    speed: bool
    synchronize: bool
    state: bool
    level: str | None
    memory: bool
    flops: FlopsProfilerConfig | None
    comms: CommsLoggerConfig | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done. `print(plan)` is the first debugging tool.

    Attributes:
        config: What was asked.
        mesh: Degrees of the axes.
        batch: The resolved batch arithmetic.
        program: The actions of one step on one rank, with the reductions marked.
        residency: What is sharded (the ZeRO stage as a value).
        precision: Formats and loss scale.
        units: Parameters that travel together.
        states: Format of optimizer state; None is what the optimizer does by itself (fp32).
        casting: What the forward sees.
        sharding: How units are cut, and how they travel.
        memory: Expected bytes of model state per rank.
        clip: Largest global gradient norm; None does not clip.
        sums: Whether gradients are added up over ranks instead of averaged.
        predivide: What gradients are divided by before they are added up over ranks; the rest is divided after.
        managed: Whether the program says where a step of the three-call loop ends; otherwise every `step()` is an end.
        layer_drop: What the forward is told about layers to drop; None tells nothing.
        keeping: What checkpointed calls keep of their inputs, and where.
        checkpointed: Names of the modules whose forward is a checkpointed call.
        data_multiple: What the loader cuts an epoch to a multiple of.
        telling: What is logged and timed.
        transforms: What is applied to the model, in order.
    """

    config: Config
    mesh: MeshSpec
    batch: Batch
    program: Program
    residency: Residency
    precision: Precision
    units: tuple[UnitSpec, ...]
    states: torch.dtype | None
    casting: Casting
    sharding: ShardPlan
    memory: Memory
    clip: float | None
    sums: bool
    data_multiple: int
    telling: Telling
    predivide: float = 1.0
    managed: bool = True
    layer_drop: LayerDropConfig | None = None
    keeping: Keeping = field(default_factory=Keeping)
    checkpointed: tuple[str, ...] = ()
    transforms: tuple[str, ...] = field(default=("ZeRO",))

    def arguments(self, step: int) -> Mapping[str, object]:
        """Keywords that the forward gets besides the batch's, in training, after `step` steps."""
        if self.layer_drop is None:
            return {}
        return {"progressive_layer_drop": True, "pld_theta": self.layer_drop.keep(step)}

    def rows(self) -> dict[str, str]:
        """The plan in words, by topic."""
        return _rows(self)

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def make_plan(config: Config, shapes: Shapes, world: int) -> Plan:
    """Decide everything about a run of a model of `shapes` on `world` ranks. Pure.

    Raises:
        PlanError, ConfigError, UnsupportedError: see `check_rules`; all problems at once.
    Cost: linear in the number of parameters and modules; about 1 s for 100,000.
    """
    check_rules(config, world)
    mesh = MeshSpec.fit(world)
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
    )
    units = plan_units(shapes.params, shapes.modules, residency, sharding.policy)
    precision = precision_of(config)
    states = _states(config, shapes, precision)
    kept = (state_tensors(config.optimizer), None if states is None else states.itemsize)
    callables = [m.name for m in shapes.modules if m.callable and m.name]
    checkpointed = matching(callables, config.activation_checkpointing.modules)
    return Plan(
        config=config,
        mesh=mesh,
        batch=batch,
        program=_program(batch, residency),
        residency=residency,
        precision=precision,
        units=units,
        states=states,
        casting=casting_of(config),
        sharding=sharding,
        memory=_memory(units, precision, (sharding.shard_size or mesh.data, sharding.near), kept),
        clip=config.gradient_clipping or None,
        sums=config.gradient_allreduce_op == "sum",
        data_multiple=batch.train if config.dataloader_drop_last else 1,
        telling=_telling(config),
        predivide=float(mesh.data) if config.prescale_gradients else config.gradient_predivide_factor,
        managed=config.managed_gradient_accumulation,
        layer_drop=drop if (drop := config.progressive_layer_drop) is not None and drop.enabled else None,
        keeping=config.activation_checkpointing.keeping,
        checkpointed=checkpointed,
        transforms=(*(["activation checkpointing"] if checkpointed else []), "ZeRO"),
    )


def _program(batch: Batch, residency: Residency) -> Program:
    program = mark_reduce(accumulation(batch.accumulation), every_backward=residency.shard_grads)
    verify(program)
    return program


def rebatched(plan: Plan, asked: BatchRequest) -> Plan:
    """The same plan with another batch.

    Raises:
        PlanError, ConfigError: the numbers do not fit; see `resolve_batch`.
    """
    batch = resolve_batch(asked, plan.batch.ranks)
    multiple = batch.train if plan.config.dataloader_drop_last else 1
    return replace(plan, batch=batch, program=_program(batch, plan.residency), data_multiple=multiple)


def _states(config: Config, shapes: Shapes, precision: Precision) -> torch.dtype | None:
    params = None if config.optimizer is None else config.optimizer.params
    wide = getattr(params, "fp32_optimizer_states", True) and not config.bf16.bf16_optimizer_states
    of_model = next((getattr(torch, p.dtype) for p in shapes.params), None)
    return None if wide else precision.param or of_model


def _telling(config: Config) -> Telling:
    throughput = config.timers.throughput
    return Telling(
        every=config.steps_per_print,
        phases=config.wall_clock_breakdown or config.flops_profiler.enabled,
        speed=throughput.enabled,
        synchronize=throughput.enabled and throughput.synchronized,
        state=config.dump_state,
        level=config.log_level,
        memory=config.memory_breakdown,
        flops=config.flops_profiler if config.flops_profiler.enabled else None,
        comms=config.comms_logger if config.comms_logger.enabled else None,
    )


def _policy(config: Config, modules: Sequence[ModuleInfo]) -> UnitPolicy:
    zero = config.zero_optimization
    leaf = zero.leaf_module
    leaves = {m.name for m in modules if m.name in leaf.names or (m.name and m.name.endswith(leaf.name_suffixes))}
    # The schema's default (half a billion elements) would make one unit of most models, with nothing to overlap. Stage 0 is plain
    # data parallelism, whose reductions no key of this section cuts; clients fill in tiny sizes for small models at any stage.
    asked = zero.stage > 0 and "reduce_bucket_size" in zero.model_fields_set
    return UnitPolicy(
        max_numel=zero.reduce_bucket_size if asked else None,
        persist_numel=zero.param_persistence_threshold,
        persist_total=zero.model_persistence_threshold,
        leaves=frozenset(leaves),
    )


def _memory(
    units: Sequence[UnitSpec], precision: Precision, ranks: tuple[int, int], states: tuple[int, int | None]
) -> Memory:
    """What ds-zero's own arithmetic says of every unit.

    Args:
        ranks: That share one copy, and of these the ones that keep what was gathered.
        states: Tensors per element, and their bytes if not as masters.
    """
    tensors, width = states
    world, near = ranks
    parts = []
    for unit in units:
        dtypes = precision.resolve(getattr(torch, unit.params[0].dtype))
        found = plan_bytes(unit, dtypes, world, tensors)
        if 1 < near < world:
            found = in_nodes(found, Nodes(near, secondary=True))
        optim = found.optim if width is None else found.optim // dtypes.master.itemsize * width
        parts.append((found, optim))
    return Memory(
        params_bytes=sum(found.full for found, _ in parts),
        grads_bytes=sum(found.grads for found, _ in parts),
        master_bytes=sum(found.shard for found, _ in parts),
        optimizer_bytes=sum(optim for _, optim in parts),
        passing_bytes=passing_bytes((found for found, _ in parts), units[0].residency) if units else 0,
    )


def _rows(plan: Plan) -> dict[str, str]:
    config, stage = plan.config, plan.config.zero_optimization.stage
    numel = sum(unit.numel for unit in plan.units)
    memory = plan.memory
    return {
        "model": f"{numel:,} parameters in {len(plan.units)} units, largest {max((u.numel for u in plan.units), default=0):,}",
        "mesh": _mesh_text(plan.mesh),
        "batch": str(plan.batch),
        "ZeRO": f"stage {stage}: {_residency_text(plan.residency)}",
        "precision": precision_text(plan.precision, plan.casting),
        "program": _program_text(plan.program),
        "transforms": " -> ".join(plan.transforms),
        "activations": _activations_text(plan),
        "optimizer": _optimizer_text(config),
        "schedule": "constant"
        if config.scheduler is None
        else _section_text(config.scheduler.type, config.scheduler.params),
        "clipping": f"global norm {plan.clip:g}" if plan.clip else "off",
        "gradients": _gradients_text(plan),
        "memory": f"{_size(memory.total_bytes)} a rank: parameters {_size(memory.params_bytes)}, gradients "
        f"{_size(memory.grads_bytes)}, master {_size(memory.master_bytes)}, optimizer {_size(memory.optimizer_bytes)}; and up to {_size(memory.passing_bytes)} within a step",
    }


def _mesh_text(mesh: MeshSpec) -> str:
    degrees = {"data": mesh.data, "pipe": mesh.pipe, "sequence": mesh.sequence, "tensor": mesh.tensor}
    return f"{mesh.world_size} ranks: " + " x ".join(
        f"{axis} {n}" for axis, n in degrees.items() if n > 1 or axis == "data"
    )


def _residency_text(residency: Residency) -> str:
    sharded = {
        "optimizer state": residency.shard_optim,
        "gradients": residency.shard_grads,
        "parameters": residency.shard_params,
    }
    named = [name for name, cut in sharded.items() if cut]
    return f"{', '.join(named)} sharded" if named else "nothing sharded"


def _program_text(program: Program) -> str:
    words = str(program).split()
    return " ".join(words if len(words) <= 12 else [*words[:6], "...", *words[-4:]])


def _activations_text(plan: Plan) -> str:
    if not plan.checkpointed:
        return f"as the model says; of checkpointed calls: {plan.keeping}"
    names = plan.checkpointed if len(plan.checkpointed) <= 4 else (*plan.checkpointed[:2], "...", plan.checkpointed[-1])
    return f"{len(plan.checkpointed)} modules computed again in backward ({', '.join(names)}); {plan.keeping}"


def _gradients_text(plan: Plan) -> str:
    text = "summed over ranks" if plan.sums else "averaged over ranks"
    text += ", by the optimizer" if reduces_itself(plan.config.optimizer) else ""
    text += f", divided by {plan.predivide:g} before" if plan.predivide != 1.0 else ""
    if plan.sharding.two_steps:
        text += ", gathered across nodes first, then inside"
    if plan.sharding.near > 1:
        text += f", kept by {plan.sharding.near} ranks until the update"
    text += ", of embeddings only rows that are not zero" if plan.sharding.sparse else ""
    return text if plan.managed else f"{text}; every step() is the end of a step"


def _optimizer_text(config: Config) -> str:
    if config.optimizer is None:
        return "the caller's"
    return _section_text(config.optimizer.type, config.optimizer.params)


def _section_text(name: str, params: object) -> str:
    values = params if isinstance(params, Mapping) else params.model_dump()  # type: ignore[attr-defined]
    return f"{name}({', '.join(f'{key}={value}' for key, value in values.items())})"


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        if value < 1024:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
