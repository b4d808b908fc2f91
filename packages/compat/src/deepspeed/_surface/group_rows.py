"""Rows that several modules have."""

from __future__ import annotations

from deepspeed._surface.refusals import (
    INTERNAL,
    MOE,
    SERIAL,
)
from deepspeed._surface.surface_rows import Missing, Row, Rows, from_, not_

ZERO = "deepspeed._ours.zero.zero_api"
PARAMS = "deepspeed._ours.zero.params"
LOGS = "deepspeed._ours.monitor.upstream_logging"
LEAF = "deepspeed._ours.zero.leaf_modules"
COMM = "deepspeed._ours.communication.comm"
GROUPS = "deepspeed._ours.communication.group_getters"
VERSION = "deepspeed._ours.base.version"
SCHEDULES = "deepspeed._ours.optimizers.lr_scheduler_classes"
OPTIMIZERS = "deepspeed._ours.optimizers.optimizer_classes"
ACTIVATIONS = "deepspeed._ours.training_engine.activation_checkpointing_api"
CONFIG = "deepspeed._ours.config.config"
SECTIONS = "deepspeed._ours.config.section_models"
BUILDERS = "deepspeed._ours.native_ops.builders"
LAUNCHING = "deepspeed._ours.launcher.launching"
GRIDS = "deepspeed._ours.checkpoint.grids"
ELASTICITY = "deepspeed._ours.launcher.elasticity"
ACCELERATOR = "deepspeed._ours.native_ops.accelerator_api"
UTILS = "deepspeed._ours.base.runtime_utils"
TP_SHARDS = "deepspeed._ours.parallel.tp_shards"
LAYERS = "deepspeed._ours.parallel.tp_layers"
DOMINO = "deepspeed._ours.parallel.domino_layers"
DEBUG = "deepspeed._ours.monitor.debug_names"
AUTOTP = "deepspeed._ours.parallel.autotp"
MONITORS = "deepspeed._ours.monitor.monitors"
TENSORS = "deepspeed._ours.zero.tensor_fragment"
LINEAR = "deepspeed._ours.native_ops.linear"
TORCH = "deepspeed._ours.base.torch_versions"
HYBRID = "deepspeed._ours.training_engine.hybrid"
PASSES = "deepspeed._ours.training_engine.compile_passes"
ROLLOUT_BASE = from_(HYBRID, "RolloutBatch", "RolloutConfig", "RolloutEngine", "RolloutRequest", "SamplingConfig")
DIVERGENCE = from_(HYBRID, "JSDLossOutput", "ResponseTokenBatch", "generalized_jsd_loss")
ROLLOUT = {**ROLLOUT_BASE, **DIVERGENCE, **from_(HYBRID, "HybridEngineRollout", "build_rollout")}

