"""The surface: every public name of DeepSpeed 0.19.8 that clients use or its documentation names, and what it is here.

A row is `"module:attribute"` (`"module:"` for the module itself), `Constant`, or `Missing` with the reason and what to use.
The modules of this package are made from this table (`deepspeed._finder`); docs/reference/deepspeed-surface.md is made
from it; a name that is in neither place does not exist. `Constant` is plain data:
names of configuration keys and of checkpoint entries, and their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed._surface import constants
from deepspeed._surface.refusals import (
    COMPILE,
    COMPRESS,
    ELASTIC,
    GATES,
    INFERENCE,
    INTERNAL,
    IO,
    LOSSY,
    MICS,
    MISSING_ATTRIBUTES,
    MOE,
    PRESETS,
    SEQUENCE,
    SERIAL,
    TENSOR,
    TIERS,
    TRANSFORMER,
    TUNING,
)
from deepspeed._surface.rows import Constant, Missing, Row, Rows, from_, not_, values

__all__ = ["MISSING_ATTRIBUTES", "SURFACE", "Constant", "Missing", "Rows"]


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
_CONFIG = "deepspeed._ours.config"
_SECTIONS = "deepspeed._ours.sections"
_BUILDERS = "deepspeed._ours.builders"
_LAUNCHING = "deepspeed._ours.launching"
_GRIDS = "deepspeed._ours.grids"
_ELASTICITY = "deepspeed._ours.elasticity"
_ACCELERATOR = "deepspeed._ours.accelerator"
_SMALL = "deepspeed._ours.small"
_TP_SHARDS = "deepspeed._ours.tp_shards"
_LAYERS = "deepspeed._ours.layers"
_ODDS = "deepspeed._ours.odds"
_AUTOTP = "deepspeed._ours.autotp"
_MONITORS = "deepspeed._ours.monitors"
_TENSORS = "deepspeed._ours.tensors"
_LINEAR = "deepspeed._ours.linear"
_TORCH = "deepspeed._ours.torch_versions"
_HYBRID = "deepspeed._ours.hybrid"
_ROLLOUT_BASE = from_(_HYBRID, "RolloutBatch", "RolloutConfig", "RolloutEngine", "RolloutRequest", "SamplingConfig")
_DIVERGENCE = from_(_HYBRID, "JSDLossOutput", "ResponseTokenBatch", "generalized_jsd_loss")
_ROLLOUT = {**_ROLLOUT_BASE, **_DIVERGENCE, **from_(_HYBRID, "HybridEngineRollout", "build_rollout")}

_ACCESS = from_(
    "ds_zero",
    *(f"safe_{verb}_{reach}_{what}"
      for verb in ("get", "set") for reach in ("full", "local") for what in ("fp32_param", "grad", "optimizer_state")),
    "safe_update_full_grad_vectorized",
)  # fmt: skip
_FRAGMENTS = not_(
    INTERNAL, "fragment_address", "get_full_hp_grad", "get_full_hp_param", "get_hp_fragment_mapping", "link_hp_params",
    "lazy_init_hp_params_optimizer_state", "map_to_flat_opt_states", "set_full_hp_grad", "set_full_hp_param",
)  # fmt: skip
_LEAVES = from_(
    _TOOLS, "get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter",
)  # fmt: skip
_LOGGING = from_(_TOOLS, "log_dist", "log_dist_once", "logger", "set_log_level_from_string")
_COMPRESSION = from_(
    "ds_compress",
    "compression_scheduler",
    "convert_conv1d_to_linear",
    "init_compression",
    "redundancy_clean",
    "student_initialization",
)
_GROUP_GETTERS = from_(
    _GROUPS, "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size",
    "get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size",
    "get_tensor_model_parallel_group", "get_tensor_model_parallel_rank", "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
)  # fmt: skip
_PRIVATE_GROUP_GETTERS = from_(
    _GROUPS, "_get_data_parallel_group", "_get_data_parallel_rank", "_get_data_parallel_world_size",
    "_get_model_parallel_world_size", "_get_sequence_data_parallel_group", "_get_sequence_data_parallel_rank",
    "_get_sequence_data_parallel_world_size", "_get_sequence_parallel_group", "_get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size", "_get_world_group", "_init_tp_mesh_device",
)  # fmt: skip
_EXPERT_GROUPS = not_(
    MOE, "_get_expert_data_parallel_group", "_get_expert_parallel_group", "_get_max_expert_size", "initialize",
    "expert_tensor_parallel_world_size",
)  # fmt: skip
_ZERO_ROWS: dict[str, Row] = {
    **from_(
        _ZERO,
        "GatheredParameters",
        "Init",
        "MiCS_Init",
        "TiledLinear",
        "register_external_parameter",
        "unregister_external_parameter",
    ),
    **from_("deepspeed._ours.optimizer", "unwrap_model_for_generation"),
    **from_(_PARAMS, "ZeroParamStatus", "ZeroParamType"),
    **from_(_ZERO, TiledLinearReturnBias="TiledLinear"),
    **not_(INTERNAL, "DeepSpeedTensorOverride", "DeepSpeedZeRoOffload"),
}
_ZERO_OPTIMIZER = "deepspeed._ours.optimizer:DeepSpeedZeroOptimizer"
_CHECKPOINTING: dict[str, Row] = {
    **from_(
        _ACTIVATIONS, "CheckpointFunction", "CudaRNGStatesTracker", "_CUDA_RNG_STATE_TRACKER",
        "_MODEL_PARALLEL_RNG_TRACKER_NAME", "_set_cuda_rng_state", "checkpoint", "configure", "get_cuda_rng_tracker",
        "is_configured", "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed",
        "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset", "set_num_layers",
    ),
    **not_(
        Missing("checkpointed calls cut and gather their inputs themselves", "checkpoint"),
        "gather_partitioned_activations", "get_partitioned_activations_for_backward",
    ),
}  # fmt: skip
_COMM_ROWS: dict[str, Row] = {
    **from_(
        _COMM, "ReduceOp", "ProcessGroup", "P2POp", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
        "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn", "barrier",
        "batch_isend_irecv", "broadcast", "broadcast_object_list", "configure", "destroy_process_group", "gather",
        "get_all_ranks_from_group", "get_global_rank", "get_local_rank", "get_rank", "get_world_group", "get_world_size",
        "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager", "has_reduce_scatter_tensor",
        "in_aml", "in_aws_sm", "in_dlts", "inference_all_reduce", "init_distributed", "irecv", "is_available", "is_initialized",
        "isend", "log_summary", "monitored_barrier", "mpi_discovery", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_fn",
        "reduce_scatter_tensor", "reset_log", "scatter", "send", "default_pg_timeout", "get_comm_operation_count",
        "get_logged_comm_ops", "get_total_comm_operations", "has_comm_data", "start_profiling_comms", "stop_profiling_comms",
    ),
    **from_("deepspeed._ours.accelerator", "get_accelerator"),
    **not_(
        Missing("communication goes through torch.distributed; there is no object between", "init_distributed"),
        "init_deepspeed_backend", "set_backend", "TorchBackend", "CCLBackend", "cdb",
    ),
    **not_(
        Missing("device meshes are made from the configuration", "the keys of the configuration"),
        "initialize_mesh_device", "enable_symm_mem_for_group",
    ),
    **from_("deepspeed._ours.comms_log", "CommsLogger"),
}  # fmt: skip
_BUILDER_ROWS = from_(
    _BUILDERS,
    *(f"{name}Builder" for name in (
        "AsyncIO", "CCLComm", "CPUAdagrad", "CPUAdam", "CPULion", "DeepCompile", "EvoformerAttn", "FPQuantizer", "FusedAdam",
        "FusedLamb", "FusedLion", "GDS", "Inference", "InferenceCore", "InferenceCutlass", "NotImplemented", "PinMemory",
        "Quantizer", "RaggedOps", "RaggedUtils", "RandomLTD", "ShareMemComm", "SparseAttn", "SpatialInference",
        "StochasticTransformer", "Transformer", "Utils",
    )),
)  # fmt: skip
_BUILDER_FILES = {
    "async_io": "AsyncIO", "cpu_adagrad": "CPUAdagrad", "cpu_adam": "CPUAdam", "cpu_lion": "CPULion", "dc": "DeepCompile",
    "evoformer_attn": "EvoformerAttn", "fp_quantizer": "FPQuantizer", "fused_adam": "FusedAdam", "fused_lamb": "FusedLamb",
    "fused_lion": "FusedLion", "gds": "GDS", "inference_core_ops": "InferenceCore", "inference_cutlass_builder": "InferenceCutlass",
    "pin_memory": "PinMemory", "quantizer": "Quantizer", "ragged_ops": "RaggedOps", "ragged_utils": "RaggedUtils",
    "random_ltd": "RandomLTD", "sparse_attn": "SparseAttn", "spatial_inference": "SpatialInference",
    "stochastic_transformer": "StochasticTransformer", "transformer": "Transformer", "transformer_inference": "Inference",
    "utils": "Utils",
}  # fmt: skip
_ENGINE = from_("deepspeed._ours.engine", "DeepSpeedEngine")
_ADAM = from_(_OPTIMIZERS, "DeepSpeedCPUAdam", "FusedAdam")
_FP32 = from_(
    "deepspeed._ours.weights", "convert_zero_checkpoint_to_fp32_state_dict", "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file", "get_optim_files", "load_state_dict_from_zero_checkpoint", "main",
)  # fmt: skip
_ESTIMATORS = {
    stage: from_(
        "deepspeed._ours.estimates",
        f"estimate_zero{stage}_model_states_mem_needs_all_cold",
        f"estimate_zero{stage}_model_states_mem_needs_all_live",
    )
    for stage in (2, 3)
}
_OFFLOAD = from_("deepspeed._ours.tiers", "OffloadDeviceEnum", "OffloadStateTypeEnum") | from_(
    _SECTIONS, "DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig"
)

_RAGGED: Rows = {
    **from_(
        "ds_inference", "build_hf_engine", InferenceEngineV2="RaggedEngine", RaggedInferenceEngineConfig="RaggedConfig"
    ),
    **from_("ds_inference.config", DeepSpeedTPConfig="TensorParallelConfig"),
    **not_(SERIAL, "build_engine_from_ds_checkpoint"),
}

_TP_LAYERS = from_(
    _LAYERS, "Conv_LinearALlreduce", "GateUpPack_LinearLayer", "LinearAllreduce", "LinearLayer", "LmHeadLinearAllreduce",
    "SubParamLinearAllreduce", "SubParamLinearLayer", "TensorParallel_Layer", "conv_LinearLayer", "fused_LinearLayer",
    "is_autotp_training_mode", "set_autotp_mode",
)  # fmt: skip
_PIPE = from_("ds_pipe", "LayerSpec", "PipelineModule", "TiedLayerSpec")

SURFACE: Mapping[str, Rows] = {
    "deepspeed": {
        **from_("deepspeed._ours.start", "add_config_arguments", "initialize", "tp_model_init"),
        **from_(_COMM, "init_distributed"),
        **_ENGINE,
        **from_("deepspeed._ours.optimizer", DeepSpeedOptimizer="DeepSpeedZeroOptimizer"),
        **from_("deepspeed._ours.start", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"),
        **from_("deepspeed._ours.config", "DeepSpeedConfig", "DeepSpeedConfigError"),
        **from_("ds_engine.loader", DeepSpeedDataLoader="ResumableLoader"),
        **from_("deepspeed._ours.accelerator", "get_accelerator"),
        **from_(_TOOLS, "OnDevice", "is_compile_supported", "log_dist", "logger"),
        **from_(_SCHEDULES, "add_tuning_arguments"),
        **from_(
            _VERSION, "__git_branch__", "__git_hash__", "__version__", "__version_major__", "__version_minor__",
            "__version_patch__", "git_branch", "git_hash", "version",
        ),
        **from_(_OPTIMIZERS, "ADAM_OPTIMIZER", "LAMB_OPTIMIZER", "MUON_OPTIMIZER"),
        **from_(_VERSION, "HAS_TRITON"),
        "zero": "deepspeed.zero:",
        "checkpointing": "deepspeed.checkpointing:",
        "dist": "deepspeed.comm:",
        **from_(_HYBRID, "DeepSpeedHybridEngine"),
        **from_("ds_inference", "InferenceEngine", "init_inference", DeepSpeedInferenceConfig="InferenceConfig"),
        **from_("deepspeed._ours.start", "default_inference_config"),
        **from_("deepspeed._ours.pipeline", "PipelineEngine"),
        **from_("ds_pipe", "PipelineModule"),
        **not_(TRANSFORMER, "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"),
        **not_(INFERENCE, "replace_transformer_layer", "revert_transformer_layer"),
        **from_(_LAYERS, "set_autotp_mode"),
        **not_(Missing("Muon's parameters are chosen when its optimizer is made", "the optimizer section"), "set_optimizer_flags"),
    },
    # -- ZeRO
    "deepspeed.zero": _ZERO_ROWS,
    "deepspeed.runtime": {},
    "deepspeed.runtime.zero": _ZERO_ROWS,
    "deepspeed.runtime.zero.config": {
        **from_(_SECTIONS, "DeepSpeedZeroConfig", "DeepSpeedZeroLeafModuleConfig", "get_zero_config"),
        **from_("deepspeed._ours.tiers", "OffloadDeviceEnum", "ZeroStageEnum"),
        **_OFFLOAD,
        **not_(Missing("sections are read together", "DeepSpeedConfig"), "read_zero_config_deprecated"),
        **from_("ds_zero.config", "ZenFlowConfig"),
    },
    "deepspeed.runtime.zero.offload_config": _OFFLOAD,
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO_ROWS,
        **from_(_PARAMS, "is_zero_param"),
        **from_(_ZERO, "_orig_torch_arange", "restore_init_context", "shutdown_init_context", "zero_wrapper_for_fp_tensor_constructor"),
        **values({"partitioned_param_data_shape": [0]}),
        **from_("deepspeed._ours.accelerator", "get_accelerator"),
        **from_(_TOOLS, "see_memory_usage"),
        **from_(_TENSORS, "AllGatherHandle", "MultipleAllGatherHandles", "NoGatherHandle"),
        **not_(
            INTERNAL, "AllGatherCoalescedHandle", "InsertPostInitMethodToModuleSubClasses", "PartitionedParamStatus", "free_param",
        ),
    },
    "deepspeed.runtime.zero.stage_1_and_2": {"DeepSpeedZeroOptimizer": _ZERO_OPTIMIZER, **_ESTIMATORS[2]},
    "deepspeed.runtime.zero.stage3": {"DeepSpeedZeroOptimizer_Stage3": _ZERO_OPTIMIZER, **_ESTIMATORS[3]},
    "deepspeed.runtime.zero.parameter_offload": {**not_(INTERNAL, "DeepSpeedZeRoOffload")},
    "deepspeed.runtime.zero.linear": from_(
        _TENSORS, "LinearFunctionForZeroStage3", "LinearModuleForZeroStage3", "zero3_linear_wrap",
    ),
    "deepspeed.runtime.sparse_tensor": from_(_TENSORS, "SparseTensor"),
    "deepspeed.runtime.zero.tiling": from_(_ZERO, "TiledLinear", TiledLinearReturnBias="TiledLinear"),
    "deepspeed.runtime.zero.utils": {
        **from_(_PARAMS, "is_zero_param"),
        **from_(_TOOLS, "is_zero_supported_optimizer"),
        **from_("deepspeed._ours.config", ZeRORuntimeException="DeepSpeedConfigError"),
    },
    "deepspeed.runtime.zero.mics": {**from_(_ZERO, "MiCS_Init"), **not_(MICS, "MiCS_Optimizer", "MiCS_Offload", "MiCS_AllGatherCoalescedHandle")},
    "deepspeed.runtime.zero.muon.original_muon": from_("deepspeed._ours.optimizers", "muon_update", "zeropower_via_newtonschulz5"),
    "deepspeed.runtime.zero.muon": {**not_(Missing("Muon is one class here", "ds_ops.optim.Muon"), "MuonWithAuxAdam")},
    # -- engine
    "deepspeed.runtime.engine": {
        **_ENGINE,
        **from_(_GRIDS, _checkpoint_parallel_metadata="parallel_metadata"),
        **from_("deepspeed._ours.saving", "clone_tensors_for_torch_save"),
        **from_(_OPTIMIZERS, "ADAM_OPTIMIZER", "LAMB_OPTIMIZER", "MUON_OPTIMIZER"),
        **from_("deepspeed._ours.start", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"),
    },
    "deepspeed.runtime.base_optimizer": {
        "DeepSpeedOptimizer": _ZERO_OPTIMIZER,
        "ZeROOptimizer": _ZERO_OPTIMIZER,
        **not_(INTERNAL, "BackwardHookStateManager"),
    },
    "deepspeed.runtime.bf16_optimizer": {"BF16_Optimizer": _ZERO_OPTIMIZER},
    "deepspeed.runtime.fp16": {},
    "deepspeed.runtime.fp16.fused_optimizer": {"FP16_Optimizer": _ZERO_OPTIMIZER},
    "deepspeed.runtime.fp16.unfused_optimizer": {"FP16_UnfusedOptimizer": _ZERO_OPTIMIZER},
    "deepspeed.runtime.fp16.loss_scaler": {
        **from_("deepspeed._ours.scalers", "CreateLossScaler", "DynamicLossScaler", "LossScaler", "LossScalerBase"),
        **values({
            "CONSECUTIVE_HYSTERESIS": "consecutive_hysteresis", "DELAYED_SHIFT": "delayed_shift", "INITIAL_LOSS_SCALE": "init_scale",
            "MIN_LOSS_SCALE": "min_scale", "SCALE_WINDOW": "scale_window",
        }),
    },
    "deepspeed.runtime.fp16.onebit": from_("ds_comm.lossy.onebit", "OnebitAdam", "OnebitLamb", "ZeroOneAdam"),
    "deepspeed.runtime.fp16.onebit.adam": from_("ds_comm.lossy.onebit", "OnebitAdam"),
    "deepspeed.runtime.fp16.onebit.lamb": from_("ds_comm.lossy.onebit", "OnebitLamb"),
    "deepspeed.runtime.fp16.onebit.zoadam": from_("ds_comm.lossy.onebit", "ZeroOneAdam"),
    "deepspeed.runtime.config": {
        **values(constants.CONFIG),
        **values(constants.RUNTIME),
        **from_(
            _CONFIG, "DeepSpeedConfig", "DeepSpeedConfigError", "get_gradient_allreduce_op", "get_gradient_clipping", "get_log_level",
        ),
    },
    "deepspeed.runtime.config_utils": {
        **from_(_CONFIG, "dict_raise_error_on_duplicate_keys"),
        **from_(_SECTIONS, "DeepSpeedConfigModel"),
        **from_(_SMALL, "get_config_default", get_dict_param="get_value", get_list_param="get_value", get_scalar_param="get_value"),
    },
    "deepspeed.runtime.precision_config": from_(
        _SECTIONS, "DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config",
    ),
    "deepspeed.runtime.zero.leaf_module_config": from_(
        _SECTIONS, "DEFAULT_LEAF_MODULE_CLASSES", "DEFAULT_LEAF_MODULE_NAMES", "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
        "DeepSpeedZeroLeafModuleConfig",
    ),
    "deepspeed.runtime.dataloader": {
        **from_("ds_engine.loader", DeepSpeedDataLoader="ResumableLoader"),
        **from_(_TOOLS, "RepeatingLoader"),
    },
    "deepspeed.runtime.lr_schedules": {
        **values(constants.SCHEDULES),
        **from_(
            _SCHEDULES, "LRRangeTest", "OneCycle", "VALID_LR_SCHEDULES", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR",
            "add_tuning_arguments", "get_config_from_args", "get_lr_from_config", "override_params", "parse_arguments",
        ),
    },
    "deepspeed.runtime.utils": {
        **from_(
            _TOOLS, "call_to_str", "clip_grad_norm_", "empty_cache", "memory_status", "move_to_device", "noop_decorator",
            "partition_balanced", "partition_uniform", "see_memory_usage", "set_random_seed",
        ),
        **from_(_TENSORS, "PartitionedTensor", "prefix_sum_inc"),
        **from_(
            _SMALL, "DummyOptim", "bwc_pipeline_parallel_group", "bwc_pipeline_parallel_world_size", "bwc_tensor_model_parallel_group",
            "bwc_tensor_model_parallel_rank", "bwc_tensor_model_parallel_world_size", "copy_to_device", "ensure_directory_exists",
            "get_global_norm", "get_grad_norm", "get_inactive_params", "get_ma_status", "is_model_parallel_parameter",
        ),
        **from_(_TORCH, "required_torch_version"),
        **not_(INTERNAL, "CheckOverflow", "get_grad_zeros", "get_weight_norm"),
    },
    "deepspeed.runtime.constants": values(constants.RUNTIME),
    "deepspeed.runtime.data_pipeline.constants": values(constants.DATA_PIPELINE),
    "deepspeed.checkpoint.constants": values(constants.CHECKPOINT),
    "deepspeed.elasticity.constants": values(constants.ELASTICITY),
    "deepspeed.launcher.constants": values(constants.LAUNCHER),
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.config": from_(_SMALL, "DeepSpeedActivationCheckpointingConfig"),
    "deepspeed.runtime.swap_tensor.aio_config": from_(_SMALL, get_aio_config="aio_config"),
    "deepspeed.runtime.swap_tensor": values({"MIN_SWAPPABLE_BYTES": 1048576}),
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.activation_checkpointing.offload_activations": {
        **not_(
            Missing("saved tensors are moved by torch itself", "torch.autograd.graph.save_on_cpu"),
            "CheckpointHiddenStatesOffload", "get_checkpoint_hidden_states_offloading_ctx_manager",
        ),
    },
    "deepspeed.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.checkpoint_engine": from_("deepspeed._ours.saving", "TorchCheckpointEngine"),
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": from_("deepspeed._ours.saving", "TorchCheckpointEngine"),
    # -- optimizers and operations
    "deepspeed.ops": {
        **from_(_BUILDERS, __compatible_ops__="COMPATIBLE"),
        **not_(TRANSFORMER, "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"),
    },
    "deepspeed.ops.adam": {
        **_ADAM, **not_(TIERS, "ZenFlowCPUAdam", "ZenFlowSelectiveAdamW", "ZenFlowSelectiveAdamW_stage3"),
    },
    "deepspeed.ops.adam.cpu_adam": from_(_OPTIMIZERS, "DeepSpeedCPUAdam"),
    "deepspeed.ops.adam.fused_adam": from_(_OPTIMIZERS, "FusedAdam"),
    "deepspeed.ops.adagrad": from_(_OPTIMIZERS, "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.lion": from_(_OPTIMIZERS, "DeepSpeedCPULion", "FusedLion"),
    "deepspeed.ops.lamb": from_(_OPTIMIZERS, "FusedLamb"),
    "deepspeed.ops.aio": from_(_BUILDERS, "AsyncIOBuilder"),
    "deepspeed.ops.op_builder": {**_BUILDER_ROWS, **from_(_BUILDERS, "ALL_OPS", "CUDAOpBuilder", "OpBuilder", "get_default_compute_capabilities")},
    **{f"deepspeed.ops.op_builder.{module}": from_(_BUILDERS, f"{name}Builder") for module, name in _BUILDER_FILES.items()},
    "deepspeed.ops.op_builder.all_ops": from_(_BUILDERS, "ALL_OPS"),
    "deepspeed.ops.op_builder.builder": from_(_BUILDERS, "CUDAOpBuilder", "OpBuilder", "get_default_compute_capabilities"),
    "deepspeed.ops.transformer": {**not_(TRANSFORMER, "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer")},
    "deepspeed.ops.sparse_attention": {
        **not_(
            Missing("its classes are gone in 0.19.8 too", "ds_ops.sparse_attention, which has the same patterns"),
            "BSLongformerSparsityConfig", "BigBirdSparsityConfig", "FixedSparsityConfig", "SparseSelfAttention",
            "SparsityConfig", "VariableSparsityConfig", "LocalSlidingWindowSparsityConfig", "sparsity_config",
        ),
    },
    # -- communication, device
    "deepspeed.comm": _COMM_ROWS,
    "deepspeed.comm.comm": _COMM_ROWS,
    "deepspeed.comm.config": from_("ds_comm.config", "CommsLoggerConfig"),
    "deepspeed.comm.constants": values({
        "CCL_BACKEND": "ccl", "COMMS_LOGGER": "comms_logger", "GLOO_BACKEND": "gloo", "HCCL_BACKEND": "hccl", "MPI_BACKEND": "mpi",
        "NCCL_BACKEND": "nccl", "SCCL_BACKEND": "sccl",
    }),
    "deepspeed.comm.reduce_op": from_(_COMM, "ReduceOp"),
    "deepspeed.comm.utils": from_(_COMM, get_local_rank_from_launcher="get_local_rank", get_world_rank_from_launcher="get_rank", get_world_size_from_launcher="get_world_size"),
    "deepspeed.accelerator": {
        **from_(
            _ACCELERATOR, "get_accelerator", "is_current_accelerator_supported", "set_accelerator", DeepSpeedAccelerator="FacadeAccelerator",
        ),
    },
    "deepspeed.accelerator.abstract_accelerator": from_(_ACCELERATOR, DeepSpeedAccelerator="FacadeAccelerator"),
    "deepspeed.accelerator.real_accelerator": from_(
        _ACCELERATOR, "get_accelerator", "is_current_accelerator_supported", "set_accelerator",
    ),
    # -- utilities
    "deepspeed.utils": {
        **_ACCESS, **_LEAVES, **_LOGGING, **_GROUP_GETTERS, **_FRAGMENTS, **not_(MOE, "initialize"),
        **from_(_TOOLS, "OnDevice", "RepeatingLoader", "instrument_w_nvtx"),
        **from_("deepspeed._ours.accelerator", "get_accelerator"),
        "dist": "deepspeed.comm:",
        **from_("deepspeed._ours.cores", "get_numactl_cmd"),
    },
    "deepspeed.utils.groups": {**from_(_GRIDS, _get_expert_parallel_ranks="expert_parallel_ranks"), **_GROUP_GETTERS, **_PRIVATE_GROUP_GETTERS, **_EXPERT_GROUPS, **from_(_GROUPS, "mpu")},
    "deepspeed.utils.init_on_device": from_(_TOOLS, "OnDevice"),
    "deepspeed.utils.logging": {**_LOGGING, **from_(_TOOLS, "LoggerFactory", "warning_once", "print_json_dist", "log_levels")},
    "deepspeed.utils.comms_logging": from_(
        "deepspeed._ours.comms_log", "CommsLogger", "calc_bw_log", "convert_size", "get_caller_func", "print_rank_0",
    ),
    "deepspeed.utils.numa": from_(
        "deepspeed._ours.cores", "check_for_numactl_pkg", "get_numa_cores", "get_numactl_cmd", "parse_range", "parse_range_list",
    ),
    "deepspeed.utils.nvtx": from_(_TOOLS, "instrument_w_nvtx"),
    "deepspeed.utils.tensor_fragment": {**_ACCESS, **_FRAGMENTS, **not_(INTERNAL, "tensor_fragment")},
    "deepspeed.utils.timer": {
        **from_(
            "deepspeed._ours.timers", "BACKWARD_GLOBAL_TIMER", "BACKWARD_INNER_GLOBAL_TIMER", "BACKWARD_INNER_MICRO_TIMER",
            "BACKWARD_MICRO_TIMER", "BACKWARD_REDUCE_GLOBAL_TIMER", "BACKWARD_REDUCE_MICRO_TIMER", "FORWARD_GLOBAL_TIMER",
            "FORWARD_MICRO_TIMER", "NoopTimer", "STEP_GLOBAL_TIMER", "STEP_MICRO_TIMER", "SynchronizedWallClockTimer",
            "ThroughputTimer", "trim_mean",
        ),
    },
    "deepspeed.utils.bwc": from_(
        _SMALL, "bwc_pipeline_parallel_group", "bwc_pipeline_parallel_world_size", "bwc_tensor_model_parallel_group",
        "bwc_tensor_model_parallel_rank", "bwc_tensor_model_parallel_world_size",
    ),
    "deepspeed.utils.exceptions": from_(_SMALL, "DeprecatedException"),
    "deepspeed.utils.types": from_(_SMALL, "ActivationFuncType", "GATED_ACTIVATION_TYPES", "NormType"),
    "deepspeed.utils.z3_leaf_module": _LEAVES,
    "deepspeed.utils.zero_to_fp32": _FP32,
    "deepspeed.checkpoint": {
        **values(constants.CHECKPOINT),
        **from_("deepspeed._ours.saving", "clone_tensors_for_torch_save"),
        **from_(_GRIDS, "DeepSpeedCheckpoint", "ZeROCheckpoint", "get_model_3d_descriptor", "model_2d_descriptor", "model_3d_desc"),
    },
    "deepspeed.checkpoint.deepspeed_checkpoint": from_(_GRIDS, "DeepSpeedCheckpoint"),
    "deepspeed.checkpoint.ds_to_universal": {
        **from_("deepspeed._ours.commands", main="to_universal", parse_arguments="universal_arguments"),
        **from_(_GRIDS, _aggregate_autoep_zero12_metadata="expert_layers"),
    },
    "deepspeed.checkpoint.reshape_3d_utils": from_(_GRIDS, "get_model_3d_descriptor", "model_3d_desc"),
    "deepspeed.checkpoint.reshape_meg_2d": from_(_GRIDS, meg_2d_parallel_map="model_2d_descriptor"),
    "deepspeed.checkpoint.zero_checkpoint": from_(_GRIDS, "ZeROCheckpoint"),
    "deepspeed.checkpoint.utils": from_(
        "deepspeed._ours.saving", "clone_tensors_for_torch_save", "get_layer_ckpt_name_for_rank", "get_model_ckpt_name_for_rank",
        "get_zero_ckpt_name_for_rank",
    ),
    "deepspeed.git_version_info": from_(_VERSION, "accelerator_name", "git_branch", "git_hash", "installed_ops", "torch_info", "version"),
    "deepspeed.constants": from_(_COMM, "TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout"),
    "deepspeed.env_report": from_("deepspeed._ours.commands", "cli_main", main="report"),
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {
        **from_("deepspeed._ours.commands", "DEEPSPEED_ENVIRONMENT_NAME", "DLTS_HOSTFILE", "EXPORT_ENVS", "main"),
        **from_(
            _LAUNCHING, "decode_world_info", "encode_world_info", "fetch_hostfile", "parse_args", "parse_inclusion_exclusion",
            "parse_resource_filter", _parse_hostfile="hosts_of",
        ),
    },
    "deepspeed.launcher.launch": from_("deepspeed._ours.commands", main="launch"),
    "deepspeed.launcher.multinode_runner": {
        **from_(
            _LAUNCHING, "MultiNodeRunner", "OpenMPIRunner", "PDSHRunner", "SlurmRunner", "IMPIRunner", "MPICHRunner",
            "MVAPICHRunner",
        ),
    },
    # -- not here
    "deepspeed.pipe": _PIPE,
    "deepspeed.runtime.pipe": _PIPE | from_("ds_pipe", "ProcessTopology"),
    "deepspeed.runtime.pipe.module": _PIPE,
    "deepspeed.runtime.pipe.engine": {**_ENGINE, **from_("deepspeed._ours.pipeline", "PipelineEngine")},
    "deepspeed.runtime.pipe.schedule": from_(
        "deepspeed._ours.pipe_schedules", "BackwardPass", "BufferOpInstruction", "DataParallelSchedule", "ForwardPass",
        "InferenceSchedule", "LoadMicroBatch", "OptimizerStep", "PipeInstruction", "PipeSchedule", "RecvActivation", "RecvGrad",
        "ReduceGrads", "ReduceTiedGrads", "SendActivation", "SendGrad", "TrainSchedule",
    ),
    "deepspeed.runtime.pipe.topology": {
        **from_("ds_pipe", "PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"),
        **from_("deepspeed._ours.pipeline", "PipelineParallelGrid"),
        **from_(_SMALL, _prime_factors="prime_factors"),
    },
    "deepspeed.moe": {},
    "deepspeed.moe.layer": {**from_("ds_moe", "MoE", "Experts"), **not_(GATES, "MOELayer", "TopKGate")},
    "deepspeed.moe.experts": from_("ds_moe", "Experts"),
    "deepspeed.moe.utils": from_(
        "ds_moe.utils", "configure_moe_param_groups", "has_moe_layers", "is_moe_param", "is_moe_param_group",
        "split_params_grads_into_shared_and_expert_params", "split_params_into_different_moe_groups_for_optimizer",
        "split_params_into_shared_and_expert_params",
    ),
    "deepspeed.moe.sharded_moe": {
        **from_("ds_moe", "top1gating", "top2gating", "topkgating"), **not_(GATES, "MOELayer", "TopKGate"),
        **from_("deepspeed._ours.routes", _route_slots="route_slots", _sparse_decode="sparse_decode", _sparse_encode="sparse_encode"),
    },
    "deepspeed.moe.mappings": from_("deepspeed._ours.routes", "drop_tokens", "gather_tokens"),
    "deepspeed.module_inject": {
        "tp_shard": f"{_TP_SHARDS}:",
        **_TP_LAYERS,
        **from_(_AUTOTP, "AutoTPConfig", "PartitionType", "TPLayerSpec", "merge_autotp_configs"),
        **not_(INFERENCE, "replace_transformer_layer", "revert_transformer_layer", "generic_injection", "quantize_transformer_layer"),
        **not_(PRESETS, "AutoTPPresets"),
    },
    "deepspeed.module_inject.tp_shard": from_(
        _TP_SHARDS, "get_n_embd", "get_num_attention_heads", "get_num_kv_heads", "get_shard_size", "get_shard_size_list", "set_n_embd",
        "set_num_attention_heads", "set_num_kv_heads", "set_tp_grain_size",
    ),
    "deepspeed.module_inject.layers": {
        **_TP_LAYERS,
        **from_(_LAYERS, "ColumnParallel", "GatherReplacedLayerParams", "RowParallel", "collect_autotp_universal_checkpoint_info"),
        **not_(INFERENCE, "EmbeddingLayer", "Normalize", "OPTEmbedding", "RMSNormalize"),
        **not_(TENSOR, "Yuan_LinearAllreduce", "Yuan_LinearLayer", "TensorParallelConv2d", "TensorParallelIcShardConv2d", "TensorParallelOcShardConv2d"),
    },
    "deepspeed.module_inject.auto_tp": {
        **from_(_AUTOTP, "AutoTP", "AutoTPConfig", "PartitionType", "TPLayerSpec"),
        **not_(TENSOR, "Loading", "ReplaceWithTensorSlicing"),
    },
    "deepspeed.module_inject.autotp_config": {
        **from_(_AUTOTP, "AutoTPConfig", "PartitionType", "TPLayerSpec", "merge_autotp_configs"), **not_(PRESETS, "AutoTPPresets"),
    },
    "deepspeed.module_inject.tp_plan_converter": from_(_AUTOTP, "SUPPORTED_STYLES", "TPPlanConverter"),
    "deepspeed.module_inject.auto_tp_model_utils": from_(
        _AUTOTP, "build_bloom_alibi_tensor", "build_mpt_alibi_tensor", "build_mpt_atten_bias_tensor", "get_alibi_mask",
        "get_head_shard_sizes", "install_head_sharded_helper",
    ),
    "deepspeed.runtime.tensor_parallel": from_(_AUTOTP, "TPConfig", "TPTrainingConfig", "get_tensor_parallel_config"),
    "deepspeed.runtime.tensor_parallel.config": from_(
        _AUTOTP, "TPConfig", "TPTrainingConfig", "_get_hf_tp_plan", "get_tensor_parallel_config",
    ),
    "deepspeed.sequence": {**not_(SEQUENCE, "cross_entropy", "auto_sp")},
    "deepspeed.sequence.layer": {
        **from_("ds_parallel.sequence", "DistributedAttention"),
        **from_(_TENSORS, "apply_rotary_pos_emb", "single_all_to_all", _SeqAllToAll="SeqAllToAll", _rotate_half="rotate_half"),
        **values({"_torchembed_available": False}),
    },
    "deepspeed.sequence.fpdt_layer": from_(
        "deepspeed._ours.fpdt", FPDT_Attention="FpdtAttention", FPDT_FFN="FpdtFfn", FPDT_InputConstruct="FpdtInput",
        FPDT_LogitsLoss="FpdtLogitsLoss", _FPDTGPUOffloadingAttentionImpl_="FpdtFunction",
    ),
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {
        **from_("deepspeed._ours.sequences", "initialize_sequence_parallel"),
        **from_(
            _GROUPS, get_sequence_parallel_group="_get_sequence_parallel_group",
            get_sequence_parallel_rank="_get_sequence_parallel_rank",
            get_sequence_parallel_world_size="_get_sequence_parallel_world_size",
            # There, who shares a sequence is who upstream's engine asks for under these names.
            get_model_parallel_group="_get_sequence_parallel_group",
            get_model_parallel_rank="_get_sequence_parallel_rank",
            get_model_parallel_world_size="_get_sequence_parallel_world_size",
            get_sequence_data_parallel_group="_get_sequence_data_parallel_group",
            get_sequence_data_parallel_rank="_get_sequence_data_parallel_rank",
            get_sequence_data_parallel_world_size="_get_sequence_data_parallel_world_size",
        ),
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        **from_(
            "deepspeed._ours.sequences", "SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "UlyssesSPAttentionHF",
            "UlyssesSPDataLoaderAdapter",
        ),
        **from_("ds_parallel.tiling", "sequence_tiled_compute"),
    },
    "deepspeed.runtime.zenflow": {},
    "deepspeed.runtime.zenflow.zenflow_config": {**from_("ds_zero.config", "ZenFlowConfig")},
    "deepspeed.runtime.data_pipeline": {},
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": {**from_("deepspeed._ours.data", "CurriculumScheduler")},
    "deepspeed.runtime.data_pipeline.data_routing": {},
    "deepspeed.runtime.data_pipeline.data_routing.basic_layer": {**from_("ds_data.routing", "RandomLayerTokenDrop")},
    "deepspeed.runtime.data_pipeline.data_routing.helper": {
        **from_("ds_data.routing", "convert_to_random_ltd", "remove_random_ltd_state_dict", "save_without_random_ltd"),
    },
    "deepspeed.runtime.data_pipeline.data_routing.scheduler": {**from_("deepspeed._ours.data", "RandomLTDScheduler")},
    "deepspeed.runtime.data_pipeline.data_sampling": {},
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": {**from_("deepspeed._ours.data", "DeepSpeedDataSampler")},
    "deepspeed.runtime.data_pipeline.data_sampling.utils": {
        **from_(
            "deepspeed._ours.data", "close_mmap_dataset_builder", "create_mmap_dataset_builder", "find_fit_int_dtype", "split_index",
        ),
    },
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": {
        **from_("ds_data.seqlens", "batch_by_seqlens", "scale_lr"),
        **from_(
            "ds_data.variable", "VariableBatchSizeLR", "dataloader_for_variable_batch_size", "lr_scheduler_for_variable_batch_size",
            "get_dataloader_and_lr_scheduler_for_variable_batch_size",
        ),
        **from_("deepspeed._ours.data", "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed"),
    },
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": {
        **from_("ds_data.analyzing", "DataAnalyzer", "DistributedDataAnalyzer"),
    },
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": {
        **from_(
            "deepspeed._ours.data", "MMapIndexedDataset", "MMapIndexedDatasetBuilder", "data_file_path", "dataset_exists",
            "index_file_path", "make_builder", "make_dataset",
        ),
    },
    "deepspeed.runtime.state_dict_factory": {**not_(INFERENCE, "MegatronSDLoader", "SDLoaderFactory")},
    "deepspeed.compression": {**_COMPRESSION},
    "deepspeed.compression.compress": {**from_("ds_compress", "init_compression", "redundancy_clean", "student_initialization")},
    "deepspeed.compression.helper": {**from_("ds_compress", "convert_conv1d_to_linear")},
    "deepspeed.compression.scheduler": {**from_("ds_compress", "CompressionScheduler", "compression_scheduler")},
    "deepspeed.compression.basic_layer": {
        **not_(
            COMPRESS, "BNLayer_Compress", "ColumnParallelLinear_Compress", "Conv2dLayer_Compress", "Embedding_Compress",
            "LinearLayer_Compress", "QuantAct", "RowParallelLinear_Compress",
        ),
    },
    "deepspeed.inference": {**_RAGGED, **not_(INFERENCE, "quantization")},
    "deepspeed.inference.config": {
        **from_("ds_inference.config", DeepSpeedInferenceConfig="InferenceConfig", DeepSpeedTPConfig="TensorParallelConfig"),
    },
    "deepspeed.inference.engine": {**from_("ds_inference", "InferenceEngine")},
    "deepspeed.inference.v2": _RAGGED,
    "deepspeed.inference.v2.config_v2": {**from_("ds_inference", RaggedInferenceEngineConfig="RaggedConfig")},
    "deepspeed.inference.v2.engine_v2": {**from_("ds_inference", InferenceEngineV2="RaggedEngine")},
    "deepspeed.inference.v2.engine_factory": {
        **from_("ds_inference", "build_hf_engine"), **not_(SERIAL, "build_engine_from_ds_checkpoint"),
    },
    "deepspeed.inference.v2.scheduling_utils": {**from_("ds_inference", "SchedulingError", "SchedulingResult")},
    "deepspeed.model_implementations": {**not_(INFERENCE, "DeepSpeedTransformerInference")},
    "deepspeed.autotuning": {**not_(TUNING, "Autotuner")},
    "deepspeed.utils.debug": from_(
        _ODDS, "debug_clear_module_and_param_names", "debug_extract_module_and_param_names", "debug_module2name",
        "debug_module2name_class", "debug_module2name_id", "debug_param2name", "debug_param2name_id", "debug_param2name_id_numel",
        "debug_param2name_id_shape", "debug_param2name_id_shape_device", "debug_param2name_id_shape_status", "print_rank", "print_rank0",
    ),
    "deepspeed.runtime.compiler": {
        **from_("torch.compiler", "disable", "is_compiling"), "compile": "torch:compile", **from_(_TOOLS, "is_compile_supported"),
    },
    "deepspeed.runtime.progressive_layer_drop": from_(_ODDS, "ProgressiveLayerDrop"),
    "deepspeed.runtime.comm": {},
    "deepspeed.runtime.comm.coalesced_collectives": {
        **from_(_ODDS, "reduce_scatter_coalesced"), **not_(LOSSY, "all_to_all_loco_quant_reduce", "all_to_all_quant_reduce"),
    },
    "deepspeed.runtime.zero.offload_states": {
        **from_(_ODDS, "get_state_devices"),
        **not_(
            Missing("states are moved together", "optimizer.offload_states(include=...), optimizer.reload_states()"),
            "offload_adam_states", "offload_optimizer_states", "reload_adam_states", "reload_optimizer_states",
        ),
    },
    "deepspeed.elasticity.utils": from_(_ODDS, "is_torch_elastic_compatible"),
    "deepspeed.utils.torch": from_(
        _TORCH, "jit_script_compat", "required_max_torch_version", "required_min_torch_version", "required_torch_version",
    ),
    "deepspeed.elasticity": {
        **from_(_ELASTICITY, "compute_elastic_config", "elasticity_enabled", "ensure_immutable_elastic_config"),
        **values({"ELASTICITY": "elasticity", "ENABLED": "enabled", "ENABLED_DEFAULT": False}),
        **not_(ELASTIC, "DSElasticAgent"),
    },
    "deepspeed.elasticity.config": from_(
        _ELASTICITY, "ElasticityConfig", "ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize",
    ),
    "deepspeed.elasticity.elasticity": from_(
        _ELASTICITY, "compute_elastic_config", "elasticity_enabled", "ensure_immutable_elastic_config",
    ),
    "deepspeed.compile": {**not_(COMPILE, "passes", "util")},
    "deepspeed.linear": from_(_LINEAR, "Init", "LoRAConfig", "OptimizedLinear", "QuantizationConfig", "init_lora"),
    "deepspeed.linear.config": from_(_LINEAR, "LoRAConfig", "QuantizationConfig"),
    "deepspeed.linear.context_manager": from_(_LINEAR, "Init", "init_lora"),
    "deepspeed.linear.optimized_linear": from_(_LINEAR, "LoRAOptimizedLinear", "OptimizedLinear"),
    "deepspeed.linear.quantization": from_(_LINEAR, "QuantizedLinear", "QuantizedParameter"),
    "deepspeed.io": {**not_(IO, "FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter")},
    "deepspeed.nvme": {**not_(IO, "ds_io_main", "generate_main", "sweep_main")},
    "deepspeed.monitor": {},
    "deepspeed.monitor.comet": from_(_MONITORS, "CometMonitor"),
    "deepspeed.monitor.config": from_(
        _SECTIONS, "CSVConfig", "CometConfig", "DeepSpeedMonitorConfig", "TensorBoardConfig", "WandbConfig", "get_monitor_config",
    ),
    "deepspeed.monitor.csv_monitor": from_(_MONITORS, "csvMonitor"),
    "deepspeed.monitor.monitor": from_(
        _MONITORS, "CometMonitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor",
    ),
    "deepspeed.monitor.tensorboard": from_(_MONITORS, "TensorBoardMonitor"),
    "deepspeed.monitor.wandb": from_(_MONITORS, "WandbMonitor"),
    "deepspeed.profiling": {},
    "deepspeed.profiling.config": from_(_SMALL, "DeepSpeedFlopsProfilerConfig"),
    "deepspeed.profiling.flops_profiler.profiler": from_("deepspeed._ours.flops", "FlopsProfiler", "get_model_profile"),
    "deepspeed.profiling.flops_profiler": from_("deepspeed._ours.flops", "FlopsProfiler", "get_model_profile"),
    "deepspeed.runtime.rollout": {
        **_ROLLOUT,
    },
    "deepspeed.runtime.rollout.base": {**_ROLLOUT_BASE},
    "deepspeed.runtime.rollout.hybrid_engine_rollout": from_(_HYBRID, "HybridEngineRollout", "HybridEngineRolloutConfig"),
    "deepspeed.runtime.rollout.opsd": _DIVERGENCE,
    "deepspeed.runtime.hybrid_engine": from_(_HYBRID, "DeepSpeedHybridEngine"),
    "deepspeed.runtime.domino": {**not_(TENSOR, "transformer")},
    "deepspeed.domino": {**not_(TENSOR, "DominoTransformerLayer")},
}  # fmt: skip
