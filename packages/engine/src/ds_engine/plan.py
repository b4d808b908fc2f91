"""What will be done: a printable record. No tensor, no group. `planner` decides it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ds_comm import MeshSpec
from ds_comm.config import CommsLoggerConfig
from ds_config.sizes import bytes_text
from ds_data.difficulty_schedules import Schedule
from ds_engine.autotuning import AutotuningConfig
from ds_engine.batch import BatchSizes
from ds_engine.compiling.backends import Compiling
from ds_engine.config import Config
from ds_engine.data_plan import DataLoaderPlan
from ds_engine.feature_table import FlopsProfilerConfig, LayerDropConfig
from ds_engine.health import Health
from ds_engine.mixed_precision import Casting, precision_text
from ds_engine.optimizer_table import reduces_itself
from ds_engine.support import features_of, never_run
from ds_parallel.tensor import ModelFacts
from ds_pipe import PipelineSpec, Program
from ds_zero import OffloadPolicy, Precision, ShardingStrategy, UnitPlan, UnitSizePolicy, ZeroPlan
from ds_zero.config import ZenFlowConfig
from ds_zero.layout.units import ModuleInfo, ParamInfo
from ds_zero.policies.quantized_comm import EXACT, QuantizedComm, certificates

__all__ = ["ForeignFiles", "LoggingPlan", "MemoryEstimate", "Plan", "Shapes", "ShardPlan"]


@dataclass(frozen=True, slots=True)
class Shapes:
    """What planning knows of a model: its parameters and modules, from a model on any device (also meta).

    Attributes:
        stages: Ranks of one pipeline.
        facts: Layers and heads, for cutting layers; None where only names and shapes are known.
        staging: How a model in stages was cut; None for a whole model.
        formats: Globs of parameters that have formats of their own, whatever the mode says, and the formats: ("*.lora_A.*", "float32").
    """

    params: tuple[ParamInfo, ...]
    modules: tuple[ModuleInfo, ...]
    stages: int = 1
    facts: ModelFacts | None = None
    staging: PipelineSpec | None = None
    formats: tuple[tuple[str, str], ...] = ()

    @property
    def numel(self) -> int:
        """Number of parameters (elements)."""
        return sum(p.numel for p in self.params)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Expected bytes of model state on one rank, padding included. Activations are not in it.

    Attributes:
        params_bytes, grads_bytes, master_bytes, optimizer_bytes: Kept between steps.
        passing_bytes: Most that comes and goes within a step: gathered units, gradients on their way.
        host_bytes, file_bytes: Kept there instead of on the device; with the buffers between files and the device.
    """

    params_bytes: int
    grads_bytes: int
    master_bytes: int
    optimizer_bytes: int
    passing_bytes: int = 0
    host_bytes: int = 0
    file_bytes: int = 0

    @classmethod
    def of(cls, zero: ZeroPlan) -> MemoryEstimate:
        """Sum the memory estimates of every unit in ds-zero's plan."""
        persistent = zero.persistent_bytes
        return cls(
            persistent["full"],
            persistent["grads"],
            persistent["shard"],
            persistent["optim"],
            zero.passing,
            zero.host,
            zero.file,
        )

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
        ignore_unused_parameters: Leave what no rank used in a step as it is; False raises.
        shard_size: Ranks that share one copy of what is sharded; None: all.
        sparse: Send only the rows of embedding gradients that are not zero.
        near: Neighbouring ranks that keep what was gathered until the next update; 1: none do.
        two_steps: Gather across nodes first, then inside; nodes are of `near` ranks, else as the launcher says.
        offload_optimizer: Where masters and optimizer state are between updates.
        offload_params: Where parameters are between uses.
        wire: What travels as codes; nodes as above.
        split: How updates are split by importance; steps of an epoch are known with the data. None: they are not.
    """

    policy: UnitSizePolicy
    overlap: bool
    strict: bool
    shard_size: int | None = None
    sparse: bool = False
    near: int = 1
    two_steps: bool = False
    offload_optimizer: str | OffloadPolicy = "device"
    offload_params: Literal["device"] | OffloadPolicy = "device"
    wire: QuantizedComm = EXACT
    split: ZenFlowConfig | None = None
    ignore_unused_parameters: bool = True


@dataclass(frozen=True, slots=True)
class LoggingPlan:
    """What is said about a run.

    Attributes:
        every: Log one line every so many steps; None is silent.
        phases: Time forward, backward and step.
        breakdown: Tell those times.
        speed: Report samples per second.
        synchronize: Wait for the device where the speed is read.
        state: Log the plan at the start.
        level: Of the library's loggers; None leaves them alone.
        memory: Report memory in use after each phase.
        flops: Which step's operations are counted, and how they are reported; None counts none.
        comms: Which collectives are counted; None counts none.
        peak_flops_per_s: What a device does at best; None where utilisation is not reported.
    """

    every: int | None
    phases: bool
    breakdown: bool
    speed: bool
    synchronize: bool
    state: bool
    level: str | None
    memory: bool
    flops: FlopsProfilerConfig | None
    comms: CommsLoggerConfig | None
    peak_flops_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class TransformPlan:
    """One thing that will be done to the model.

    Attributes:
        name: Of the transform that does it.
        what: What it decided; only that transform reads it.
        rows: The decision in words, by topic.
    """

    name: str
    what: Any
    rows: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ForeignFiles:
    """How a group's parameters lie in files of DeepSpeed's layout.

    Attributes:
        round_robin: At stages 1 and 2: dealt out, one to each rank in turn; else one behind the other.
        aligned: At stages 1 and 2: each begins at a multiple of 16 bytes.
        sub_group_size: At stage 3: elements of a flat tensor.
    """

    round_robin: bool
    aligned: bool
    sub_group_size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done. `print(plan)` is the first debugging tool.

    Attributes:
        config: What was asked.
        mesh: Degrees of the axes.
        batch: The resolved batch arithmetic.
        program: The actions of one step on every rank of a pipeline, with the reductions marked.
        residency: What is sharded (the ZeRO stage as a value).
        precision: Formats and loss scale.
        zero: Parameters that travel together, and what each rank holds of them: as planned from shapes, and once the model is sharded, as it
            was built.
        states: Format of optimizer state; None is what the optimizer does by itself (fp32).
        casting: What the forward sees.
        sharding: How units are cut, and how they travel.
        clip: Largest global gradient norm; None does not clip.
        summed: Ranks whose gradients are added up: 1 averages over all, the ranks of a sequence averages the rest, all averages none.
        predivide: What gradients are divided by before they are added up over ranks; the rest is divided after.
        managed: Whether the program says where a step of the three-call loop ends; otherwise every `step()` is an end.
        layer_drop: What the forward is passed about layers to drop; None passes nothing.
        curriculum: Length of sequences that the forward is passed at each step; None passes nothing.
        reading: How training data are read.
        telling: What is logged and timed.
        health: What is done about numbers that go wrong.
        transforms: What is applied to the model, in order.
        staging: How a model in stages was cut.
        foreign: How checkpoints in DeepSpeed's layout lie; None: they are written in ours.
        universal: A load without a tag follows `latest_universal`.
        answer_tokens: Most tokens of a prompt and its answer, of an engine that generates; None: it does not.
        compiling: Passes over the graphs of the model, once it is compiled; None: graphs have no actions in them.
        tuning: What is measured before the process ends, and how a tuner looks for more; None: this is a run.
        pause_gc: Whether Python's garbage collector is off while the engine lives.
    """

    config: Config
    mesh: MeshSpec
    batch: BatchSizes
    program: Program
    residency: ShardingStrategy
    precision: Precision
    zero: ZeroPlan
    states: torch.dtype | None
    casting: Casting
    sharding: ShardPlan
    clip: float | None
    summed: int
    reading: DataLoaderPlan
    telling: LoggingPlan
    health: Health
    predivide: float = 1.0
    managed: bool = True
    layer_drop: LayerDropConfig | None = None
    curriculum: Schedule | None = None
    transforms: tuple[TransformPlan, ...] = ()
    staging: PipelineSpec | None = None
    foreign: ForeignFiles | None = None
    universal: bool = False
    answer_tokens: int | None = None
    compiling: Compiling | None = None
    tuning: AutotuningConfig | None = None
    pause_gc: bool = False

    @property
    def units(self) -> tuple[UnitPlan, ...]:
        """Parameters that travel together."""
        return self.zero.units

    @property
    def memory(self) -> MemoryEstimate:
        """Expected bytes of model state per rank."""
        return MemoryEstimate.of(self.zero)

    def arguments(self, step: int) -> Mapping[str, object]:
        """Return the extra keywords that the forward gets in training, after `step` steps."""
        keywords: dict[str, object] = {}
        if self.layer_drop is not None:
            keywords |= {"progressive_layer_drop": True, "pld_theta": self.layer_drop.keep(step)}
        if self.curriculum is not None:
            keywords["curriculum_seqlen"] = self.curriculum(step + 1)
        return keywords

    def rows(self) -> dict[str, str]:
        """Describe the plan in words, by topic."""
        return _rows(self)

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def _reading_text(reading: DataLoaderPlan) -> str:
    curriculum, batching = reading.curriculum, reading.batching
    if curriculum is not None:
        return f"samples chosen by {', '.join(curriculum.curriculum_metrics)}; seed {reading.order.seed}"
    if batching is not None:
        return (
            f"microbatches of up to {batching.max_tokens} tokens; rates follow the batch ({batching.lr_scaling_method})"
        )
    return ""


