"""Which combinations are illegal: found in one place, all at once. No component checks for another.

Each rule says when it is broken, what was asked and found, and what to do. All broken rules of a configuration are one error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain

from ds_comm import MeshSpec
from ds_config.errors import DsError, PlanError, UnsupportedError
from ds_engine.batch import BatchRequest, resolve_batch
from ds_engine.config import Config
from ds_engine.config_sections import AdamParams
from ds_engine.elastic_batch import elastic_batch
from ds_engine.lr_schedules import Schedule
from ds_engine.optimizer_table import apart, check_optimizer, check_scheduler, reduces_itself
from ds_engine.parallel_degrees import degrees_of
from ds_engine.support import features_of, refused

__all__ = ["AXES", "asked_batch", "broken_rules", "check_rules", "lasting_problems"]

AXES = ("pipe", "sequence", "tensor", "expert")
_WORLDS = tuple(n * 2**power for n in (1, 3, 5, 7) for power in range(11))
"""Tried where the number of ranks is not given."""
Broken = tuple[str, str, str]
"""A broken rule: its section of docs/reference/errors.md, what was asked and found, and what to do."""


def _mode(config: Config) -> str:
    return "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"


def _true(conditions: Mapping[str, object]) -> list[str]:
    return [text for text, holds in conditions.items() if holds]


def _of_precision(c: Config, mesh: MeshSpec) -> Iterator[Broken]:
    del mesh
    fp16, bf16, autocast, param = c.fp16, c.bf16, c.torch_autocast, c.data_types.param_dtype
    if fp16.enabled and bf16.enabled:
        yield "precision-both", "fp16.enabled and bf16.enabled are both true", "Keep one; bf16 needs no loss scale."
    if param not in (None, _mode(c)):
        yield (
            "precision-param-dtype",
            f"data_types.param_dtype = {param}, the enabled mode is {_mode(c)}",
            "Leave param_dtype out, or enable the section of that format.",
        )
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        what = "bf16_optimizer_states is true and bf16_master_weights_and_grads is not"
        yield "precision-states", what, "Set both, or neither."
    ignored = _true(
        {
            "fp16.auto_cast": fp16.auto_cast and not fp16.enabled,
            "fp16.fp16_master_weights_and_grads": fp16.fp16_master_weights_and_grads and not fp16.enabled,
            "bf16.bf16_master_weights_and_grads": bf16.bf16_master_weights_and_grads and not bf16.enabled,
            "torch_autocast.dtype": autocast.dtype is not None and not autocast.enabled,
            "torch_autocast.lower_precision_safe_modules": bool(autocast.lower_precision_safe_modules)
            and not autocast.enabled,
        }
    )
    if ignored:
        what = f"{', '.join(ignored)} given, but the section is not enabled"
        yield "precision-off", what, "Enable the section, or remove the keys."


def _of_zero(c: Config, mesh: MeshSpec) -> Iterator[Broken]:
    zero, stage, ranks = c.zero_optimization, c.zero_optimization.stage, mesh.data * mesh.sequence
    mics, hpz = zero.mics_shard_size, max(1, zero.zero_hpz_partition_size)
    if mics != -1 and (mics == 0 or stage == 0 or ranks % mics != 0):
        yield (
            "mics-shard-size",
            f"zero_optimization.mics_shard_size = {mics} with stage {stage} on {ranks} ranks",
            "Use stage 1, 2 or 3 and a size that divides the ranks, or leave it out: then all ranks share one copy.",
        )
    two_steps = "mics_hierarchical_params_gather = true" if zero.mics_hierarchical_params_gather else ""
    near, shards = f"zero_hpz_partition_size = {hpz}" if hpz > 1 else two_steps, ranks if mics < 1 else mics
    if near and (stage != 3 or shards % hpz):
        yield (
            "zero-nodes",
            f"zero_optimization.{near} with stage {stage}, where {shards} ranks share one copy",
            "Use stage 3 and a size that divides those ranks, or leave it out: gathers are then flat.",
        )
    if zero.offload_param is not None and zero.offload_param.device != "none" and stage != 3:
        yield (
            "offload-stage",
            f"zero_optimization.offload_param with stage {stage}",
            "Use stage 3, or remove the section: at other stages every rank needs all parameters all the time.",
        )
    tiers = {"offload_optimizer": zero.offload_optimizer, "offload_param": zero.offload_param}
    homeless = [name for name, s in tiers.items() if s is not None and s.device == "nvme" and not s.nvme_path]
    if homeless:
        what = f"{' and '.join(homeless)}: device = nvme without nvme_path"
        yield "offload-placement", what, "Set nvme_path to a folder of a fast disk."
    yield from _of_early_updates(c)
    quantized_weights = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    vain = _true(
        {
            "quantized weights": quantized_weights and stage != 3,
            "zero_quantized_gradients": zero.zero_quantized_gradients and stage == 0,
            "zeropp_loco_param without zero_quantized_gradients": zero.zeropp_loco_param is not None
            and not zero.zero_quantized_gradients,
        }
    )
    if vain:
        yield (
            "zero-quantized-comm",
            f"{', '.join(vain)} with stage {stage}",
            "Quantize weights at stage 3, gradients at stages 1 to 3, and give zeropp_loco_param with quantized gradients only.",
        )
    if c.checkpoint.layout == "deepspeed" and stage == 0:
        what = "checkpoint.layout = deepspeed with ZeRO stage 0, whose files are not written here"
        yield "checkpoint-layout", what, "Use stage 1, 2 or 3, or leave the layout out."
    if c.sparse_gradients and stage > 0:
        what = f"sparse_gradients = true with zero_optimization.stage = {stage}"
        yield "zero-sparse", what, "Use stage 0, or remove the key: shards of a gradient are summed, not rows."


def _of_early_updates(c: Config) -> Iterator[Broken]:
    """Updates during backward (SuperOffload, ZenFlow's overlap), and what they cannot go with."""
    offload, split, optimizer = c.zero_optimization.offload_optimizer, c.zero_optimization.zenflow, c.optimizer
    device = "none" if offload is None else offload.device
    conflicts: dict[str, object] = {f"offload_optimizer.device = {device}": device != "cpu"}
    if offload is not None and offload.super_offload:
        key = "offload_optimizer.super_offload"
        conflicts["cpuadam_cores_perc = 0"] = offload.cpuadam_cores_perc == 0
    elif split is not None and split.overlap_step:
        key = "zenflow.overlap_step"
        conflicts["pt_reserved_cores_perc = 1"] = split.pt_reserved_cores_perc == 1
    else:
        return
    conflicts[f"optimizer {'' if optimizer is None else optimizer.type}"] = not apart(optimizer)
    if _true(conflicts):
        yield (
            "zero-early",
            f"{key} with {' and with '.join(_true(conflicts))}",
            "Use device: cpu and Adam or AdamW without torch_adam, or leave it out: all updates then begin after backward.",
        )


def _of_the_optimizer(c: Config, mesh: MeshSpec) -> Iterator[Broken]:
    del mesh
    stage, travel, predivide = c.zero_optimization.stage, c.communication_data_type, c.gradient_predivide_factor
    scalings = {
        "prescale_gradients = true": c.prescale_gradients,
        f"gradient_predivide_factor = {predivide:g}": predivide != 1.0,
    }
    if all(scalings.values()):
        yield "gradients-scaling", f"{' and '.join(scalings)} are different ways to scale gradients", "Keep one."
    params = None if c.optimizer is None else c.optimizer.params
    if isinstance(params, AdamParams):
        of_torch = params.torch_adam or params.amsgrad
        flags = {
            "bias_correction = false": not params.bias_correction,
            "fp32_optimizer_states = false": not params.fp32_optimizer_states,
        }
        if of_torch and _true(flags):
            yield (
                "optimizer-torch-adam",
                f"torch's Adam, which torch_adam and amsgrad ask for, has no {' and no '.join(_true(flags))}",
                "Keep one: without torch_adam and amsgrad the flag is obeyed.",
            )
        if params.fused and not of_torch:
            yield (
                "optimizer-torch-fused",
                "fused = true, which is a flag of torch's Adam, without torch_adam",
                "Set torch_adam, or leave fused out: ours updates all tensors at once anyway.",
            )
    conflicts = _true(
        {
            f"zero_optimization.stage = {stage} shards its state": stage > 0,
            f"communication_data_type = {travel} speaks of gradients that do not travel": travel is not None,
            "sparse_gradients = true speaks of gradients that do not travel": c.sparse_gradients,
            "prescale_gradients = true speaks of sums that are not made": c.prescale_gradients,
            "gradient_predivide_factor speaks of sums that are not made": predivide != 1.0,
            "bf16.bf16_optimizer_states = true would make its state narrow": c.bf16.bf16_optimizer_states,
        }
    )
    if c.optimizer is not None and reduces_itself(c.optimizer) and conflicts:
        yield (
            "optimizer-owns-reduction",
            f"{c.optimizer.type} reduces gradients itself, and {conflicts[0]}",
            "Remove the key, or use AdamW; with a 1-bit optimizer stage 0 is the only one.",
        )


def _of_layers(c: Config, mesh: MeshSpec) -> Iterator[Broken]:
    section, hybrid = c.tensor_parallel, c.hybrid_engine
    if section is not None and section.other_degrees:
        others = ", ".join(f"{key} = {n}" for key, n in section.other_degrees.items())
        what = f"tensor_parallel: autotp_size = {mesh.tensor}, and {others}"
        yield "tensor-sizes", what, "Give the number of tensor-parallel ranks in one place."
    if section is not None and (section.half_batches or section.tp_overlap_comm):
        halves, experts = section.half_batches, c.expert_parallel
        conflicts = {
            "megatron_layers, whose layers are the model's own": section.megatron_layers,
            "train_micro_batch_size_per_gpu = 1, which has no halves": halves and c.train_micro_batch_size_per_gpu == 1,
            "compile.deepcompile, whose passes order what a graph does": halves and c.compile.deepcompile,
            "expert_parallel, which counts the tokens of a whole batch": halves
            and experts is not None
            and experts.enabled,
        }
        key = "half_batches" if halves else "tp_overlap_comm"
        if _true(conflicts):
            what = f"tensor_parallel.{key} with {' and with '.join(_true(conflicts))}"
            yield "tensor-halves", what, "Leave one of the two out."
    if section is not None and "dtype" in section.model_fields_set:
        name = section.dtype.removeprefix("torch.")
        short = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}.get(
            name, name
        )
        if short != _mode(c):
            what = f"tensor_parallel.dtype = {short}, the precision sections say {_mode(c)}"
            yield "tensor-dtype", what, "Leave dtype out, or enable the section of that format."
    if hybrid.enabled and (hybrid.inference_tp_size > 1 or mesh.pipe * mesh.sequence > 1):
        yield (
            "hybrid-ranks",
            f"hybrid_engine generates with whole models; inference_tp_size = {hybrid.inference_tp_size}, {_degrees_text(mesh)}",
            "Leave inference_tp_size at 1, and stages and shared sequences out.",
        )


