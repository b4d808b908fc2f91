"""The surface of training: engine, ZeRO, configuration, optimizers, communication, utilities, checkpoints, launcher."""

from __future__ import annotations

from collections.abc import Mapping

import deepspeed._surface.group_rows as g
from deepspeed._surface.constants import CHECKPOINT, DATA_PIPELINE, ELASTICITY, LAUNCHER, RUNTIME
from deepspeed._surface.constants import CONFIG as CONFIG_NAMES
from deepspeed._surface.constants import SCHEDULES as SCHEDULE_NAMES
from deepspeed._surface.refusals import (
    INFERENCE,
    MICS,
    MOE,
    SPARSE,
)
from deepspeed._surface.surface_rows import Missing, Rows, from_, not_, values

__all__ = ["CORE"]

CORE: Mapping[str, Rows] = {
    "deepspeed": {
        **from_("deepspeed._ours.training_engine.initialize", "add_config_arguments", "initialize", "tp_model_init"),
        **from_(g.COMM, "init_distributed"),
        **g.ENGINE,
        **from_("deepspeed._ours.zero.zero_optimizer", DeepSpeedOptimizer="DeepSpeedZeroOptimizer"),
        **from_("deepspeed._ours.training_engine.initialize", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"),
        **from_("deepspeed._ours.config.config", "DeepSpeedConfig", "DeepSpeedConfigError"),
        **from_("deepspeed._ours.training_engine.engine_data", "DeepSpeedDataLoader"),
        **from_("deepspeed._ours.native_ops.accelerator_api", "get_accelerator"),
        **from_(g.UTILS, "OnDevice"), **from_(g.LOGS, "log_dist", "logger"),
        **from_(g.SCHEDULES, "add_tuning_arguments"),
        **from_(
            g.VERSION, "__git_branch__", "__git_hash__", "__version__", "__version_major__", "__version_minor__",
            "__version_patch__", "git_branch", "git_hash", "version",
        ),
        **from_(g.OPTIMIZERS, "ADAM_OPTIMIZER", "LAMB_OPTIMIZER", "MUON_OPTIMIZER"),
        **from_(g.VERSION, "HAS_TRITON"),
        "zero": "deepspeed.zero:",
        "checkpointing": "deepspeed.checkpointing:",
        "dist": "deepspeed.comm:",
        **from_(g.HYBRID, "DeepSpeedHybridEngine"),
        **from_("ds_inference", "InferenceEngine", "init_inference", DeepSpeedInferenceConfig="InferenceConfig"),
        **from_("deepspeed._ours.training_engine.initialize", "default_inference_config"),
        **from_("deepspeed._ours.training_engine.pipeline", "PipelineEngine", "PipelineModule"),
        **not_(INFERENCE, "revert_transformer_layer"),
        **from_(g.LAYERS, "set_autotp_mode"),
        **not_(Missing("Muon's parameters are chosen when its optimizer is made", "the optimizer section"), "set_optimizer_flags"),
    },
    # -- ZeRO
    "deepspeed.zero": g.ZERO_ROWS,
    "deepspeed.runtime": {},
    "deepspeed.runtime.zero": g.ZERO_ROWS,
    "deepspeed.runtime.zero.config": {
        **from_(g.SECTIONS, "DeepSpeedZeroConfig", "DeepSpeedZeroLeafModuleConfig", "get_zero_config"),
        **from_("deepspeed._ours.config.offload_enums", "OffloadDeviceEnum", "ZeroStageEnum"),
        **g.OFFLOAD,
        **not_(Missing("sections are read together", "DeepSpeedConfig"), "read_zero_config_deprecated"),
        **from_("ds_zero.config", "ZenFlowConfig"),
    },
    "deepspeed.runtime.zero.offload_config": g.OFFLOAD,
    "deepspeed.runtime.zero.partition_parameters": {
        **g.ZERO_ROWS,
        **from_(g.PARAMS, "get_allgather_dtype", "is_zero_param", PartitionedParamStatus="ZeroParamStatus"),
        **from_(
            g.ZERO, "_orig_torch_arange", "restore_init_context", "shutdown_init_context", "zero_wrapper_for_fp_tensor_constructor",
            InsertPostInitMethodToModuleSubClasses="Init", _contradicting_single_rank_pg_error="single_rank_error",
        ),
        **values({"partitioned_param_data_shape": [0]}),
        **from_("deepspeed._ours.native_ops.accelerator_api", "get_accelerator"),
        **from_(g.LOGS, "see_memory_usage"),
        **from_(g.TENSORS, "AllGatherHandle", "MultipleAllGatherHandles", "NoGatherHandle"),
        **not_(
            Missing("parameters of a unit are gathered and released together", "zero.GatheredParameters, which does both"),
            "AllGatherCoalescedHandle", "free_param",
        ),
    },
    "deepspeed.runtime.zero.stage_1_and_2": {"DeepSpeedZeroOptimizer": g.ZERO_OPTIMIZER, **g.ESTIMATORS[2]},
    "deepspeed.runtime.zero.stage3": {"DeepSpeedZeroOptimizer_Stage3": g.ZERO_OPTIMIZER, **g.ESTIMATORS[3]},
    "deepspeed.runtime.zero.linear": from_(
        g.TENSORS, "LinearFunctionForZeroStage3", "LinearModuleForZeroStage3", "zero3_linear_wrap",
    ),
    "deepspeed.runtime.sparse_tensor": from_(g.TENSORS, "SparseTensor"),
    "deepspeed.runtime.zero.tiling": from_(g.ZERO, "TiledLinear", TiledLinearReturnBias="TiledLinear"),
    "deepspeed.runtime.zero.utils": {
        **from_(g.PARAMS, "is_zero_param"),
        **from_("deepspeed._ours.config.config", ZeRORuntimeException="DeepSpeedConfigError"),
    },
    "deepspeed.runtime.zero.mics": {**from_(g.ZERO, "MiCS_Init"), **not_(MICS, "MiCS_Optimizer", "MiCS_Offload", "MiCS_AllGatherCoalescedHandle")},
    "deepspeed.runtime.zero.muon.original_muon": from_("deepspeed._ours.optimizers.optimizer_classes", "muon_update"),
    "deepspeed.runtime.zero.muon": {**not_(Missing("Muon is one class here", "ds_ops.optim.Muon"), "MuonWithAuxAdam")},
    # -- engine
    "deepspeed.runtime.engine": {
        **g.ENGINE,
        **from_(g.GRIDS, _checkpoint_parallel_metadata="parallel_metadata"),
        **from_("deepspeed._ours.checkpoint.checkpoint_api", "clone_tensors_for_torch_save"),
        **from_(g.OPTIMIZERS, "ADAM_OPTIMIZER", "LAMB_OPTIMIZER", "MUON_OPTIMIZER"),
        **from_("deepspeed._ours.training_engine.initialize", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"),
    },
    "deepspeed.runtime.base_optimizer": {
        "DeepSpeedOptimizer": g.ZERO_OPTIMIZER,
        "ZeROOptimizer": g.ZERO_OPTIMIZER,
    },
    "deepspeed.runtime.bf16_optimizer": {"BF16_Optimizer": g.ZERO_OPTIMIZER},
    "deepspeed.runtime.fp16": {},
    "deepspeed.runtime.fp16.fused_optimizer": {"FP16_Optimizer": g.ZERO_OPTIMIZER},
    "deepspeed.runtime.fp16.unfused_optimizer": {"FP16_UnfusedOptimizer": g.ZERO_OPTIMIZER},
    "deepspeed.runtime.fp16.loss_scaler": {
        **from_("deepspeed._ours.zero.scalers", "CreateLossScaler", "DynamicLossScaler", "LossScaler", "LossScalerBase"),
        **values({
            "CONSECUTIVE_HYSTERESIS": "consecutive_hysteresis", "DELAYED_SHIFT": "delayed_shift", "INITIAL_LOSS_SCALE": "init_scale",
            "MIN_LOSS_SCALE": "min_scale", "SCALE_WINDOW": "scale_window",
        }),
    },
    "deepspeed.runtime.fp16.onebit": from_("ds_comm.optim.onebit", "OnebitAdam", "OnebitLamb", "ZeroOneAdam"),
    "deepspeed.runtime.fp16.onebit.adam": from_("ds_comm.optim.onebit", "OnebitAdam"),
    "deepspeed.runtime.fp16.onebit.lamb": from_("ds_comm.optim.onebit", "OnebitLamb"),
    "deepspeed.runtime.fp16.onebit.zoadam": from_("ds_comm.optim.onebit", "ZeroOneAdam"),
    "deepspeed.runtime.config": {
        **values(CONFIG_NAMES),
        **values(RUNTIME),
        **from_(g.CONFIG, "DeepSpeedConfig", "DeepSpeedConfigError", "get_gradient_clipping", "get_log_level"),
        **from_("deepspeed._ours.config.accepted_keys", "get_gradient_allreduce_op"),
    },
    "deepspeed.runtime.config_utils": {
        **from_(g.CONFIG, "dict_raise_error_on_duplicate_keys"),
        **from_(g.SECTIONS, "DeepSpeedConfigModel"),
        **from_(g.UTILS, get_dict_param="get_value", get_list_param="get_value", get_scalar_param="get_value"),
    },
    "deepspeed.runtime.precision_config": from_(
        g.SECTIONS, "DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config",
    ),
    "deepspeed.runtime.zero.leaf_module_config": from_(
        g.SECTIONS, "DEFAULT_LEAF_MODULE_CLASSES", "DEFAULT_LEAF_MODULE_NAMES", "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
        "DeepSpeedZeroLeafModuleConfig",
    ),
    "deepspeed.runtime.dataloader": {
        **from_("deepspeed._ours.training_engine.engine_data", "DeepSpeedDataLoader"),
        **from_(g.UTILS, "RepeatingLoader"),
    },
    "deepspeed.runtime.lr_schedules": {
        **values(SCHEDULE_NAMES),
        **from_(
            g.SCHEDULES, "LRRangeTest", "OneCycle", "VALID_LR_SCHEDULES", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR",
            "add_tuning_arguments", "get_config_from_args", "get_lr_from_config", "override_params", "parse_arguments",
        ),
    },
    "deepspeed.runtime.utils": {
        **from_(
            g.UTILS, "call_to_str", "clip_grad_norm_", "empty_cache", "move_to_device", "noop_decorator",
            "partition_balanced", "partition_uniform", "set_random_seed",
        ),
        **from_(g.LOGS, "see_memory_usage"),
        **from_(g.TENSORS, "PartitionedTensor", "prefix_sum_inc"),
        **from_(
            g.UTILS, "DummyOptim", "bwc_pipeline_parallel_group", "bwc_pipeline_parallel_world_size", "bwc_tensor_model_parallel_group",
            "bwc_tensor_model_parallel_rank", "bwc_tensor_model_parallel_world_size", "copy_to_device", "ensure_directory_exists",
            "get_global_norm", "get_grad_norm", "is_model_parallel_parameter",
        ),
        **from_(g.TORCH, "required_torch_version"),
    },
    "deepspeed.runtime.constants": values(RUNTIME),
    "deepspeed.runtime.data_pipeline.constants": values(DATA_PIPELINE),
    "deepspeed.checkpoint.constants": values(CHECKPOINT),
    "deepspeed.elasticity.constants": values(ELASTICITY),
    "deepspeed.launcher.constants": values(LAUNCHER),
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.config": {},
    "deepspeed.runtime.swap_tensor.aio_config": from_(g.UTILS, get_aio_config="aio_config"),
    "deepspeed.runtime.swap_tensor": values({"MIN_SWAPPABLE_BYTES": 1048576}),
    "deepspeed.runtime.activation_checkpointing.checkpointing": g.CHECKPOINTING,
    "deepspeed.runtime.activation_checkpointing.offload_activations": from_(
        "ds_parallel.hidden_states", "CheckpointActivationOffloadStats", "CheckpointHiddenStatesOffload",
        get_checkpoint_hidden_states_offloading_ctx_manager="CheckpointHiddenStatesOffload",
    ),
    "deepspeed.checkpointing": g.CHECKPOINTING,
    "deepspeed.runtime.checkpoint_engine": from_("deepspeed._ours.checkpoint.checkpoint_api", "TorchCheckpointEngine"),
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": from_("deepspeed._ours.checkpoint.checkpoint_api", "TorchCheckpointEngine"),
    # -- optimizers and operations
    "deepspeed.ops": from_(g.BUILDERS, __compatible_ops__="COMPATIBLE"),
    "deepspeed.ops.adam": g.ADAM,
    "deepspeed.ops.adam.cpu_adam": from_(g.OPTIMIZERS, "DeepSpeedCPUAdam"),
    "deepspeed.ops.adam.fused_adam": from_(g.OPTIMIZERS, "FusedAdam"),
    "deepspeed.ops.adagrad": from_(g.OPTIMIZERS, "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.lion": from_(g.OPTIMIZERS, "DeepSpeedCPULion", "FusedLion"),
    "deepspeed.ops.lamb": from_(g.OPTIMIZERS, "FusedLamb"),
    "deepspeed.ops.aio": from_(g.BUILDERS, "AsyncIOBuilder"),
    "deepspeed.ops.op_builder": {**g.BUILDER_ROWS, **from_(g.BUILDERS, "ALL_OPS", "CUDAOpBuilder", "OpBuilder")},
    **{f"deepspeed.ops.op_builder.{module}": from_(g.BUILDERS, f"{name}Builder") for module, name in g.BUILDER_FILES.items()},
    "deepspeed.ops.op_builder.all_ops": from_(g.BUILDERS, "ALL_OPS"),
    "deepspeed.ops.op_builder.builder": from_(g.BUILDERS, "CUDAOpBuilder", "OpBuilder"),
    "deepspeed.ops.sparse_attention": {
        **not_(
            SPARSE,
            "BSLongformerSparsityConfig", "BigBirdSparsityConfig", "FixedSparsityConfig", "SparseSelfAttention",
            "SparsityConfig", "VariableSparsityConfig", "LocalSlidingWindowSparsityConfig", "sparsity_config",
        ),
    },
    # -- communication, device
    "deepspeed.comm": g.COMM_ROWS,
    "deepspeed.comm.comm": g.COMM_ROWS,
    "deepspeed.comm.config": from_("ds_comm.config", "CommsLoggerConfig"),
    "deepspeed.comm.constants": values({
        "CCL_BACKEND": "ccl", "COMMS_LOGGER": "comms_logger", "GLOO_BACKEND": "gloo", "HCCL_BACKEND": "hccl", "MPI_BACKEND": "mpi",
        "NCCL_BACKEND": "nccl", "SCCL_BACKEND": "sccl",
    }),
    "deepspeed.comm.reduce_op": from_(g.COMM, "ReduceOp"),
    "deepspeed.comm.utils": from_(g.COMM, get_local_rank_from_launcher="get_local_rank", get_world_rank_from_launcher="get_rank", get_world_size_from_launcher="get_world_size"),
    "deepspeed.accelerator": {
        **from_(
            g.ACCELERATOR, "get_accelerator", "is_current_accelerator_supported", "set_accelerator", DeepSpeedAccelerator="FacadeAccelerator",
        ),
    },
    "deepspeed.accelerator.abstract_accelerator": from_(g.ACCELERATOR, DeepSpeedAccelerator="FacadeAccelerator"),
    **{
        f"deepspeed.accelerator.{name}_accelerator": from_(g.ACCELERATOR, f"{name.upper()}_Accelerator")
        for name in ["cpu", "cuda", "hpu", "mlu", "mps", "npu", "sdaa", "supa", "xpu"]
    },
    "deepspeed.accelerator.real_accelerator": from_(
        g.ACCELERATOR, "get_accelerator", "is_current_accelerator_supported", "set_accelerator",
    ),
    # -- utilities
    "deepspeed.utils": {
        **g.ACCESS, **g.LEAVES, **g.LOGGING, **g.GROUP_GETTERS, **not_(MOE, "initialize"),
        **from_(g.UTILS, "OnDevice", "RepeatingLoader"), **from_(g.LOGS, "instrument_w_nvtx"),
        **from_("deepspeed._ours.native_ops.accelerator_api", "get_accelerator"),
        "dist": "deepspeed.comm:",
        **from_("deepspeed._ours.launcher.core_binding", "get_numactl_cmd"),
    },
    "deepspeed.utils.groups": {**from_(g.GRIDS, _get_expert_parallel_ranks="expert_parallel_ranks"), **g.GROUP_GETTERS, **g.PRIVATE_GROUP_GETTERS, **g.EXPERT_GROUPS, **from_(g.GROUPS, "mpu")},
    "deepspeed.utils.init_on_device": from_(g.UTILS, "OnDevice"),
    "deepspeed.utils.logging": {**g.LOGGING, **from_(g.LOGS, "LoggerFactory", "warning_once", "log_levels")},
    "deepspeed.utils.comms_logging": from_(
        "deepspeed._ours.communication.comms_log", "CommsLogger", "calc_bw_log", "convert_size", "print_rank_0",
    ),
    "deepspeed.utils.numa": from_(
        "deepspeed._ours.launcher.core_binding", "get_numa_cores", "get_numactl_cmd", "parse_range_list",
    ) | from_("ds_launcher.cpu_binding", "parse_range"),
    "deepspeed.utils.nvtx": from_(g.LOGS, "instrument_w_nvtx"),
    "deepspeed.utils.tensor_fragment": g.ACCESS,
    "deepspeed.utils.timer": {
        **from_(
            "deepspeed._ours.monitor.wall_clock_timers", "BACKWARD_GLOBAL_TIMER", "BACKWARD_INNER_GLOBAL_TIMER", "BACKWARD_INNER_MICRO_TIMER",
            "BACKWARD_MICRO_TIMER", "BACKWARD_REDUCE_GLOBAL_TIMER", "BACKWARD_REDUCE_MICRO_TIMER", "FORWARD_GLOBAL_TIMER",
            "FORWARD_MICRO_TIMER", "NoopTimer", "STEP_GLOBAL_TIMER", "STEP_MICRO_TIMER", "SynchronizedWallClockTimer",
            "ThroughputTimer", "trim_mean",
        ),
    },
    "deepspeed.utils.bwc": from_(
        g.UTILS, "bwc_pipeline_parallel_group", "bwc_pipeline_parallel_world_size", "bwc_tensor_model_parallel_group",
        "bwc_tensor_model_parallel_rank", "bwc_tensor_model_parallel_world_size",
    ),
    "deepspeed.utils.exceptions": {},
    "deepspeed.utils.types": from_(g.UTILS, "ActivationFuncType", "GATED_ACTIVATION_TYPES"),
    "deepspeed.utils.z3_leaf_module": g.LEAVES,
    "deepspeed.utils.zero_to_fp32": g.FP32,
    "deepspeed.checkpoint": {
        **values(CHECKPOINT),
        **from_("deepspeed._ours.checkpoint.checkpoint_api", "clone_tensors_for_torch_save"),
        **from_(g.GRIDS, "DeepSpeedCheckpoint", "ZeROCheckpoint", "get_model_3d_descriptor", "model_2d_descriptor", "model_3d_desc"),
    },
    "deepspeed.checkpoint.deepspeed_checkpoint": from_(g.GRIDS, "DeepSpeedCheckpoint"),
    "deepspeed.checkpoint.ds_to_universal": {
        **from_("deepspeed._ours.launcher.command_line", main="to_universal", parse_arguments="universal_arguments"),
        **from_(g.GRIDS, _aggregate_autoep_zero12_metadata="expert_layers"),
    },
    "deepspeed.checkpoint.autoep_universal": from_(
        g.GRIDS, _zero12_fragment_path="fragment_path", consolidate_autoep_zero12_expert_states="join_expert_fragments",
    ),
    "deepspeed.checkpoint.reshape_3d_utils": from_(g.GRIDS, "get_model_3d_descriptor", "model_3d_desc"),
    "deepspeed.checkpoint.reshape_meg_2d": from_(g.GRIDS, meg_2d_parallel_map="model_2d_descriptor"),
    "deepspeed.checkpoint.zero_checkpoint": from_(g.GRIDS, "ZeROCheckpoint"),
    "deepspeed.checkpoint.utils": from_(
        "deepspeed._ours.checkpoint.checkpoint_api", "clone_tensors_for_torch_save", "get_layer_ckpt_name_for_rank", "get_model_ckpt_name_for_rank",
        "get_zero_ckpt_name_for_rank",
    ),
    "deepspeed.git_version_info": from_(g.VERSION, "accelerator_name", "git_branch", "git_hash", "installed_ops", "torch_info", "version"),
    "deepspeed.constants": from_(g.COMM, "TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout"),
    "deepspeed.env_report": from_("deepspeed._ours.launcher.command_line", "cli_main", main="report"),
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {
        **from_("deepspeed._ours.launcher.command_line", "DEEPSPEED_ENVIRONMENT_NAME", "DLTS_HOSTFILE", "EXPORT_ENVS", "main"),
        **from_(
            g.LAUNCHING, "decode_world_info", "encode_world_info", "fetch_hostfile", "parse_args", "parse_inclusion_exclusion",
            "parse_resource_filter", _parse_hostfile="hosts_of",
        ),
    },
    "deepspeed.launcher.launch": from_("deepspeed._ours.launcher.command_line", main="launch"),
    "deepspeed.launcher.multinode_runner": {
        **from_(
            g.LAUNCHING, "MultiNodeRunner", "OpenMPIRunner", "PDSHRunner", "SlurmRunner", "IMPIRunner", "MPICHRunner",
            "MVAPICHRunner",
        ),
    },
}  # fmt: skip
