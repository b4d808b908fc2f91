"""The surface: every public name of DeepSpeed 0.19.8 that clients use or its documentation names, and what it is here.

A row is `"module:attribute"` (`"module:"` for the module itself), or `Missing` with the reason and what to use instead.
The modules of this package are made from this table (`deepspeed._finder`); docs/reference/deepspeed-surface.md is made
from it; a name that is in neither place does not exist. Constants that only name configuration keys are left out: the keys
are in docs/reference/configuration.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MISSING_ATTRIBUTES", "SURFACE", "Missing", "Rows"]


@dataclass(frozen=True, slots=True)
class Missing:
    """A name that exists upstream and not here.

    Attributes:
        why: The reason, as the second half of "NAME is not here: ...".
        instead: What to use.
    """

    why: str
    instead: str


Rows = Mapping[str, "str | Missing"]


def _from(home: str, *names: str, **renamed: str) -> dict[str, str]:
    """Rows of names that have the same name in `home`, and of those that have another there."""
    return {name: f"{home}:{name}" for name in names} | {name: f"{home}:{there}" for name, there in renamed.items()}


def _not(missing: Missing, *names: str) -> dict[str, Missing]:
    return dict.fromkeys(names, missing)


# ---- why not ---------------------------------------------------------------------------------------------------------

_INFERENCE = Missing(
    "layers are not replaced by class", "deepspeed.init_inference(model, replace_with_kernel_inject=True)"
)
_HYBRID = Missing("the engine that trains needs no other class to generate", "ds_engine.Rollout(engine)")
_SERIAL = Missing("engines are read from the folders of save_pretrained", "build_hf_engine")
_PIPELINE = Missing("pipeline stages are not built yet", "ZeRO stage 3, which needs no stages")
_MOE = Missing("ds-moe is not built yet", "the model's own expert layers; ZeRO shards them as any module")
_TENSOR = Missing("tensor parallelism is not built yet", "ZeRO stage 3")
_SEQUENCE = Missing("sequence parallelism is not built yet", "activation checkpointing, or a shorter sequence per rank")
_DATA = Missing("ds-data is not built yet", "a sampler of your own, passed as data_iter or with your DataLoader")
_COMPRESS = Missing("ds-compress is not built yet", "torch.ao.quantization")
_TUNING = Missing("there is no autotuner yet", "`ds plan`, which computes what fits before anything runs")
_TRANSFORMER = Missing("the fused BERT layer was not carried over", "torch.nn.TransformerEncoderLayer")
_COMPILE = Missing("compile passes are not built yet", "torch.compile on the blocks of the model")
_BUILDERS = Missing(
    "operations are compiled when the package is built, or by a command",
    "`ds doctor`, which lists them; `ds ops build`",
)
_IO = Missing("upstream's file classes are not here", "ds_ops.io, or the `checkpoint` section of the configuration")
_LORA = Missing("upstream's own LoRA layers are not here", "peft")
_TIERS = Missing("the class exists for offloaded ZenFlow only", "DeepSpeedCPUAdam")
_RETURN_BIAS = Missing("layers that return their bias belong to Megatron", "deepspeed.zero.TiledLinear")
_MICS = Missing(
    "ds-zero cuts for replicas, too", "mics_shard_size of the configuration, or ds_zero.shard(shard_size=...)"
)
_INTERNAL = Missing("it belongs to the inside of upstream's engine", "the engine's own methods")
_ELASTIC = Missing("it is gone in 0.19.8 too", "the `elasticity` section of the configuration")

_MONITOR = Missing(
    "monitoring is ds-monitor's", "ds_monitor.gauge; the sections of the configuration choose where it goes"
)
_TIMERS = Missing("the engine keeps no timers", "wall_clock_breakdown of the configuration, or ds_monitor.span")

MISSING_ATTRIBUTES: Mapping[str, Missing] = {
    "monitor": _MONITOR,
    "get_summary_writer": _MONITOR,
    "tensorboard_enabled": _MONITOR,
    "timers": _TIMERS,
    "tput_timer": _TIMERS,
    "flops_profiler": Missing("the section of the configuration runs it", "deepspeed.profiling.flops_profiler"),
    "checkpoint_engine": Missing("checkpoints are ds-ckpt's", "save_checkpoint and load_checkpoint"),
    "curriculum_scheduler": _DATA,
    "data_sampler": _DATA,
    "random_ltd_scheduler": _DATA,
    "set_custom_curriculum_learning_schedule": _DATA,
    "set_data_post_process_func": _DATA,
    "compression_scheduler": _COMPRESS,
    "quantizer": _COMPRESS,
    "has_moe_layers": _MOE,
    "sequence_parallel_size": _SEQUENCE,
}
"""Attributes of upstream's engine that this one does not have."""

