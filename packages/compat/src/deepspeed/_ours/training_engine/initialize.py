"""`deepspeed.initialize` and the other functions at the top of the package."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from deepspeed._ours.base.raising import raising, refused
from deepspeed._ours.base.version import version
from deepspeed._ours.communication import group_getters
from deepspeed._ours.communication.comm import TORCH_DISTRIBUTED_DEFAULT_PORT, init_distributed
from deepspeed._ours.config.accepted_keys import accepted, section_of
from deepspeed._ours.config.config import get_log_level, raw_config
from deepspeed._ours.config.section_models import get_zero_config
from deepspeed._ours.monitor.upstream_logging import logger, set_log_level_from_string, tell_steps
from deepspeed._ours.native_ops.quantized_layers import is_quantized
from deepspeed._ours.optimizers.optimizer_classes import dress_optimizer
from deepspeed._ours.parallel.autoep_layer import dress_blocks, settle_blocks
from deepspeed._ours.parallel.tp_layers import collect_autotp_universal_checkpoint_info, dress, set_autotp_mode
from deepspeed._ours.training_engine.deepspeed_engine import DeepSpeedEngine
from deepspeed._ours.training_engine.hybrid import DeepSpeedHybridEngine
from deepspeed._ours.training_engine.pipeline import PipelineEngine
from deepspeed._ours.zero.comm_dtypes import mark_comm_dtypes
from deepspeed._ours.zero.module_marks import mark_leaf_modules
from deepspeed._ours.zero.params import is_zero_param
from deepspeed._ours.zero.zero_api import restore_init_context, shutdown_init_context
from deepspeed._ours.zero.zero_optimizer import DeepSpeedZeroOptimizer
from ds_comm import as_group, world_group
from ds_config.config_file import Source
from ds_config.errors import ConfigError, PlanError
from ds_data.token_dropping import is_converted
from ds_engine import Plan, load_config, make_plan
from ds_engine.builder import InitArgs, assemble, check_model, shapes_of, slices_of
from ds_engine.config import Config
from ds_engine.config_sections import MuonSection
from ds_engine.init_args import say_overridden
from ds_engine.loader import ResumableLoader
from ds_engine.mixed_precision import precision_of
from ds_engine.parallel_degrees import degrees_of, with_degrees
from ds_engine.rank_config import check_configuration
from ds_engine.transforms.token_routing import RandomLTD
from ds_inference import InferenceConfig
from ds_parallel.config import TensorParallelConfig
from ds_parallel.sequence.hf_attention import SequenceRanks
from ds_parallel.tensor import facts_of
from ds_zero.runtime.sharded_model import end_sharding

_ASKED = "_ds_tensor_parallel"

DeepSpeedOptimizerCallable = Callable[[Iterable[Any]], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]


@raising(AssertionError)
def initialize(
    args: argparse.Namespace | Mapping[str, Any] | None = None, model: nn.Module | None = None, optimizer:
    torch.optim.Optimizer | DeepSpeedOptimizerCallable | None = None, model_parameters: Iterable[Any] | None = None,
    training_data: Any = None, lr_scheduler: Any = None, distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, mpu:
    Any = None, dist_init_required: bool | None = None, collate_fn: Callable[[list[Any]], Any] | None = None, config:
    Source | None = None, mesh_param: tuple[int, int] | None = None, config_params: Source | None = None,
) -> tuple[DeepSpeedEngine, DeepSpeedZeroOptimizer | None, ResumableLoader | None, Any]:  # fmt: skip
    """Make an engine from a model and a configuration. Collective. See `ds_engine.initialize`.

    A model that another engine still holds is given back by that engine first.

    Raises:
        PlanError, ConfigError, UnsupportedError: before anything is changed. They are AssertionErrors, too, as upstream's are.
    """
    model = check_model(model)
    raw = raw_config(config, config_params, args)
    level = get_log_level(raw)
    if level is not None:
        set_log_level_from_string(level)
    request: _TpInitRequest | None = vars(model).get(_ASKED)
    # What is passed stands for the section, which may hold anything then ("auto" of Transformers' configurations).
    heeded = raw if optimizer is None else {key: value for key, value in raw.items() if key != "optimizer"}
    resolved = _with_asked(load_config(accepted(heeded)), request, mpu)
    _choose_device(args)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    shared = mpu.get_sequence_parallel_world_size() if hasattr(mpu, "get_sequence_parallel_world_size") else 1
    if shared > 1 and mesh_param is None and "sequence_parallel_size" not in resolved.model_fields_set:
        mesh_param = (world_group().size // shared, shared)
    resolved = with_degrees(resolved, mesh_param, None if _is_of_sequences(mpu, shared) else mpu, slices_of(model))
    if resolved.sequence_parallel_size > 1:
        _let_share(model)
    resolved = _clipped_as_upstream(_with_codes(_as_upstream_takes(resolved, model), model, optimizer))
    _check_buckets(raw)
    _check_host_optimizer(raw, resolved, optimizer)
    _check_untested_optimizer(raw, resolved, optimizer)
    overridden = section_of(raw, "optimizer").get("type")
    if optimizer is not None and overridden is not None and world_group().rank == 0:
        say_overridden(overridden)
    tell_steps()
    end_sharding(model)
    if resolved.zero_optimization.stage == 3:
        mark_leaf_modules(model, _zero_section(raw).leaf_module)
    resolved, counted = _with_own_batch(resolved, world_group().size)
    check_configuration(resolved, world_group())
    settle_blocks(model, degrees_of(resolved)["tensor"])
    shapes = replace(
        shapes_of(model, structure=degrees_of(resolved)["tensor"] > 1), formats=_own_formats(resolved, model)
    )
    plan = _as_upstream_at_stage_0(make_plan(resolved, shapes, world_group().size))
    if shared > 1 and not isinstance(mpu, SequenceRanks) and not hasattr(mpu, "initialize_sequence_parallel"):
        # Ranks of a sequence as Megatron has them: one loss of all tokens, of which each rank has the gradient of its own.
        plan = replace(plan, summed=max(plan.summed, shared))
    if counted is not None and world_group().rank == 0:
        logger.warning(
            "train_batch_size = %d: tensor-parallel ranks share their samples, so a step is %s here; DeepSpeed counts every rank "
            "as if it had samples of its own, and updates more often",
            counted,
            plan.batch,
        )
    chosen = plan.reading.curriculum is not None or plan.reading.batching is not None
    data = training_data if chosen else None
    parts = InitArgs(optimizer, model_parameters, lr_scheduler, data, collate_fn, DeepSpeedZeroOptimizer, True)
    shutdown_init_context()
    try:
        plain = DeepSpeedEngine if plan.answer_tokens is None else DeepSpeedHybridEngine
        engine_class = PipelineEngine if plan.staging is not None else plain
        engine = engine_class(plan, assemble(plan, model, parts), raw)
    finally:
        restore_init_context()
    if training_data is not None and not chosen:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    engine.client_optimizer, engine.client_lr_scheduler = optimizer, lr_scheduler
    engine.training_data, engine.collate_fn = training_data, collate_fn
    engine.mpu = engine.grid if isinstance(engine, PipelineEngine) else mpu
    mark_comm_dtypes(engine.module, plan.precision)
    _note_layers(engine, model, request)
    if engine.follower(RandomLTD) is not None and not is_converted(engine.module) and world_group().rank == 0:
        logger.warning("random_ltd: all layers see all tokens until convert_to_random_ltd(engine, the layers' class)")
    offload = resolved.zero_optimization.offload_optimizer
    if optimizer is None and engine.optimizer is not None:
        dress_optimizer(engine.optimizer.inner, offload is not None and offload.device != "none")
    if world_group().rank == 0 and logger.isEnabledFor(logging.INFO):
        logger.info("DeepSpeed info: version=%s, git-hash=ds, git-branch=ds; plan:\n%s", version, plan)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler  # type: ignore[return-value]


def _zero_section(raw: Mapping[str, Any]) -> Any:
    """Return the section `zero_optimization` as upstream's model reads it.

    Raises:
        ConfigError: a value that upstream refuses, of a key without effect here, too ("config-value").
    """
    try:
        return get_zero_config(raw)
    except ValidationError as error:
        wrong = [
            (".".join(("zero_optimization", *map(str, one["loc"]))), one["msg"], one["input"]) for one in error.errors()
        ]
        raise ConfigError(
            "; ".join(f"{key}: {message}, got {repr(value)[:200]}" for key, message, value in wrong),
            code="config-value",
            fix=f"Correct {', '.join(key for key, *_ in wrong)}, or leave it out.",
        ) from error


def _as_upstream_takes(config: Config, model: nn.Module) -> Config:
    """Return the configuration with buffers in the parameters' 16 bits where the model has running statistics, unless it says theirs.

    Other models keep their buffers' format, as upstream's: tables of rotations and counters lose much in 16 bits. Running statistics have
    the format of their weights, without which such a model does not run. `sparse_attention` is left out where the model's attention is its own: upstream only hands the
    section to the model's author.
    """
    compute_dtype = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else None
    of_transformers = any(type(module).__module__.startswith("transformers.") for module in model.modules())
    running = any(getattr(module, "running_mean", None) is not None for module in model.modules())
    if compute_dtype is not None and config.data_types.buffer_dtype is None and running:
        config = config.model_copy(
            update={"data_types": config.data_types.model_copy(update={"buffer_dtype": compute_dtype})}
        )
    if config.sparse_attention is not None and not of_transformers:
        logger.warning(
            "sparse_attention does nothing here and was left out: the attention of %s is its own", type(model).__name__
        )
        config = config.model_copy(update={"sparse_attention": None})
    return config


def _with_codes(config: Config, model: nn.Module, optimizer: Any) -> Config:
    """Return the configuration without `weight_quantization` if the model's layers have codes.

    They do after `_init_group_wise_weight_quantization`; and `quantized_initialization` of a model that nothing trains makes them here.
    """
    section = config.weight_quantization
    if section is None or not section.enabled:
        return config
    initial = section.quantized_initialization if optimizer is None and config.optimizer is None else None
    coded = is_quantized(model, None if initial is None else initial.model_dump() | {"group_dim": 1})
    return config.model_copy(update={"weight_quantization": None}) if coded else config


def _as_upstream_at_stage_0(plan: Plan) -> Plan:
    """Return the plan of stage 0 with upstream's precision: a loss scale that falls at every overflow, and gradients in bf16 that stay in `param.grad`.

    Unless `grad_accum_dtype` says theirs: those of fp32 beside weights of bf16 are no `param.grad`.
    """
    precision = plan.precision
    if plan.config.zero_optimization.stage != 0:
        return plan
    if precision.scale is not None:
        precision = replace(precision, scale=replace(precision.scale, hysteresis=1))
    if precision.param is torch.bfloat16 and precision.accumulate is None and plan.staging is None:
        precision = replace(precision, accumulate=torch.bfloat16)
    return replace(plan, precision=precision)


def _own_formats(config: Config, model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the formats of parameters beside those that were made inside `zero.Init`, which upstream does not cast: fp32 adapters of PEFT.

    A rule stands for the same parameter of all layers. Empty for a model of which nothing was made inside, and where parameters of
    several formats would be trained, which upstream refuses: a head beside a body, as DeepSpeed-Chat's reward models have it.
    """
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    if len({param.dtype for param in model.parameters() if param.requires_grad}) > 1:
        return ()
    low = precision_of(config).param
    inside = {name for name, param in model.named_parameters() if is_zero_param(param)}
    rules: dict[str, str] = {}
    for name in dtypes.keys() - inside if inside and low is not None else ():
        dtype = dtypes[name]
        if dtype == low or not dtype.is_floating_point:
            continue
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", re.sub(r"([\[?*])", r"[\1]", name))
        alike = all(other == dtype for known, other in dtypes.items() if fnmatchcase(known, pattern))
        rules[pattern if alike else name] = str(dtype).removeprefix("torch.")
    return tuple(sorted(rules.items()))


def _check_buckets(raw: Mapping[str, Any]) -> None:
    """Raise ConfigError if `allgather_bucket_size` is odd at stage 1 or 2, as upstream does.

    Nothing here reads the size.
    """
    zero = section_of(raw, "zero_optimization")
    size = zero.get("allgather_bucket_size", 2)
    if zero.get("stage") in (1, 2) and isinstance(size, int) and size % 2:
        raise refused("odd-bucket", size - 1)


def _check_host_optimizer(raw: Mapping[str, Any], config: Config, optimizer: Any) -> None:
    """Raise ConfigError if the state of a foreign optimizer is offloaded although the configuration forbids that.

    Every optimizer works with offloaded state; only `zero_force_ds_cpu_optimizer = true` refuses.
    """
    offload = config.zero_optimization.offload_optimizer
    if raw.get("zero_force_ds_cpu_optimizer") is not True or offload is None or offload.device == "none":
        return
    if isinstance(optimizer, torch.optim.Optimizer) and not type(optimizer).__module__.startswith("ds_ops"):
        raise refused("host-optimizer", type(optimizer).__name__)


def _check_untested_optimizer(raw: Mapping[str, Any], config: Config, optimizer: Any) -> None:
    """Raise ConfigError if a foreign optimizer is used with ZeRO although the configuration forbids that.

    Any optimizer works that has no state across parameters; only `zero_allow_untested_optimizer = false` refuses.
    """
    if raw.get("zero_allow_untested_optimizer") is not False or config.zero_optimization.stage == 0:
        return
    home = type(optimizer).__module__.partition(".")[0]
    if isinstance(optimizer, torch.optim.Optimizer) and home not in ("torch", "ds_ops", "deepspeed"):
        raise refused(
            "untested-optimizer", config.zero_optimization.stage, type(optimizer).__name__, type(optimizer).__module__
        )


def _clipped_as_upstream(config: Config) -> Config:
    """Return the configuration with Muon's directions clipped where upstream's stages 1 to 3 do it, unless it says which.

    Its optimizer of stage 1 for weights in bf16 and sums in fp32, on the device, clips gradients, as stage 0.
    """
    section, zero, formats = config.optimizer, config.zero_optimization, precision_of(config)
    wide = (formats.param, formats.accumulate) == (torch.bfloat16, torch.float32)
    offloaded = zero.offload_optimizer is not None and zero.offload_optimizer.device != "none"
    if zero.stage == 0 or (zero.stage == 1 and wide and not offloaded):
        return config
    if not isinstance(section, MuonSection) or "clip_directions" in section.params.model_fields_set:
        return config
    params = section.params.model_copy(update={"clip_directions": True})
    return config.model_copy(update={"optimizer": section.model_copy(update={"params": params})})


def _is_of_sequences(mpu: Any, shared: int) -> bool:
    """Whether what `mpu` calls model parallelism is sequences (deepspeed.runtime.sequence_parallel.parallel_state_sp)."""
    of_models = getattr(mpu, "get_model_parallel_world_size", None)
    return (
        shared > 1
        and of_models is not None
        and not hasattr(mpu, "get_tensor_model_parallel_world_size")
        and of_models() == shared
    )


def _let_share(model: nn.Module) -> None:
    """Mark a model of no known attention as sequence-parallel, with a warning, as upstream assumes for every model."""
    facts = facts_of(model, structure=False)
    if facts is not None and not facts.shares_sequences and not facts.attention:
        logger.warning(
            "ranks share sequences, and nothing in %s says that it exchanges over them: it is taken to do so by itself, or to need none",
            type(model).__name__,
        )
        model.shares_sequences = True  # type: ignore[assignment]


def _choose_device(args: Any) -> None:
    rank = args.get("device_rank") if isinstance(args, Mapping) else getattr(args, "device_rank", None)
    if rank is not None and int(rank) >= 0:
        os.environ.setdefault("LOCAL_RANK", str(int(rank)))


@dataclass(frozen=True, slots=True)
class _TpInitRequest:
    """What `tp_model_init` was told of a model."""

    size: int
    dtype: torch.dtype
    group: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _TpInitRequest, (self.size, self.dtype)  # a copy of the model is cut over the same number of ranks


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, *, tp_group: Any = None, **options: Any,
) -> nn.Module:  # fmt: skip
    """Note that `model` is to be cut over `tp_size` ranks, in `dtype`; `initialize` cuts it.

    Args:
        config: Its `tensor_parallel` section is the one of `initialize`; nothing is read from it here.
        tp_group: torch's group that the ranks are expected to be: neighbours, `tp_size` of them.
    Raises:
        UnsupportedError: an option that is not known ("compat-missing").
    """
    del config
    unknown = sorted(key for key, value in options.items() if value is not None)
    if unknown:
        raise refused("tp-init-options", ", ".join(unknown))
    model.__dict__[_ASKED] = _TpInitRequest(tp_size, dtype, tp_group)
    set_autotp_mode(training=True)
    return model.to(dtype)


