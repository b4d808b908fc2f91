"""Which combinations are illegal: one table, checked at once. No component checks for another.

A rule is a row: when it is broken, what to say, what to do. All broken rules of a configuration are one error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

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

__all__ = ["AXES", "RULES", "ConfigRule", "asked_batch", "broken_rules", "check_rules", "lasting_problems"]


@dataclass(frozen=True, slots=True)
class ConfigRule:
    """One illegal combination.

    Attributes:
        code: Section of docs/reference/errors.md.
        broken: Whether a configuration breaks it on a mesh of these degrees.
        message: What was asked and found, with values.
        fix: What to do.
    """

    code: str
    broken: Callable[[Config, MeshSpec], bool]
    message: Callable[[Config, MeshSpec], str]
    fix: str


AXES = ("pipe", "sequence", "tensor", "expert")
_WORLDS = tuple(
    n * 2**power for n in (1, 3, 5, 7) for power in range(11)
)  # tried where the number of ranks is not given

RULES: tuple[ConfigRule, ...] = (
    ConfigRule(
        "precision-both",
        lambda c, mesh: c.fp16.enabled and c.bf16.enabled,
        lambda c, mesh: "fp16.enabled and bf16.enabled are both true",
        "Keep one; bf16 needs no loss scale.",
    ),
    ConfigRule(
        "precision-autocast",
        lambda c, mesh: c.torch_autocast.enabled and (c.fp16.enabled or c.bf16.enabled),
        lambda c, mesh: f"torch_autocast and {'fp16' if c.fp16.enabled else 'bf16'} are both enabled",
        "Keep one: autocast casts operations, fp16 and bf16 cast the parameters.",
    ),
    ConfigRule(
        "precision-param-dtype",
        lambda c, mesh: c.data_types.param_dtype not in (None, _mode(c)),
        lambda c, mesh: f"data_types.param_dtype = {c.data_types.param_dtype}, the enabled mode is {_mode(c)}",
        "Leave param_dtype out, or enable the section of that format.",
    ),
    ConfigRule(
        "mics-shard-size",
        lambda c, mesh: (
            _mics(c) != -1 and (_mics(c) == 0 or c.zero_optimization.stage == 0 or _gradient(mesh) % _mics(c) != 0)
        ),
        lambda c, mesh: (
            f"zero_optimization.mics_shard_size = {_mics(c)} with stage {c.zero_optimization.stage} on {_gradient(mesh)} ranks"
        ),
        "Use stage 1, 2 or 3 and a size that divides the ranks, or leave it out: then all ranks share one copy.",
    ),
    ConfigRule(
        "zero-nodes",
        lambda c, mesh: bool(_near(c)) and (c.zero_optimization.stage != 3 or bool(_shards(c, mesh) % _hpz(c))),
        lambda c, mesh: (
            f"{_near(c)} with stage {c.zero_optimization.stage}, where {_shards(c, mesh)} ranks share one copy"
        ),
        "Use stage 3 and a size that divides those ranks, or leave it out: gathers are then flat.",
    ),
    ConfigRule(
        "offload-stage",
        lambda c, mesh: _offloads(c, "param") and c.zero_optimization.stage != 3,
        lambda c, mesh: f"zero_optimization.offload_param with stage {c.zero_optimization.stage}",
        "Use stage 3, or remove the section: at other stages every rank needs all parameters all the time.",
    ),
    ConfigRule(
        "offload-placement",
        lambda c, mesh: bool(_without_folder(c)),
        lambda c, mesh: f"{' and '.join(_without_folder(c))}: device = nvme without nvme_path",
        "Set nvme_path to a folder of a fast disk.",
    ),
    ConfigRule(
        "zero-early",
        lambda c, mesh: bool(_against_early(c)),
        lambda c, mesh: f"{_early_key(c)} with {' and with '.join(_against_early(c))}",
        "Use device: cpu and Adam or AdamW without torch_adam, or leave it out: all updates then begin after backward.",
    ),
    ConfigRule(
        "zero-quantized-comm",
        lambda c, mesh: bool(_vain_codes(c)),
        lambda c, mesh: f"{_vain_codes(c)} with stage {c.zero_optimization.stage}",
        "Quantize weights at stage 3, gradients at stages 1 to 3, and give zeropp_loco_param with quantized gradients only.",
    ),
    ConfigRule(
        "precision-states",
        lambda c, mesh: c.bf16.bf16_optimizer_states and not c.bf16.bf16_master_weights_and_grads,
        lambda c, mesh: "bf16_optimizer_states is true and bf16_master_weights_and_grads is not",
        "Set both, or neither.",
    ),
    ConfigRule(
        "precision-off",
        lambda c, mesh: bool(_needs_mode(c)),
        lambda c, mesh: f"{', '.join(_needs_mode(c))} given, but the section is not enabled",
        "Enable the section, or remove the keys.",
    ),
    ConfigRule(
        "checkpoint-layout",
        lambda c, mesh: c.checkpoint.layout == "deepspeed" and c.zero_optimization.stage == 0,
        lambda c, mesh: "checkpoint.layout = deepspeed with ZeRO stage 0, whose files are not written here",
        "Use stage 1, 2 or 3, or leave the layout out.",
    ),
    ConfigRule(
        "gradients-scaling",
        lambda c, mesh: len(_scalings(c)) > 1,
        lambda c, mesh: f"{' and '.join(_scalings(c))} are different ways to scale gradients",
        "Keep one.",
    ),
    ConfigRule(
        "zero-sparse",
        lambda c, mesh: c.sparse_gradients and c.zero_optimization.stage > 0,
        lambda c, mesh: f"sparse_gradients = true with zero_optimization.stage = {c.zero_optimization.stage}",
        "Use stage 0, or remove the key: shards of a gradient are summed, not rows.",
    ),
    ConfigRule(
        "optimizer-torch-adam",
        lambda c, mesh: bool(_not_of_torch(c)),
        lambda c, mesh: (
            f"torch's Adam, which torch_adam and amsgrad ask for, has no {' and no '.join(_not_of_torch(c))}"
        ),
        "Keep one: without torch_adam and amsgrad the flag is obeyed.",
    ),
    ConfigRule(
        "optimizer-torch-fused",
        lambda c, mesh: _fuses_nothing(c),
        lambda c, mesh: "fused = true, which is a flag of torch's Adam, without torch_adam",
        "Set torch_adam, or leave fused out: ours updates all tensors at once anyway.",
    ),
    ConfigRule(
        "tensor-sizes",
        lambda c, mesh: c.tensor_parallel is not None and bool(c.tensor_parallel.other_degrees),
        lambda c, mesh: (
            f"tensor_parallel: autotp_size = {mesh.tensor}, and "
            + ", ".join(
                f"{key} = {n}" for key, n in (c.tensor_parallel.other_degrees if c.tensor_parallel else {}).items()
            )
        ),
        "Give the number of tensor-parallel ranks in one place.",
    ),
    ConfigRule(
        "tensor-halves",
        lambda c, mesh: bool(_against_halves(c)),
        lambda c, mesh: f"tensor_parallel.{_against_halves(c)}",
        "Leave one of the two out.",
    ),
    ConfigRule(
        "tensor-dtype",
        lambda c, mesh: _tensor_dtype(c) not in (None, _mode(c)),
        lambda c, mesh: f"tensor_parallel.dtype = {_tensor_dtype(c)}, the precision sections say {_mode(c)}",
        "Leave dtype out, or enable the section of that format.",
    ),
    ConfigRule(
        "optimizer-owns-reduction",
        lambda c, mesh: reduces_itself(c.optimizer) and bool(_of_the_reduction(c)),
        lambda c, mesh: f"{c.optimizer and c.optimizer.type} reduces gradients itself, and {_of_the_reduction(c)[0]}",
        "Remove the key, or use AdamW; with a 1-bit optimizer stage 0 is the only one.",
    ),
    ConfigRule(
        "hybrid-ranks",
        lambda c, mesh: (
            c.hybrid_engine.enabled and (c.hybrid_engine.inference_tp_size > 1 or mesh.pipe * mesh.sequence > 1)
        ),
        lambda c, mesh: (
            f"hybrid_engine generates with whole models; inference_tp_size = {c.hybrid_engine.inference_tp_size}, {_degrees_text(mesh)}"
        ),
        "Leave inference_tp_size at 1, and stages and shared sequences out.",
    ),
    ConfigRule(
        "elasticity-batch",
        lambda c, mesh: c.elasticity.enabled and not c.elasticity.ignore_non_elastic_batch_info and bool(_given(c)),
        lambda c, mesh: f"elasticity decides the batch, and {', '.join(_given(c))} is given, too",
        "Remove the batch keys, or set elasticity.ignore_non_elastic_batch_info = true to override them.",
    ),
    ConfigRule(
        "support-refused",
        lambda c, mesh: bool(refused(features_of(c, mesh))),
        lambda c, mesh: "; ".join(
            f"{' with '.join(pair)} was refused in every recorded run ({code})"
            for pair, code in refused(features_of(c, mesh)).items()
        ),
        "Leave one of the two out; docs/reference/support-matrix.md says what goes together.",
    ),
    ConfigRule(
        "mesh-size",
        lambda c, mesh: c.data_parallel_size not in (None, mesh.data),
        lambda c, mesh: f"data_parallel_size = {c.data_parallel_size}, where {_degrees_text(mesh)} leave {mesh.data}",
        "Leave data_parallel_size out to infer it.",
    ),
)


def _offloads(config: Config, role: str) -> bool:
    section = getattr(config.zero_optimization, f"offload_{role}")
    return section is not None and section.device != "none"


def _without_folder(config: Config) -> list[str]:
    names = [f"offload_{role}" for role in ("optimizer", "param")]
    sections = {name: getattr(config.zero_optimization, name) for name in names}
    return [name for name, s in sections.items() if s is not None and s.device == "nvme" and not s.nvme_path]


def _early_key(config: Config) -> str:
    """Return the key that enables updates during backward; empty where no key does."""
    zero = config.zero_optimization
    if zero.offload_optimizer is not None and zero.offload_optimizer.super_offload:
        return "offload_optimizer.super_offload"
    return "zenflow.overlap_step" if zero.zenflow is not None and zero.zenflow.overlap_step else ""


def _against_early(config: Config) -> list[str]:
    """List the settings that conflict with updates during backward, if these are enabled."""
    zero, optimizer, key = config.zero_optimization, config.optimizer, _early_key(config)
    device = "none" if zero.offload_optimizer is None else zero.offload_optimizer.device
    split, whole = zero.zenflow, zero.offload_optimizer
    conflicts = {
        f"offload_optimizer.device = {device}": device != "cpu",
        "pt_reserved_cores_perc = 1": key.startswith("zenflow")
        and split is not None
        and split.pt_reserved_cores_perc == 1,
        "cpuadam_cores_perc = 0": key.startswith("offload") and whole is not None and whole.cpuadam_cores_perc == 0,
        f"optimizer {'' if optimizer is None else optimizer.type}": not apart(optimizer),
    }
    return [what for what, wrong in conflicts.items() if key and wrong]


def _mode(config: Config) -> str:
    return "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"


def _against_halves(config: Config) -> str:
    """Return an overlapping key of the tensor-parallel section with what it cannot go with; empty where there is no conflict."""
    section = config.tensor_parallel
    if section is None or not (section.half_batches or section.tp_overlap_comm):
        return ""
    key = "half_batches" if section.half_batches else "tp_overlap_comm"
    conflicts = {
        "megatron_layers, whose layers are the model's own": section.megatron_layers,
        "train_micro_batch_size_per_gpu = 1, which has no halves": section.half_batches
        and config.train_micro_batch_size_per_gpu == 1,
        "compile.deepcompile, whose passes order what a graph does": section.half_batches
        and config.compile is not None
        and config.compile.deepcompile,
        "expert_parallel, which counts the tokens of a whole batch": section.half_batches
        and config.expert_parallel is not None
        and config.expert_parallel.enabled,
    }
    found = [what for what, wrong in conflicts.items() if wrong]
    return f"{key} with {' and with '.join(found)}" if found else ""


def _tensor_dtype(config: Config) -> str | None:
    """Return the dtype that the tensor-parallel section names; None if it names none."""
    section = config.tensor_parallel
    if section is None or "dtype" not in section.model_fields_set:
        return None
    name = section.dtype.removeprefix("torch.")
    return {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}.get(name, name)


def _needs_mode(config: Config) -> list[str]:
    """Switches that would be ignored because their section is off."""
    switches = {
        "fp16.auto_cast": config.fp16.auto_cast and not config.fp16.enabled,
        "fp16.fp16_master_weights_and_grads": config.fp16.fp16_master_weights_and_grads and not config.fp16.enabled,
        "bf16.bf16_master_weights_and_grads": config.bf16.bf16_master_weights_and_grads and not config.bf16.enabled,
        "torch_autocast.dtype": config.torch_autocast.dtype is not None and not config.torch_autocast.enabled,
    }
    return [name for name, ignored in switches.items() if ignored]


def _mics(config: Config) -> int:
    return config.zero_optimization.mics_shard_size


def _hpz(config: Config) -> int:
    return max(1, config.zero_optimization.zero_hpz_partition_size)


def _near(config: Config) -> str:
    """Return the keys that concern the node topology; empty where there are none."""
    if _hpz(config) > 1:
        return f"zero_optimization.zero_hpz_partition_size = {_hpz(config)}"
    return "zero_optimization.mics_hierarchical_params_gather = true" if _two_steps(config) else ""


def _vain_codes(config: Config) -> str:
    """Return the keys of quantized communication that have no effect."""
    zero = config.zero_optimization
    weights = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    conditions = {
        "quantized weights": weights and zero.stage != 3,
        "zero_quantized_gradients": zero.zero_quantized_gradients and zero.stage == 0,
        "zeropp_loco_param without zero_quantized_gradients": zero.zeropp_loco_param is not None
        and not zero.zero_quantized_gradients,
    }
    return ", ".join(name for name, vain in conditions.items() if vain)


def _two_steps(config: Config) -> bool:
    return config.zero_optimization.mics_hierarchical_params_gather


def _gradient(mesh: MeshSpec) -> int:
    """Ranks that gradients are summed over."""
    return mesh.data * mesh.sequence


def _shards(config: Config, mesh: MeshSpec) -> int:
    return _gradient(mesh) if _mics(config) < 1 else _mics(config)


def _scalings(config: Config) -> list[str]:
    factors = {
        "prescale_gradients = true": config.prescale_gradients,
        f"gradient_predivide_factor = {config.gradient_predivide_factor:g}": config.gradient_predivide_factor != 1.0,
    }
    return [text for text, active in factors.items() if active]


def _not_of_torch(config: Config) -> list[str]:
    """Flags that torch's implementation of Adam would discard."""
    params = None if config.optimizer is None else config.optimizer.params
    if not isinstance(params, AdamParams) or not (params.torch_adam or params.amsgrad):
        return []
    flags = {
        "bias_correction = false": not params.bias_correction,
        "fp32_optimizer_states = false": not params.fp32_optimizer_states,
    }
    return [text for text, active in flags.items() if active]