def _of_the_mesh(c: Config, mesh: MeshSpec) -> Iterator[Broken]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch_keys = [name for name in keys if getattr(c, name) is not None]
    if c.elasticity.enabled and not c.elasticity.ignore_non_elastic_batch_info and batch_keys:
        yield (
            "elasticity-batch",
            f"elasticity decides the batch, and {', '.join(batch_keys)} is given, too",
            "Remove the batch keys, or set elasticity.ignore_non_elastic_batch_info = true to override them.",
        )
    if refusals := refused(features_of(c, mesh)):
        yield (
            "support-refused",
            "; ".join(f"{' with '.join(p)} was refused in every recorded run ({code})" for p, code in refusals.items()),
            "Leave one of the two out; docs/reference/support-matrix.md says what goes together.",
        )
    if c.data_parallel_size not in (None, mesh.data):
        what = f"data_parallel_size = {c.data_parallel_size}, where {_degrees_text(mesh)} leave {mesh.data}"
        yield "mesh-size", what, "Leave data_parallel_size out to infer it."


_RULES = (_of_precision, _of_zero, _of_the_optimizer, _of_layers, _of_the_mesh)


def asked_batch(config: Config, world: int) -> BatchRequest:
    """Return the batch keys of elasticity on `world` ranks, or of the configuration."""
    return elastic_batch(config.elasticity, world) if config.elasticity.enabled else config.batch