def _with_asked(config: Config, request: _TpInitRequest | None, mpu: Any) -> Config:
    """Return the configuration with the tensor-parallel degree that `tp_model_init` noted."""
    if request is None:
        return config
    section = config.tensor_parallel
    if request.group is not None and mpu is not None:
        raise _conflict("tp_model_init provided tp_group, and initialize was given an mpu", "Leave one of them out.")
    if section is not None and section.degree not in (1, request.size):
        raise _conflict(
            f"tp_model_init(tp_size={request.size}), and the configuration says tensor_parallel.autotp_size = {section.degree}",
            "Give the number of tensor-parallel ranks in one place.",
        )
    formats = {torch.float16: config.fp16.enabled, torch.bfloat16: config.bf16.enabled}
    config_dtype = next((dtype for dtype, on in formats.items() if on), None)
    if config_dtype is not None and config_dtype != request.dtype:
        raise _conflict(
            f"Conflicting dtype: tp_model_init(dtype={request.dtype}), and the configuration says {config_dtype}",
            "Give the same format in both places.",
        )
    updated = (section or TensorParallelConfig()).model_copy(update={"autotp_size": request.size})
    return config.model_copy(update={"tensor_parallel": updated})


def _with_own_batch(config: Config, world: int) -> tuple[Config, int | None]:
    """Return the configuration without a train batch size that counts tensor-parallel ranks; and that size, if any.

    Upstream's arithmetic, train = micro x accumulation x all ranks, holds for a program that gives all three: a step
    has as many
    microbatches as the program requested.
    """
    degrees = degrees_of(config)
    train, micro, steps = (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )
    if degrees["tensor"] == 1 or not isinstance(train, int):
        return config, None
    apart = world // (degrees["pipe"] * degrees["sequence"])
    if isinstance(micro, int) and isinstance(steps, int) and train == micro * steps * apart:
        return config.model_copy(update={"train_batch_size": None}), train
    return config, train