def _rows(plan: Plan) -> dict[str, str]:
    config = plan.config
    numel = sum(unit.numel for unit in plan.units)
    memory = plan.memory
    return {
        "model": f"{numel:,} parameters in {len(plan.units)} units, largest {max((u.numel for u in plan.units), default=0):,}",
        "mesh": _mesh_text(plan.mesh),
        "batch": str(plan.batch),
        "transforms": " -> ".join(change.name for change in plan.transforms),
        **{topic: text for change in plan.transforms for topic, text in change.rows.items()},
        "precision": precision_text(plan.precision, plan.casting),
        "program": _program_text(plan.program),
        "optimizer": _optimizer_text(config),
        "schedule": "constant"
        if config.scheduler is None
        else _section_text(config.scheduler.type, config.scheduler.params),
        **({} if plan.curriculum is None else {"curriculum": f"the forward gets curriculum_seqlen: {plan.curriculum}"}),
        **({"data": text} if (text := _reading_text(plan.reading)) else {}),
        "clipping": f"global norm {plan.clip:g}" if plan.clip else "off",
        "gradients": _gradients_text(plan),
        "health": str(plan.health),
        "compared": _compared_text(plan),
        **({"importance": _split_text(plan.sharding.split)} if plan.sharding.split is not None else {}),
        **({"offload": text} if (text := _offload_text(plan.zero, plan.batch.accumulation)) else {}),
        **(
            {"generation": f"prompts and answers up to {plan.answer_tokens} tokens, with whole weights"}
            if plan.answer_tokens
            else {}
        ),
        **({} if plan.compiling is None else {"passes": plan.compiling.passes, "graphs": plan.compiling.handling}),
        **({} if plan.tuning is None else {"tuning": _tuning_text(plan.tuning)}),
        "memory": f"{bytes_text(memory.total_bytes)} a rank: parameters {bytes_text(memory.params_bytes)}, gradients "
        f"{bytes_text(memory.grads_bytes)}, master {bytes_text(memory.master_bytes)}, optimizer {bytes_text(memory.optimizer_bytes)}; and up to {bytes_text(memory.passing_bytes)} within a step",
    }