# ---- groups of rows --------------------------------------------------------------------------------------------------

_ZERO = "deepspeed._ours.zero"
_PARAMS = "deepspeed._ours.params"
_TOOLS = "deepspeed._ours.tools"
_COMM = "deepspeed._ours.comm"
_GROUPS = "deepspeed._ours.groups"
_VERSION = "deepspeed._ours.version"
_SCHEDULES = "deepspeed._ours.schedules"
_OPTIMIZERS = "deepspeed._ours.optimizers"
_ACTIVATIONS = "deepspeed._ours.activations"

_ACCESS = _from(
    "ds_zero",
    *(f"safe_{verb}_{reach}_{what}"
      for verb in ("get", "set") for reach in ("full", "local") for what in ("fp32_param", "grad", "optimizer_state")),
    "safe_update_full_grad_vectorized",
)  # fmt: skip
_FRAGMENTS = _not(
    _INTERNAL, "fragment_address", "get_full_hp_grad", "get_full_hp_param", "get_hp_fragment_mapping", "link_hp_params",
    "lazy_init_hp_params_optimizer_state", "map_to_flat_opt_states", "set_full_hp_grad", "set_full_hp_param",
)  # fmt: skip
_LEAVES = _from(
    _TOOLS, "get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter",
)  # fmt: skip
_LOGGING = _from(_TOOLS, "log_dist", "log_dist_once", "logger", "set_log_level_from_string")
_GROUP_GETTERS = _from(
    _GROUPS, "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size",
    "get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size",
    "get_tensor_model_parallel_group", "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size",
)  # fmt: skip
_PRIVATE_GROUP_GETTERS = _from(
    _GROUPS, "_get_data_parallel_group", "_get_data_parallel_rank", "_get_data_parallel_world_size",
    "_get_model_parallel_world_size", "_get_sequence_data_parallel_group", "_get_sequence_data_parallel_rank",
    "_get_sequence_data_parallel_world_size", "_get_sequence_parallel_group", "_get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size", "_get_world_group",
)  # fmt: skip
_EXPERT_GROUPS = _not(
    _MOE, "_get_expert_data_parallel_group", "_get_expert_parallel_group", "_get_max_expert_size", "initialize",
    "expert_tensor_parallel_world_size",
)  # fmt: skip
_ZERO_ROWS: dict[str, str | Missing] = {
    **_from(
        _ZERO,
        "GatheredParameters",
        "Init",
        "MiCS_Init",
        "TiledLinear",
        "register_external_parameter",
        "unregister_external_parameter",
    ),
    **_from("ds_zero", "unwrap_model_for_generation"),
    **_from(_PARAMS, "ZeroParamStatus", "ZeroParamType"),
    **_not(_RETURN_BIAS, "TiledLinearReturnBias"),
    **_not(_INTERNAL, "DeepSpeedTensorOverride", "DeepSpeedZeRoOffload"),
}
_ZERO_OPTIMIZER = "deepspeed._ours.optimizer:DeepSpeedZeroOptimizer"
_CHECKPOINTING: dict[str, str | Missing] = {
    **_from(
        _ACTIVATIONS, "CheckpointFunction", "CudaRNGStatesTracker", "_CUDA_RNG_STATE_TRACKER",
        "_MODEL_PARALLEL_RNG_TRACKER_NAME", "_set_cuda_rng_state", "checkpoint", "configure", "get_cuda_rng_tracker",
        "is_configured", "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed",
        "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset", "set_num_layers",
    ),
    **_not(
        Missing("checkpointed calls cut and gather their inputs themselves", "checkpoint"),
        "gather_partitioned_activations", "get_partitioned_activations_for_backward",
    ),
}  # fmt: skip
_COMM_ROWS: dict[str, str | Missing] = {
    **_from(
        _COMM, "ReduceOp", "ProcessGroup", "P2POp", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
        "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn", "barrier",
        "batch_isend_irecv", "broadcast", "broadcast_object_list", "configure", "destroy_process_group", "gather",
        "get_all_ranks_from_group", "get_global_rank", "get_local_rank", "get_rank", "get_world_group", "get_world_size",
        "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager", "has_reduce_scatter_tensor",
        "in_aml", "in_aws_sm", "in_dlts", "inference_all_reduce", "init_distributed", "irecv", "is_available", "is_initialized",
        "isend", "log_summary", "monitored_barrier", "mpi_discovery", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_fn",
        "reduce_scatter_tensor", "reset_log", "scatter", "send", "default_pg_timeout",
    ),
    **_from("deepspeed._ours.accelerator", "get_accelerator"),
    **_not(
        Missing("communication goes through torch.distributed; there is no object between", "init_distributed"),
        "init_deepspeed_backend", "set_backend", "TorchBackend", "CCLBackend", "cdb",
    ),
    **_not(
        Missing("device meshes are made from the configuration", "the keys of the configuration"),
        "initialize_mesh_device", "enable_symm_mem_for_group",
    ),
    **_not(
        Missing("the comms logger of ds-comm keeps its own table", "ds_comm.logger.CommsLogger"),
        "get_comm_operation_count", "get_logged_comm_ops", "has_comm_data", "CommsLogger",
    ),
}  # fmt: skip
_ENGINE = _from("deepspeed._ours.engine", "DeepSpeedEngine")
_ADAM = _from(_OPTIMIZERS, "DeepSpeedCPUAdam", "FusedAdam")
_FP32 = _from(
    "deepspeed._ours.weights", "convert_zero_checkpoint_to_fp32_state_dict", "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file", "get_optim_files", "load_state_dict_from_zero_checkpoint", "main",
)  # fmt: skip
_ESTIMATORS = {
    stage: _from(
        "deepspeed._ours.estimates",
        f"estimate_zero{stage}_model_states_mem_needs_all_cold",
        f"estimate_zero{stage}_model_states_mem_needs_all_live",
    )
    for stage in (2, 3)
}
_OFFLOAD = _from("deepspeed._ours.tiers", "OffloadDeviceEnum", "OffloadStateTypeEnum") | _from(
    "ds_zero.config",
    DeepSpeedZeroOffloadOptimizerConfig="OffloadOptimizerConfig",
    DeepSpeedZeroOffloadParamConfig="OffloadParamConfig",
)