def _fuses_nothing(config: Config) -> bool:
    params = None if config.optimizer is None else config.optimizer.params
    return isinstance(params, AdamParams) and params.fused and not (params.torch_adam or params.amsgrad)


def _of_the_reduction(config: Config) -> list[str]:
    """List the keys without effect, or in conflict, where the optimizer reduces gradients itself."""
    stage, travel = config.zero_optimization.stage, config.communication_data_type
    conflicts = {
        f"zero_optimization.stage = {stage} shards its state": stage > 0,
        f"communication_data_type = {travel} speaks of gradients that do not travel": travel is not None,
        "sparse_gradients = true speaks of gradients that do not travel": config.sparse_gradients,
        "prescale_gradients = true speaks of sums that are not made": config.prescale_gradients,
        "gradient_predivide_factor speaks of sums that are not made": config.gradient_predivide_factor != 1.0,
        "bf16.bf16_optimizer_states = true would make its state narrow": config.bf16.bf16_optimizer_states,
    }
    return [text for text, active in conflicts.items() if active]


def _given(config: Config) -> list[str]:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return [name for name in names if getattr(config, name) is not None]


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
    errors += [
        PlanError(rule.message(config, mesh), code=rule.code, fix=rule.fix)
        for rule in RULES
        if rule.broken(config, mesh)
    ]
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