def _tuning_text(section: AutotuningConfig) -> str:
    return f"steps {section.start_profile_step} to {section.end_profile_step} are measured, then every process ends"


def _compared_text(plan: Plan) -> str:
    untried = never_run(features_of(plan.config, plan.mesh))
    if not untried:
        return "verified: every pair of features here matches a single-process run (docs/reference/support-matrix.md)"
    return (
        f"no recorded run has {', '.join(' with '.join(pair) for pair in untried)} (docs/reference/support-matrix.md)"
    )


def _split_text(split: ZenFlowConfig) -> str:
    interval = (
        "when they have grown large" if split.update_interval == "auto" else f"every {split.update_interval} steps"
    )
    late = split.overlap_step and not split.overlaps
    why = "; all updates begin after backward: what the gradients of all ranks are says when that is" if late else ""
    return f"{split.topk_ratio:.0%} of the columns are updated in every step, the others {interval} (ZenFlow){why}"


def _offload_text(zero: ZeroPlan, accumulation: int) -> str:
    """Describe which state is offloaded where, and the bytes that a step of `accumulation` microbatches moves over each link."""
    tiers, rests = (
        {str(p) for u in zero.units if isinstance(p := getattr(u, role), OffloadPolicy) and _counts(u, role)}
        for role in ("offload_optimizer", "offload_params")
    )
    if not tiers | rests:
        return ""
    trained = [u for u in zero.units if u.spec.trained and isinstance(u.offload_optimizer, OffloadPolicy)]
    grads = sum(u.layout.shard_numel * _landing_bytes(u, accumulation) for u in trained)
    params = sum(u.layout.shard_numel * u.dtypes.param.itemsize for u in trained)
    filed = sum(u.bytes.file for u in trained)
    sentences = [f"optimizer state in {' and '.join(sorted(tiers))}"] if tiers else []
    sentences += [f"parameters in {' and '.join(sorted(rests))}"] if rests else []
    sentences += [f"{bytes_text(zero.host)} of host memory" if zero.host else ""]
    sentences += [f"{bytes_text(zero.file)} of files" if zero.file else ""]
    if trained:
        sentences.append(
            f"a step moves {bytes_text(grads)} of gradients there and {bytes_text(params)} of parameters back"
        )
    sentences += [f"reads and writes {bytes_text(filed)} of files" if filed else ""]
    if zero.early:
        sentences.append(
            f"updates of {zero.early} units begin during backward; {bytes_text(zero.undo)} keep what they overwrite until the step is known"
        )
    return "; ".join(filter(None, sentences))


