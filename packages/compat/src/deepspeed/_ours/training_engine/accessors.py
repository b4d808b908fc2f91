"""Methods and properties of the engine that only tell something: name -> what it tells."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from deepspeed._ours.base.forwarding import attributes_of
from deepspeed._ours.base.runtime_utils import EngineLayerDrop, aio_config
from deepspeed._ours.communication.expert_getters import (
    _get_expert_data_parallel_group_dict,
    _get_expert_parallel_group_dict,
)
from deepspeed._ours.monitor.wall_clock_timers import SynchronizedWallClockTimer
from deepspeed._ours.native_ops.accelerator_api import get_accelerator
from ds_engine.autotuning import AutotuningConfig
from ds_moe import MoE, MOELayer, TopKGate
from ds_zero.runtime.reduce_strategies import tables

Tells = Callable[[Any], Any]


# Keys of `autotuning`, told as "autotuning_" and the key.
_TUNING = ("start_profile_step", "end_profile_step", "metric")


def _gathers(section: Any) -> bool:
    # The key does nothing in ds-zero, which drops it; clients ask what the user wrote.
    names = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
    older = "stage3_gather_fp16_weights_on_model_save"
    return isinstance(section, Mapping) and any(section.get(name) is True for name in (*names, older))


def _layer_drop(engine: Any) -> EngineLayerDrop | None:
    rule = engine.plan.layer_drop
    return None if rule is None else EngineLayerDrop(rule.theta, rule.gamma, lambda: engine.global_steps)


def _offload_device(engine: Any) -> str:
    section = engine.plan.config.zero_optimization.offload_optimizer
    return "none" if section is None else str(section.device)


def _tag_validation(engine: Any) -> str:
    # As with gathering: the key has no effect, and clients ask what the user wrote.
    return str((engine.config.get("checkpoint") or {}).get("tag_validation", "Warn")).lower()


def _data_types(plan: Any) -> tuple[torch.dtype, torch.dtype]:
    """The parameters' format, and that of gradients while they are summed over microbatches: as the configuration says them."""
    config = plan.config
    params = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else torch.float32
    return params, config.data_types.grad_accum_dtype or params


def _tuning(key: str, engine: Any) -> Any:
    return getattr(engine.plan.config.autotuning or AutotuningConfig(), key)


def _scale_arguments(section: Any) -> dict[str, Any]:
    """Return the arguments of a DynamicLossScaler as the section `fp16` has them."""
    return {
        "init_scale": 2**section.initial_scale_power, "scale_window": section.loss_scale_window, "delayed_shift":
        section.hysteresis, "consecutive_hysteresis": section.consecutive_hysteresis, "min_scale": section.min_loss_scale,
    }  # fmt: skip


def _modules(engine: Any, kind: type) -> list[Any]:
    return [module for module in engine.module.modules() if isinstance(module, kind)]


ACCESSORS: Mapping[str, Tells] = {
    **attributes_of("methods"),
    "zero_optimization": lambda e: e.plan.config.zero_optimization.stage > 0,
    "zero_gather_16bit_weights_on_model_save": lambda e: _gathers(e.config.get("zero_optimization", {})),
    "zero_overlap_comm": lambda e: e.plan.config.zero_optimization.overlap_comm is not False,
    "dynamic_loss_scale": lambda e: e.plan.config.fp16.enabled and e.plan.config.fp16.loss_scale == 0,
    "initial_dynamic_scale": lambda e: 2**e.plan.config.fp16.initial_scale_power,
    "pld_theta": lambda e: getattr(e.plan.layer_drop, "theta", None),
    "pld_gamma": lambda e: getattr(e.plan.layer_drop, "gamma", None),
    "get_pld_theta": lambda e: None if (drop := _layer_drop(e)) is None else drop.get_theta(),
    "zero_cpu_offload": lambda e: _offload_device(e) == "cpu",
    "zero_nvme_offload_optimizer": lambda e: _offload_device(e) == "nvme",
    "zero_use_cpu_optimizer": lambda e: _offload_device(e) in ("cpu", "nvme"),
    "checkpoint_tag_validation_enabled": lambda e: _tag_validation(e) != "ignore",
    "checkpoint_tag_validation_fail": lambda e: _tag_validation(e) == "fail",
    "get_data_types": lambda e: _data_types(e.plan),
    "load_universal_checkpoint": lambda e: e.plan.universal,
    "use_node_local_storage": lambda e: False,
    "data_efficiency_enabled": lambda e: bool((e.config.get("data_efficiency") or {}).get("enabled", False)),
    "data_efficiency_config": lambda e: e.plan.config.data_efficiency.model_dump(mode="json"),
    "data_sampling_config": lambda e: e.plan.config.data_efficiency.data_sampling.model_dump(mode="json"),
    "curriculum_learning_config": lambda e: e.data_sampling_config()["curriculum_learning"],
    "curriculum_params_legacy": lambda e: e.config.get("curriculum_learning") or {},
    "random_ltd_config": lambda e: e.plan.config.data_efficiency.data_routing.random_ltd.model_dump(mode="json"),
    "flops_profiler_enabled": lambda e: bool((e.config.get("flops_profiler") or {}).get("enabled", False)),
    **{f"autotuning_{key}": partial(_tuning, key) for key in _TUNING},
    "autotuning_metric_path": lambda e: _tuning("metric_path", e) or os.path.abspath("autotuning_metric.json"),
    "autotuning_model_info_path": lambda e: (
        _tuning("model_info_path", e) or os.path.abspath("autotuning_model_info.json")
    ),
    "autotuning_profile_model_info": lambda e: e.plan.tuning is not None and _tuning("model_info", e).profile,
    "aio_config": lambda e: aio_config(e.config),
    "dynamic_loss_scale_args": lambda e: _scale_arguments(e.plan.config.fp16),
    "autotp_size": lambda e: 0 if e.plan.config.tensor_parallel is None else e.plan.config.tensor_parallel.autotp_size,
    "get_type": lambda e: [type(e.basic_optimizer).__name__ for _ in e.get_lr()],
    "get_wall_clock_timers": lambda e: dict(e._telemetry.times),
    "get_compile_time": lambda e: 0.0 if e.compiled.session is None else e.compiled.session.seconds,
}
"""Methods without arguments that only tell something: name -> what it tells. Those that tell what lies at a path: `attributes.toml`."""