ACCESS = from_(
    "ds_zero",
    *(f"safe_{verb}_{reach}_{what}"
      for verb in ("get", "set") for reach in ("full", "local") for what in ("fp32_param", "grad", "optimizer_state")),
    "safe_update_full_grad_vectorized",
)  # fmt: skip
LEAVES = from_(
    LEAF, "get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter",
)  # fmt: skip
LOGGING = from_(LOGS, "log_dist", "logger", "set_log_level_from_string")
COMPRESSION = from_(
    "ds_compress",
    "compression_scheduler",
    "convert_conv1d_to_linear",
    "init_compression",
    "redundancy_clean",
    "student_initialization",
)
GROUP_GETTERS = from_(
    GROUPS, "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size",
    "get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size",
    "get_tensor_model_parallel_group", "get_tensor_model_parallel_rank", "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
)  # fmt: skip
PRIVATE_GROUP_GETTERS = from_(
    GROUPS, "_get_data_parallel_group", "_get_data_parallel_rank", "_get_data_parallel_world_size",
    "_get_model_parallel_world_size", "_get_sequence_data_parallel_group", "_get_sequence_data_parallel_rank",
    "_get_sequence_data_parallel_world_size", "_get_sequence_parallel_group", "_get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size", "_get_world_group", "_init_tp_mesh_device",
)  # fmt: skip
EXPERT_GROUPS = not_(
    MOE, "_get_expert_data_parallel_group", "_get_expert_parallel_group", "_get_max_expert_size", "initialize",
    "expert_tensor_parallel_world_size",
)  # fmt: skip
ZERO_ROWS: dict[str, Row] = {
    **from_(
        ZERO,
        "GatheredParameters",
        "Init",
        "MiCS_Init",
        "TiledLinear",
        "register_external_parameter",
        "unregister_external_parameter",
    ),
    **from_("deepspeed._ours.zero.zero_optimizer", "unwrap_model_for_generation"),
    **from_(PARAMS, "ZeroParamStatus", "ZeroParamType"),
    **from_(ZERO, TiledLinearReturnBias="TiledLinear"),
    **not_(INTERNAL, "DeepSpeedTensorOverride", "DeepSpeedZeRoOffload"),  # `deepspeed.zero` is no module upstream
}
ZERO_OPTIMIZER = "deepspeed._ours.zero.zero_optimizer:DeepSpeedZeroOptimizer"
CHECKPOINTING: dict[str, Row] = {
    **from_(
        ACTIVATIONS, "CheckpointFunction", "CudaRNGStatesTracker", "_CUDA_RNG_STATE_TRACKER",
        "_MODEL_PARALLEL_RNG_TRACKER_NAME", "_set_cuda_rng_state", "checkpoint", "configure", "get_cuda_rng_tracker",
        "is_configured", "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed",
        "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset", "set_num_layers",
        "CONTIGUOUS_CHECKPOINTING", "CPU_CHECKPOINT", "PARTITION_ACTIVATIONS", "PROFILE_TIME", "SYNCHRONIZE",
        "deepspeed_checkpointing_enabled", "mp_group", "mp_rank", "mp_size", "mpu", "num_layers",
    ),
    **not_(
        Missing("checkpointed calls cut and gather their inputs themselves", "checkpoint"),
        "gather_partitioned_activations", "get_partitioned_activations_for_backward",
    ),
}  # fmt: skip
COMM_ROWS: dict[str, Row] = {
    **from_(
        COMM, "ReduceOp", "ProcessGroup", "P2POp", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
        "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn", "barrier",
        "batch_isend_irecv", "broadcast", "broadcast_object_list", "configure", "destroy_process_group", "gather",
        "get_all_ranks_from_group", "get_global_rank", "get_local_rank", "get_rank", "get_world_group", "get_world_size",
        "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager", "has_reduce_scatter_tensor",
        "in_aml", "in_aws_sm", "inference_all_reduce", "init_distributed", "irecv", "is_available", "is_initialized",
        "isend", "log_summary", "monitored_barrier", "mpi_discovery", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_fn",
        "reduce_scatter_tensor", "reset_log", "scatter", "send", "default_pg_timeout", "get_comm_operation_count",
        "get_logged_comm_ops", "get_total_comm_operations", "has_comm_data", "start_profiling_comms", "stop_profiling_comms",
    ),
    **from_("deepspeed._ours.native_ops.accelerator_api", "get_accelerator"),
    **not_(
        Missing("communication goes through torch.distributed; there is no object between", "init_distributed"),
        "init_deepspeed_backend", "set_backend", "TorchBackend", "CCLBackend", "cdb",
    ),
    **not_(
        Missing("device meshes are made from the configuration", "the keys of the configuration"),
        "initialize_mesh_device", "enable_symm_mem_for_group",
    ),
    **from_("deepspeed._ours.communication.comms_log", "CommsLogger"),
}  # fmt: skip
BUILDER_ROWS = from_(
    BUILDERS,
    *(f"{name}Builder" for name in (
        "AsyncIO", "CCLComm", "CPUAdagrad", "CPUAdam", "CPULion", "DeepCompile", "EvoformerAttn", "FPQuantizer", "FusedAdam",
        "FusedLamb", "FusedLion", "GDS", "Inference", "InferenceCore", "InferenceCutlass", "NotImplemented", "PinMemory",
        "Quantizer", "RaggedOps", "RaggedUtils", "RandomLTD", "ShareMemComm", "SparseAttn", "SpatialInference",
        "StochasticTransformer", "Transformer", "Utils",
    )),
)  # fmt: skip
BUILDER_FILES = {
    "async_io": "AsyncIO", "cpu_adagrad": "CPUAdagrad", "cpu_adam": "CPUAdam", "cpu_lion": "CPULion", "dc": "DeepCompile",
    "evoformer_attn": "EvoformerAttn", "fp_quantizer": "FPQuantizer", "fused_adam": "FusedAdam", "fused_lamb": "FusedLamb",
    "fused_lion": "FusedLion", "gds": "GDS", "inference_core_ops": "InferenceCore", "inference_cutlass_builder": "InferenceCutlass",
    "pin_memory": "PinMemory", "quantizer": "Quantizer", "ragged_ops": "RaggedOps", "ragged_utils": "RaggedUtils",
    "random_ltd": "RandomLTD", "sparse_attn": "SparseAttn", "spatial_inference": "SpatialInference",
    "stochastic_transformer": "StochasticTransformer", "transformer": "Transformer", "transformer_inference": "Inference",
    "utils": "Utils",
}  # fmt: skip
ENGINE = from_("deepspeed._ours.training_engine.deepspeed_engine", "DeepSpeedEngine")
ADAM = from_(OPTIMIZERS, "DeepSpeedCPUAdam", "FusedAdam")
FP32 = from_(
    "deepspeed._ours.checkpoint.zero_to_fp32", "convert_zero_checkpoint_to_fp32_state_dict", "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file", "get_optim_files", "load_state_dict_from_zero_checkpoint", "main",
)  # fmt: skip
ESTIMATORS = {
    stage: from_(
        "deepspeed._ours.zero.estimates",
        f"estimate_zero{stage}_model_states_mem_needs_all_cold",
        f"estimate_zero{stage}_model_states_mem_needs_all_live",
    )
    for stage in (2, 3)
}
OFFLOAD = from_("deepspeed._ours.config.offload_enums", "OffloadDeviceEnum", "OffloadStateTypeEnum") | from_(
    SECTIONS, "DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig"
)

RAGGED: Rows = {
    **from_(
        "ds_inference", "build_hf_engine", InferenceEngineV2="RaggedEngine", RaggedInferenceEngineConfig="RaggedConfig"
    ),
    **from_("ds_inference.config", DeepSpeedTPConfig="InferenceTensorParallelConfig"),
    **not_(SERIAL, "build_engine_from_ds_checkpoint"),
}

TP_LAYERS = from_(
    LAYERS, "GateUpPack_LinearLayer", "LinearAllreduce", "LinearLayer", "LmHeadLinearAllreduce",
    "SubParamLinearAllreduce", "SubParamLinearLayer", "TensorParallel_Layer", "conv_LinearLayer", "fused_LinearLayer",
    "is_autotp_training_mode", "set_autotp_mode",
)  # fmt: skip
PIPE = from_("ds_pipe", "LayerSpec", "TiedLayerSpec") | from_(
    "deepspeed._ours.training_engine.pipeline", "PipelineModule"
)