def _landing_bytes(unit: UnitPlan, accumulation: int) -> int:
    """Return the bytes of gradients that go to the host in a step for each element of a shard: a sum after each backward, or one after all."""
    if accumulation == 1:
        return unit.dtypes.reduce.itemsize
    if unit.spec.strategy.shard_grads:
        return accumulation * unit.dtypes.reduce.itemsize
    return unit.dtypes.accumulate.itemsize


def _counts(unit: UnitPlan, role: str) -> bool:
    """Return whether a unit's offload in this role counts: optimizer offload only for trained units."""
    return unit.spec.trained if role == "offload_optimizer" else True


def _mesh_text(mesh: MeshSpec) -> str:
    degrees = {"pipe": mesh.pipe, "data": mesh.data, "sequence": mesh.sequence, "tensor": mesh.tensor}
    product = " x ".join(f"{axis} {n}" for axis, n in degrees.items() if n > 1 or axis == "data")
    experts = f"; experts over {mesh.expert}" if mesh.expert > 1 else ""
    return f"{mesh.world_size} ranks: {product}{experts}"


def _program_text(program: Program) -> str:
    return "; ".join(_row_text(list(map(str, actions))) for actions in program.ranks)


def _row_text(words: list[str]) -> str:
    return " ".join(words if len(words) <= 12 else [*words[:6], "...", *words[-4:]])


def _gradients_text(plan: Plan) -> str:
    averaged = plan.mesh.data * plan.mesh.sequence // plan.summed
    text = "averaged over ranks" if averaged > 1 or plan.summed == 1 else "summed over ranks"
    text += f", summed over {plan.summed} that share a sequence" if averaged > 1 and plan.summed > 1 else ""
    text += ", by the optimizer" if reduces_itself(plan.config.optimizer) else ""
    text += f", divided by {plan.predivide:g} before" if plan.predivide != 1.0 else ""
    if plan.sharding.two_steps:
        text += ", gathered across nodes first, then inside"
    if plan.sharding.near > 1:
        text += f", kept by {plan.sharding.near} ranks until the update"
    text += _wire_text(plan.sharding.wire)
    text += ", of embeddings only rows that are not zero" if plan.sharding.sparse else ""
    return text if plan.managed else f"{text}; every step() is the end of a step"


def _wire_text(wire: QuantizedComm) -> str:
    """Describe the quantized communication, and its measured loss compared with exact messages."""
    known = certificates()
    rows = {mode: [row["loss"] / row["exact"] - 1 for row in known.get(mode, {}).values()] for mode in wire.modes}
    text = "".join(f", {mode} (certified: loss {max(losses):+.2%})" for mode, losses in rows.items() if losses)
    return text + ("; ranks that share memory use no codes: they send nothing" if wire.modes else "")


def _optimizer_text(config: Config) -> str:
    if config.optimizer is None:
        return "the caller's"
    return _section_text(config.optimizer.type, config.optimizer.params)


def _section_text(name: str, params: object) -> str:
    values = params if isinstance(params, Mapping) else params.model_dump()  # type: ignore[attr-defined]
    return f"{name}({', '.join(f'{key}={value}' for key, value in values.items())})"