_RAGGED: Rows = {
    **_from(
        "ds_inference", "build_hf_engine", InferenceEngineV2="RaggedEngine", RaggedInferenceEngineConfig="RaggedConfig"
    ),
    **_from("ds_inference.config", DeepSpeedTPConfig="TensorParallelConfig"),
    **_not(_SERIAL, "build_engine_from_ds_checkpoint"),
}

SURFACE: Mapping[str, Rows] = {
    "deepspeed": {
        **_from("deepspeed._ours.start", "add_config_arguments", "initialize", "tp_model_init"),
        **_from(_COMM, "init_distributed"),
        **_ENGINE,
        **_from("deepspeed._ours.optimizer", DeepSpeedOptimizer="DeepSpeedZeroOptimizer"),
        **_from("deepspeed._ours.start", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"),
        **_from("deepspeed._ours.config", "DeepSpeedConfig", "DeepSpeedConfigError"),
        **_from("ds_engine.loader", DeepSpeedDataLoader="ResumableLoader"),
        **_from("deepspeed._ours.accelerator", "get_accelerator"),
        **_from(_TOOLS, "OnDevice", "is_compile_supported", "log_dist", "logger"),
        **_from(_SCHEDULES, "add_tuning_arguments"),
        **_from(
            _VERSION, "__git_branch__", "__git_hash__", "__version__", "__version_major__", "__version_minor__",
            "__version_patch__", "git_branch", "git_hash", "version",
        ),
        **_from(_OPTIMIZERS, "ADAM_OPTIMIZER", "LAMB_OPTIMIZER", "MUON_OPTIMIZER"),
        **_from(_VERSION, "HAS_TRITON"),
        "zero": "deepspeed.zero:",
        "checkpointing": "deepspeed.checkpointing:",
        "dist": "deepspeed.comm:",
        **_not(_HYBRID, "DeepSpeedHybridEngine"),
        **_from("ds_inference", "InferenceEngine", "init_inference", DeepSpeedInferenceConfig="InferenceConfig"),
        **_from("deepspeed._ours.start", "default_inference_config"),
        **_not(_PIPELINE, "PipelineEngine", "PipelineModule"),
        **_not(_TRANSFORMER, "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"),
        **_not(_INFERENCE, "replace_transformer_layer", "revert_transformer_layer"),
        **_not(_TENSOR, "set_autotp_mode"),
        **_not(Missing("Muon's parameters are chosen when its optimizer is made", "the optimizer section"), "set_optimizer_flags"),
    },
    # -- ZeRO
    "deepspeed.zero": _ZERO_ROWS,
    "deepspeed.runtime": {},
    "deepspeed.runtime.zero": _ZERO_ROWS,
    "deepspeed.runtime.zero.config": {
        **_from("ds_zero.config", DeepSpeedZeroConfig="ZeroConfig", DeepSpeedZeroLeafModuleConfig="LeafModuleConfig"),
        **_from("deepspeed._ours.tiers", "OffloadDeviceEnum", "ZeroStageEnum"),
        **_OFFLOAD,
        **_not(Missing("sections are read together", "DeepSpeedConfig"), "get_zero_config", "read_zero_config_deprecated"),
        **_not(_TIERS, "ZenFlowConfig"),
    },
    "deepspeed.runtime.zero.offload_config": _OFFLOAD,
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO_ROWS,
        **_from(_PARAMS, "is_zero_param"),
        **_from(_ZERO, "_orig_torch_arange", "restore_init_context", "shutdown_init_context", "zero_wrapper_for_fp_tensor_constructor"),
        **_from("deepspeed._ours.accelerator", "get_accelerator"),
        **_from(_TOOLS, "see_memory_usage"),
        **_not(
            _INTERNAL, "AllGatherCoalescedHandle", "AllGatherHandle", "InsertPostInitMethodToModuleSubClasses", "NoGatherHandle",
            "PartitionedParamStatus", "free_param",
        ),
    },
    "deepspeed.runtime.zero.stage_1_and_2": {"DeepSpeedZeroOptimizer": _ZERO_OPTIMIZER, **_ESTIMATORS[2]},
    "deepspeed.runtime.zero.stage3": {"DeepSpeedZeroOptimizer_Stage3": _ZERO_OPTIMIZER, **_ESTIMATORS[3]},
    "deepspeed.runtime.zero.parameter_offload": {**_not(_INTERNAL, "DeepSpeedZeRoOffload")},
    "deepspeed.runtime.zero.tiling": {**_from(_ZERO, "TiledLinear"), **_not(_RETURN_BIAS, "TiledLinearReturnBias")},
    "deepspeed.runtime.zero.utils": {
        **_from(_PARAMS, "is_zero_param"),
        **_from(_TOOLS, "is_zero_supported_optimizer"),
        **_from("deepspeed._ours.config", ZeRORuntimeException="DeepSpeedConfigError"),
    },
    "deepspeed.runtime.zero.mics": {**_from(_ZERO, "MiCS_Init"), **_not(_MICS, "MiCS_Optimizer", "MiCS_Offload", "MiCS_AllGatherCoalescedHandle")},
    "deepspeed.runtime.zero.muon": {**_not(Missing("Muon is one class here", "ds_ops.optim.Muon"), "MuonWithAuxAdam")},
    # -- engine
    "deepspeed.runtime.engine": {
        **_ENGINE,
        **_from("deepspeed._ours.saving", "clone_tensors_for_torch_save"),
        **_from(_OPTIMIZERS, "ADAM_OPTIMIZER", "LAMB_OPTIMIZER", "MUON_OPTIMIZER"),
    },
    "deepspeed.runtime.base_optimizer": {
        "DeepSpeedOptimizer": _ZERO_OPTIMIZER,
        "ZeROOptimizer": _ZERO_OPTIMIZER,
        **_not(_INTERNAL, "BackwardHookStateManager"),
    },
    "deepspeed.runtime.bf16_optimizer": {"BF16_Optimizer": _ZERO_OPTIMIZER},
    "deepspeed.runtime.fp16": {},
    "deepspeed.runtime.fp16.fused_optimizer": {"FP16_Optimizer": _ZERO_OPTIMIZER},
    "deepspeed.runtime.fp16.unfused_optimizer": {"FP16_UnfusedOptimizer": _ZERO_OPTIMIZER},
    "deepspeed.runtime.fp16.loss_scaler": {
        **_not(
            Missing("loss scaling belongs to ds-zero", "the fp16 section, and ds_zero.LossScale"),
            "CreateLossScaler", "DynamicLossScaler", "LossScaler", "LossScalerBase",
        ),
    },
    "deepspeed.runtime.fp16.onebit": _from("ds_comm.onebit", "OnebitAdam", "OnebitLamb", "ZeroOneAdam"),
    "deepspeed.runtime.config": _from("deepspeed._ours.config", "DeepSpeedConfig", "DeepSpeedConfigError"),
    "deepspeed.runtime.config_utils": {
        **_from("deepspeed._ours.config", "dict_raise_error_on_duplicate_keys"),
        **_from("ds_config", DeepSpeedConfigModel="StrictModel"),
    },
    "deepspeed.runtime.dataloader": {
        **_from("ds_engine.loader", DeepSpeedDataLoader="ResumableLoader"),
        **_from(_TOOLS, "RepeatingLoader"),
    },
    "deepspeed.runtime.lr_schedules": _from(
        _SCHEDULES, "LRRangeTest", "OneCycle", "VALID_LR_SCHEDULES", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR",
        "add_tuning_arguments", "LR_SCHEDULE", "LR_RANGE_TEST", "ONE_CYCLE", "WARMUP_LR", "WARMUP_DECAY_LR", "WARMUP_COSINE_LR",
    ),
    "deepspeed.runtime.utils": {
        **_from(
            _TOOLS, "call_to_str", "clip_grad_norm_", "empty_cache", "memory_status", "move_to_device", "noop_decorator",
            "partition_balanced", "partition_uniform", "see_memory_usage", "set_random_seed",
        ),
        **_not(_PIPELINE, "PartitionedTensor"),
        **_not(_INTERNAL, "CheckOverflow", "DummyOptim", "get_global_norm", "get_grad_zeros", "get_weight_norm"),
    },
    "deepspeed.runtime.constants": _from(_OPTIMIZERS, "ROUTE_EVAL", "ROUTE_PREDICT", "ROUTE_TRAIN"),
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.activation_checkpointing.offload_activations": {
        **_not(
            Missing("saved tensors are moved by torch itself", "torch.autograd.graph.save_on_cpu"),
            "CheckpointHiddenStatesOffload", "get_checkpoint_hidden_states_offloading_ctx_manager",
        ),
    },
    "deepspeed.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.checkpoint_engine": _from("deepspeed._ours.saving", "TorchCheckpointEngine"),
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": _from("deepspeed._ours.saving", "TorchCheckpointEngine"),
    # -- optimizers and operations
    "deepspeed.ops": {
        **_from(_OPTIMIZERS, "__compatible_ops__"),
        **_not(_TRANSFORMER, "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"),
    },
    "deepspeed.ops.adam": {
        **_ADAM, **_not(_TIERS, "ZenFlowCPUAdam", "ZenFlowSelectiveAdamW", "ZenFlowSelectiveAdamW_stage3"),
    },
    "deepspeed.ops.adam.cpu_adam": _from(_OPTIMIZERS, "DeepSpeedCPUAdam"),
    "deepspeed.ops.adam.fused_adam": _from(_OPTIMIZERS, "FusedAdam"),
    "deepspeed.ops.adagrad": _from(_OPTIMIZERS, "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.lion": _from(_OPTIMIZERS, "DeepSpeedCPULion", "FusedLion"),
    "deepspeed.ops.lamb": _from(_OPTIMIZERS, "FusedLamb"),
    "deepspeed.ops.aio": _from(_OPTIMIZERS, "AsyncIOBuilder"),
    "deepspeed.ops.op_builder": {
        **_from(_OPTIMIZERS, "AsyncIOBuilder"),
        **_not(_BUILDERS, "CPUAdamBuilder", "FusedAdamBuilder", "InferenceBuilder", "OpBuilder", "UtilsBuilder"),
    },
    "deepspeed.ops.op_builder.builder": {**_not(_BUILDERS, "OpBuilder")},
    "deepspeed.ops.transformer": {**_not(_TRANSFORMER, "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer")},
    "deepspeed.ops.sparse_attention": {
        **_not(
            Missing("its classes are gone in 0.19.8 too", "ds_ops.sparse_attention, which has the same patterns"),
            "BSLongformerSparsityConfig", "BigBirdSparsityConfig", "FixedSparsityConfig", "SparseSelfAttention",
            "SparsityConfig", "VariableSparsityConfig", "LocalSlidingWindowSparsityConfig", "sparsity_config",
        ),
    },
    # -- communication, device
    "deepspeed.comm": _COMM_ROWS,
    "deepspeed.comm.comm": _COMM_ROWS,
    "deepspeed.accelerator": {
        **_from(
            "deepspeed._ours.accelerator", "get_accelerator", "is_current_accelerator_supported", DeepSpeedAccelerator="FacadeAccelerator",
        ),
        **_not(Missing("devices are found, or registered by entry point", "the entry point group ds_accel.devices"), "set_accelerator"),
    },
    "deepspeed.accelerator.real_accelerator": _from("deepspeed._ours.accelerator", "get_accelerator"),
    # -- utilities
    "deepspeed.utils": {
        **_ACCESS, **_LEAVES, **_LOGGING, **_GROUP_GETTERS, **_FRAGMENTS, **_not(_MOE, "initialize"),
        **_from(_TOOLS, "OnDevice", "RepeatingLoader", "instrument_w_nvtx"),
        **_from("deepspeed._ours.accelerator", "get_accelerator"),
        "dist": "deepspeed.comm:",
        **_not(Missing("the launcher leaves binding to the system's own tool", "numactl or taskset under `ds run --no-python`"), "get_numactl_cmd"),
    },
    "deepspeed.utils.groups": {**_GROUP_GETTERS, **_PRIVATE_GROUP_GETTERS, **_EXPERT_GROUPS, **_from(_GROUPS, "mpu")},
    "deepspeed.utils.init_on_device": _from(_TOOLS, "OnDevice"),
    "deepspeed.utils.logging": {**_LOGGING, **_from(_TOOLS, "LoggerFactory", "warning_once", "print_json_dist", "log_levels")},
    "deepspeed.utils.nvtx": _from(_TOOLS, "instrument_w_nvtx"),
    "deepspeed.utils.tensor_fragment": {**_ACCESS, **_FRAGMENTS, **_not(_INTERNAL, "tensor_fragment")},
    "deepspeed.utils.timer": {
        **_from(
            "deepspeed._ours.timers", "BACKWARD_GLOBAL_TIMER", "BACKWARD_INNER_GLOBAL_TIMER", "BACKWARD_INNER_MICRO_TIMER",
            "BACKWARD_MICRO_TIMER", "BACKWARD_REDUCE_GLOBAL_TIMER", "BACKWARD_REDUCE_MICRO_TIMER", "FORWARD_GLOBAL_TIMER",
            "FORWARD_MICRO_TIMER", "NoopTimer", "STEP_GLOBAL_TIMER", "STEP_MICRO_TIMER", "SynchronizedWallClockTimer",
            "ThroughputTimer", "trim_mean",
        ),
    },
    "deepspeed.utils.z3_leaf_module": _LEAVES,
    "deepspeed.utils.zero_to_fp32": _FP32,
    "deepspeed.checkpoint": {
        **_from("deepspeed._ours.saving", "clone_tensors_for_torch_save"),
        **_not(
            Missing("checkpoints have no layout of their own here: every one resumes on any", "`ds ckpt convert`"),
            "DeepSpeedCheckpoint", "ORIGINAL_VOCAB_SIZE", "PADDED_VOCAB_SIZE", "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0",
            "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS", "PIPELINE_REPLICATED_PARAMETER_PATTERNS", "TP_REPLICATED_PARAMETER_PATTERNS",
            "UNIVERSAL_CHECKPOINT_INFO", "UNIVERSAL_CHECKPOINT_VERSION_KEY", "UNIVERSAL_CHECKPOINT_VERSION_VALUE",
            "VOCABULARY_PARAMETER_PATTERNS",
        ),
    },
    "deepspeed.checkpoint.utils": _from("deepspeed._ours.saving", "clone_tensors_for_torch_save"),
    "deepspeed.git_version_info": _from(_VERSION, "accelerator_name", "git_branch", "git_hash", "installed_ops", "torch_info", "version"),
    "deepspeed.constants": _from(_COMM, "TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout"),
    "deepspeed.env_report": _from("deepspeed._ours.commands", "cli_main", main="report"),
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {
        **_from("deepspeed._ours.commands", "DEEPSPEED_ENVIRONMENT_NAME", "DLTS_HOSTFILE", "EXPORT_ENVS", "fetch_hostfile", "main"),
        **_not(Missing("resources are filtered by the launcher", "`ds hosts --include/--exclude`"), "parse_inclusion_exclusion", "parse_resource_filter"),
    },
    # -- not here
    "deepspeed.pipe": {**_not(_PIPELINE, "LayerSpec", "PipelineModule", "TiedLayerSpec")},
    "deepspeed.runtime.pipe": {**_not(_PIPELINE, "LayerSpec", "PipelineModule", "TiedLayerSpec")},
    "deepspeed.runtime.pipe.engine": {**_ENGINE, **_not(_PIPELINE, "PipelineEngine")},
    "deepspeed.runtime.pipe.schedule": {
        **_not(
            _PIPELINE, "BackwardPass", "BufferOpInstruction", "ForwardPass", "LoadMicroBatch", "OptimizerStep", "PipeInstruction", "PipeSchedule",
            "RecvActivation", "RecvGrad", "ReduceGrads", "ReduceTiedGrads", "SendActivation", "SendGrad", "TrainSchedule",
        ),
    },
    "deepspeed.runtime.pipe.topology": {
        **_not(_PIPELINE, "PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"),
    },
    "deepspeed.moe": {**_not(_MOE, "layer", "utils", "sharded_moe", "experts", "mappings")},
    "deepspeed.moe.layer": {**_not(_MOE, "MoE", "Experts", "MOELayer", "TopKGate")},
    "deepspeed.moe.utils": {
        **_not(
            _MOE, "configure_moe_param_groups", "has_moe_layers", "is_moe_param", "is_moe_param_group",
            "split_params_into_different_moe_groups_for_optimizer", "split_params_into_shared_and_expert_params",
        ),
    },
    "deepspeed.moe.sharded_moe": {**_not(_MOE, "MOELayer", "TopKGate", "top1gating", "top2gating", "topkgating")},
    "deepspeed.module_inject": {**_not(_TENSOR, "layers", "auto_tp", "replace_transformer_layer", "revert_transformer_layer")},
    "deepspeed.module_inject.layers": {**_not(_TENSOR, "GatherReplacedLayerParams", "LinearAllreduce", "LinearLayer")},
    "deepspeed.sequence": {**_not(_SEQUENCE, "layer", "fpdt_layer", "cross_entropy", "auto_sp")},
    "deepspeed.sequence.layer": {**_not(_SEQUENCE, "DistributedAttention")},
    "deepspeed.sequence.fpdt_layer": {**_not(_SEQUENCE, "FPDT_Attention", "FPDT_FFN", "FPDT_InputConstruct", "FPDT_LogitsLoss")},
    "deepspeed.runtime.sequence_parallel": {**_not(_SEQUENCE, "ulysses_sp", "parallel_state_sp")},
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        **_not(
            _SEQUENCE, "SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "UlyssesSPAttentionHF",
            "UlyssesSPDataLoaderAdapter", "sequence_tiled_compute",
        ),
    },
    "deepspeed.runtime.data_pipeline": {**_not(_DATA, "curriculum_scheduler", "data_routing", "data_sampling")},
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": {**_not(_DATA, "CurriculumScheduler")},
    "deepspeed.runtime.data_pipeline.data_routing": {**_not(_DATA, "helper")},
    "deepspeed.runtime.data_pipeline.data_routing.helper": {**_not(_DATA, "convert_to_random_ltd", "remove_random_ltd_state_dict", "save_without_random_ltd")},
    "deepspeed.runtime.data_pipeline.data_sampling": {**_not(_DATA, "data_analyzer", "indexed_dataset", "variable_batch_size_and_lr")},
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": {**_not(_DATA, "DataAnalyzer", "DistributedDataAnalyzer")},
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": {**_not(_DATA, "MMapIndexedDataset", "MMapIndexedDatasetBuilder")},
    "deepspeed.runtime.state_dict_factory": {**_not(_INFERENCE, "MegatronSDLoader", "SDLoaderFactory")},
    "deepspeed.compression": {**_not(_COMPRESS, "compress", "helper", "scheduler")},
    "deepspeed.compression.compress": {**_not(_COMPRESS, "init_compression", "redundancy_clean")},
    "deepspeed.inference": {**_RAGGED, **_not(_INFERENCE, "quantization")},
    "deepspeed.inference.config": {
        **_from("ds_inference.config", DeepSpeedInferenceConfig="InferenceConfig", DeepSpeedTPConfig="TensorParallelConfig"),
    },
    "deepspeed.inference.engine": {**_from("ds_inference", "InferenceEngine")},
    "deepspeed.inference.v2": _RAGGED,
    "deepspeed.inference.v2.config_v2": {**_from("ds_inference", RaggedInferenceEngineConfig="RaggedConfig")},
    "deepspeed.inference.v2.engine_v2": {**_from("ds_inference", InferenceEngineV2="RaggedEngine")},
    "deepspeed.inference.v2.engine_factory": {
        **_from("ds_inference", "build_hf_engine"), **_not(_SERIAL, "build_engine_from_ds_checkpoint"),
    },
    "deepspeed.inference.v2.scheduling_utils": {**_from("ds_inference", "SchedulingError", "SchedulingResult")},
    "deepspeed.model_implementations": {**_not(_INFERENCE, "DeepSpeedTransformerInference")},
    "deepspeed.autotuning": {**_not(_TUNING, "Autotuner")},
    "deepspeed.elasticity": {**_not(_ELASTIC, "compute_elastic_config", "elasticity_enabled", "ensure_immutable_elastic_config", "DSElasticAgent")},
    "deepspeed.compile": {**_not(_COMPILE, "passes", "util")},
    "deepspeed.linear": {**_not(_LORA, "Init", "LoRAConfig", "OptimizedLinear", "QuantizationConfig", "init_lora")},
    "deepspeed.io": {**_not(_IO, "FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter")},
    "deepspeed.nvme": {**_not(_IO, "ds_io_main", "generate_main", "sweep_main")},
    "deepspeed.monitor": {**_not(Missing("monitoring is ds-monitor's", "ds_monitor"), "MonitorMaster", "monitor")},
    "deepspeed.monitor.monitor": {**_not(Missing("monitoring is ds-monitor's", "ds_monitor"), "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor")},
    "deepspeed.profiling": {},
    "deepspeed.profiling.flops_profiler": _from("deepspeed._ours.flops", "FlopsProfiler", "get_model_profile"),
    "deepspeed.runtime.rollout": {
        **_not(
            _INFERENCE, "HybridEngineRollout", "JSDLossOutput", "ResponseTokenBatch", "RolloutBatch", "RolloutConfig", "RolloutEngine",
            "RolloutRequest", "SamplingConfig", "build_rollout", "generalized_jsd_loss",
        ),
    },
    "deepspeed.runtime.domino": {**_not(_TENSOR, "transformer")},
    "deepspeed.domino": {**_not(_TENSOR, "DominoTransformerLayer")},
}  # fmt: skip