def _conflict(message: str, fix: str) -> PlanError:
    return PlanError(message, code="tensor-sizes", fix=fix)


def _note_layers(engine: DeepSpeedEngine, model: nn.Module, request: _TpInitRequest | None) -> None:
    """Let `groups` and the classes of layers say what became of the model."""
    group_getters.share_layers(engine.mesh)
    group_getters.share_gathered(engine.mesh, max(1, engine.plan.config.zero_optimization.zero_hpz_partition_size))
    dress_blocks(model, engine.mesh)
    if engine.mesh["tensor"].size == 1:
        return
    set_autotp_mode(training=True)
    dress(model)
    # Models of Megatron-DeepSpeed have a method of this name, which says it of the layers that the program has cut.
    if not hasattr(model, "universal_checkpoint_info"):
        model.__dict__["universal_checkpoint_info"] = collect_autotp_universal_checkpoint_info(model)
    ours = engine.mesh["tensor"].ranks
    if request is not None and request.group is not None and as_group(request.group).ranks != ours:
        raise _conflict(
            f"tp_model_init(tp_group=ranks {list(as_group(request.group).ranks)}), and layers are cut over {list(ours)}",
            "Leave tp_group out: tensor-parallel ranks are neighbours.",
        )


def default_inference_config() -> dict[str, Any]:
    """Return every key of `init_inference` with its default."""
    return InferenceConfig().model_dump()