PROPERTIES: Mapping[str, Tells] = {
    **attributes_of("properties"),
    "basic_optimizer": lambda e: None if e.optimizer is None else e.optimizer.inner,
    "local_rank": lambda e: int(os.environ.get("LOCAL_RANK", "0")),
    "seq_parallel_group": lambda e: e.mesh["sequence"].pg if e.mesh["sequence"].size > 1 else None,
    "expert_parallel_group": lambda e: _get_expert_parallel_group_dict(),
    "expert_data_parallel_group": lambda e: _get_expert_data_parallel_group_dict(),
    "num_experts": lambda e: [layer.num_experts for layer in _modules(e, MoE)],
    "gate_modules": lambda e: _modules(e, TopKGate),
    "moe_layers": lambda e: _modules(e, MOELayer),
    "sparse_tensor_module_names": lambda e: set(tables(e.module)) if e.plan.sharding.sparse else set(),
    "param_names": lambda e: {param: name for name, param in e.module.named_parameters()},
    "progressive_layer_drop": _layer_drop,
    "timers": lambda e: e.__dict__.setdefault("_named_timers", SynchronizedWallClockTimer()),
    "losses": lambda e: None,  # upstream's is never written either
    "gradient_average": lambda e: e.plan.config.gradient_allreduce_op == "mean",
    "dist_backend": lambda e: get_accelerator().communication_backend_name(),
}
"""Ranks, groups, formats and layers under upstream's names."""


OF_STAGES: Mapping[str, Tells] = {
    "pipeline_enable_backward_allreduce": lambda e: True,
    "micro_batches": lambda e: e.gradient_accumulation_steps(),
    "micro_batch_size": lambda e: e.train_micro_batch_size_per_gpu(),
    "prev_stage": lambda e: e.stage_id - 1,
    "next_stage": lambda e: e.stage_id + 1,
    "is_pipe_parallel": lambda e: e.grid.pipe_parallel_size > 1,
    "is_data_parallel": lambda e: e.grid.data_parallel_size > 1,
    "is_model_parallel": lambda e: e.grid.model_parallel_size > 1,
    "dynamic_shape": lambda e: True,
}
"""What an engine of stages tells besides."""


def add_accessors(
    kind: type, methods: Mapping[str, Tells] = ACCESSORS, properties: Mapping[str, Tells] = PROPERTIES
) -> None:
    """Give an engine's class the methods and properties of the tables."""
    for name, tells in methods.items():
        type.__setattr__(kind, name, _method(kind, name, tells))  # the class warns of what others set
    for name, tells in properties.items():
        type.__setattr__(kind, name, property(_method(kind, name, tells)))


def _method(kind: type, name: str, tells: Tells) -> Tells:
    def accessor(self: Any) -> Any:
        return tells(self)

    accessor.__name__ = name
    accessor.__qualname__ = f"{kind.__name__}.{name}"
    return accessor