_WHERE = {
    "pipe": "a model of {} pipeline stages",
    "sequence": "sequence_parallel_size = {}",
    "tensor": "tensor_parallel.autotp_size = {}",
    "expert": "expert_parallel.autoep_size = {}",
}


def _degrees_text(mesh: MeshSpec) -> str:
    others = [f"{axis} {n}" for axis in ("pipe", "sequence", "tensor") if (n := getattr(mesh, axis)) > 1]
    return " / ".join([f"{mesh.world_size} ranks", *others])


def check_rules(config: Config, world: int, axes: Collection[str] = (), stages: int = 1) -> MeshSpec:
    """Return the mesh of `world` ranks, or raise one error for every problem of `config` on the mesh.

    Args:
        axes: Axes of the mesh on which a degree above 1 is supported.
        stages: Pipeline stages of the model.
    Raises:
        PlanError: rules are broken, or mesh or batch do not fit; with the code of the only problem, or "plan-rules".
        UnsupportedError: all problems are features that are not built here.
        ConfigError: an optimizer or scheduler is unknown.
    """
    mesh, errors = broken_rules(config, world, axes, stages)
    if errors:
        raise _together(errors)
    return mesh


def lasting_problems(config: Config) -> Sequence[DsError]:
    """Return the problems of `config` on any world size, with messages for the first size tried."""
    one = broken_rules(config, 1, AXES)[1]
    others = [{error.code for error in broken_rules(config, world, AXES)[1]} for world in _WORLDS]
    return [error for error in one if all(error.code in codes for codes in others)]


def broken_rules(
    config: Config, world: int, axes: Collection[str] = (), stages: int = 1
) -> tuple[MeshSpec, Sequence[DsError]]:
    """Return the mesh of `world` ranks and the problems of `config` on the mesh. Arguments as of `check_rules`."""
    errors: list[DsError] = []
    degrees = degrees_of(config, stages)
    for axis, degree in degrees.items():
        if degree > 1 and axis not in axes:
            setting = _WHERE[axis].format(degree)
            error = UnsupportedError(f"{setting}: nothing here uses it yet", code="mesh-unbuilt", fix="Use 1.")
            errors.append(error)
    try:
        mesh = MeshSpec.fit(world, **degrees)
    except DsError as error:
        errors.append(error)
        mesh = MeshSpec.fit(world)
    broken = chain.from_iterable(rules(config, mesh) for rules in _RULES)
    errors += [PlanError(message, code=code, fix=fix) for code, message, fix in broken]
    ranks = config.data_parallel_size or mesh.data
    checks: list[Callable[[], object]] = [lambda: resolve_batch(asked_batch(config, ranks), ranks)]
    if config.optimizer is not None:
        checks.append(lambda: check_optimizer(config.optimizer))  # type: ignore[arg-type]
    if config.scheduler is not None:
        checks.append(lambda: check_scheduler(config.scheduler))  # type: ignore[arg-type]
    schedule = getattr(config.scheduler, "params", None)
    if config.optimizer is not None and isinstance(schedule, Schedule):
        checks.append(schedule.check_steps)
    for check in checks:
        try:
            check()
        except DsError as error:
            errors.append(error)
    return mesh, errors


def _together(errors: Sequence[DsError]) -> DsError:
    if len(errors) == 1:
        return errors[0]
    lines = [f"{len(errors)} problems with the configuration:"]
    for error in errors:
        lines += [f"  {error.code}: {error.message}", f"    {error.fix}"]
    kind = UnsupportedError if all(isinstance(error, UnsupportedError) for error in errors) else PlanError
    return kind("\n".join(lines), code="plan-rules", fix="Correct each; they are independent.")
