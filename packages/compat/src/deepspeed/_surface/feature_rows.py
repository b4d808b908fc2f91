"""The surface of features: pipelines, experts, layers cut over ranks, sequences, data, compression, inference, monitors."""

from __future__ import annotations

from collections.abc import Mapping

import deepspeed._surface.group_rows as g
from deepspeed._surface.refusals import (
    COMPRESS,
    DOMINO,
    ELASTIC,
    GATES,
    INFERENCE,
    SERIAL,
)
from deepspeed._surface.surface_rows import Missing, Rows, from_, not_, values

__all__ = ["FEATURES"]

FEATURES: Mapping[str, Rows] = {
    "deepspeed.pipe": g.PIPE,
    "deepspeed.runtime.pipe": g.PIPE | from_("ds_pipe", "ProcessTopology"),
    "deepspeed.runtime.pipe.module": g.PIPE,
    "deepspeed.runtime.pipe.engine": {**g.ENGINE, **from_("deepspeed._ours.training_engine.pipeline", "PipelineEngine")},
    "deepspeed.runtime.pipe.schedule": from_(
        "deepspeed._ours.training_engine.pipe_schedules", "BackwardPass", "BufferOpInstruction", "ForwardPass",
        "InferenceSchedule", "LoadMicroBatch", "OptimizerStep", "PipeInstruction", "PipeSchedule", "RecvActivation", "RecvGrad",
        "ReduceGrads", "ReduceTiedGrads", "SendActivation", "SendGrad", "TrainSchedule",
    ),
    "deepspeed.runtime.pipe.topology": {
        **from_("ds_pipe", "PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"),
        **from_("deepspeed._ours.training_engine.pipeline", "PipelineParallelGrid"),
        **from_(g.UTILS, _prime_factors="prime_factors"),
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
        **from_("ds_moe", "top1gating", "top2gating", "topkgating"),
        **from_("deepspeed._ours.parallel.moe_gates", _route_slots="route_slots", _sparse_decode="sparse_decode", _sparse_encode="sparse_encode"),
    },
    "deepspeed.moe.mappings": from_("deepspeed._ours.parallel.moe_gates", "drop_tokens", "gather_tokens"),
    "deepspeed.module_inject": {
        "tp_shard": f"{g.TP_SHARDS}:",
        **g.TP_LAYERS,
        **from_(g.AUTOTP, "AutoTPConfig", "PartitionType", "TPLayerSpec", "merge_autotp_configs"),
    },
    "deepspeed.module_inject.tp_shard": from_(
        g.TP_SHARDS, "get_n_embd", "get_num_attention_heads", "get_num_kv_heads", "get_shard_size", "get_shard_size_list", "set_n_embd",
        "set_num_attention_heads", "set_num_kv_heads", "set_tp_grain_size",
    ),
    "deepspeed.module_inject.layers": {
        **g.TP_LAYERS,
        **from_(g.LAYERS, "ColumnParallel", "GatherReplacedLayerParams", "RowParallel", "collect_autotp_universal_checkpoint_info"),
        **not_(INFERENCE, "EmbeddingLayer", "Normalize", "OPTEmbedding", "RMSNormalize"),
    },
    "deepspeed.module_inject.auto_tp": from_(g.AUTOTP, "AutoTP", "AutoTPConfig", "PartitionType", "TPLayerSpec"),
    "deepspeed.module_inject.autotp_config": from_(
        g.AUTOTP, "AutoTPConfig", "PartitionType", "TPLayerSpec", "merge_autotp_configs",
    ),
    "deepspeed.module_inject.tp_plan_converter": from_(g.AUTOTP, "SUPPORTED_STYLES", "TPPlanConverter"),
    "deepspeed.module_inject.auto_tp_model_utils": from_(
        g.AUTOTP, "build_bloom_alibi_tensor", "build_mpt_alibi_tensor", "get_alibi_mask",
        "get_head_shard_sizes", "install_head_sharded_helper",
    ),
    "deepspeed.runtime.tensor_parallel": from_(g.AUTOTP, "TPConfig", "TPTrainingConfig", "get_tensor_parallel_config"),
    "deepspeed.runtime.tensor_parallel.config": from_(
        g.AUTOTP, "TPConfig", "TPTrainingConfig", "_get_hf_tp_plan", "get_tensor_parallel_config",
    ),
    "deepspeed.sequence": {},
    "deepspeed.sequence.layer": {
        **from_("ds_parallel.sequence", "DistributedAttention"),
        **from_("ds_parallel.sequence.ulysses", apply_rotary_pos_emb="rotated", _rotate_half="rotate_half"),
        **from_(g.TENSORS, "single_all_to_all", _SeqAllToAll="SeqAllToAll"),
        **values({"_torchembed_available": False}),
    },
    "deepspeed.sequence.fpdt_layer": from_(
        "ds_parallel.sequence.fpdt", FPDT_Attention="FpdtAttention", FPDT_FFN="FpdtFfn", FPDT_InputConstruct="FpdtInput",
        FPDT_LogitsLoss="FpdtLogitsLoss", _FPDTGPUOffloadingAttentionImpl_="FpdtFunction",
    ),
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {
        **from_("deepspeed._ours.parallel.ulysses", "initialize_sequence_parallel"),
        **from_(
            g.GROUPS, get_sequence_parallel_group="_get_sequence_parallel_group",
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
            "deepspeed._ours.parallel.ulysses", "SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "UlyssesSPAttentionHF",
            "UlyssesSPDataLoaderAdapter",
        ),
        **from_("ds_parallel.tiling", "sequence_tiled_compute"),
    },
    "deepspeed.runtime.zenflow": {},
    "deepspeed.runtime.zenflow.zenflow_config": {**from_("ds_zero.config", "ZenFlowConfig")},
    "deepspeed.runtime.data_pipeline": {},
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": {**from_("deepspeed._ours.data.data_pipeline", "CurriculumScheduler")},
    "deepspeed.runtime.data_pipeline.data_routing": {},
    "deepspeed.runtime.data_pipeline.data_routing.basic_layer": {**from_("ds_data.token_dropping", "RandomLayerTokenDrop")},
    "deepspeed.runtime.data_pipeline.data_routing.helper": {
        **from_("ds_data.token_dropping", "convert_to_random_ltd", "remove_random_ltd_state_dict", "save_without_random_ltd"),
    },
    "deepspeed.runtime.data_pipeline.data_routing.scheduler": {**from_("deepspeed._ours.data.data_pipeline", "RandomLTDScheduler")},
    "deepspeed.runtime.data_pipeline.data_sampling": {},
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": {**from_("deepspeed._ours.data.data_pipeline", "DeepSpeedDataSampler")},
    "deepspeed.runtime.data_pipeline.data_sampling.utils": {
        **from_(
            "deepspeed._ours.data.data_pipeline", "find_fit_int_dtype", "split_index",
        ),
    },
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": {
        **from_("ds_data.seqlens", "batch_by_seqlens", "scale_lr"),
        **from_(
            "ds_data.variable", "VariableBatchSizeLR", "dataloader_for_variable_batch_size", "lr_scheduler_for_variable_batch_size",
            "get_dataloader_and_lr_scheduler_for_variable_batch_size",
        ),
        **from_("deepspeed._ours.data.data_pipeline", "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed"),
    },
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": {
        **from_("ds_data.analyzing", "DataAnalyzer", "DistributedDataAnalyzer"),
    },
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": {
        **from_(
            "deepspeed._ours.data.data_pipeline", "MMapIndexedDataset", "MMapIndexedDatasetBuilder", "data_file_path",
            "index_file_path", "make_builder", "make_dataset",
        ),
    },
    "deepspeed.runtime.state_dict_factory": {**not_(INFERENCE, "MegatronSDLoader", "SDLoaderFactory")},
    "deepspeed.compression": {**g.COMPRESSION},
    "deepspeed.compression.compress": {**from_("ds_compress", "init_compression", "redundancy_clean", "student_initialization")},
    "deepspeed.compression.helper": {**from_("ds_compress", "convert_conv1d_to_linear")},
    "deepspeed.compression.scheduler": {**from_("ds_compress", "CompressionScheduler", "compression_scheduler")},
    "deepspeed.compression.basic_layer": {
        **not_(
            COMPRESS, "BNLayer_Compress", "ColumnParallelLinear_Compress", "Conv2dLayer_Compress", "Embedding_Compress",
            "LinearLayer_Compress", "QuantAct", "RowParallelLinear_Compress",
        ),
    },
    "deepspeed.inference": {**g.RAGGED, **not_(INFERENCE, "quantization")},
    "deepspeed.inference.config": {
        **from_("ds_inference.config", DeepSpeedInferenceConfig="InferenceConfig", DeepSpeedTPConfig="InferenceTensorParallelConfig"),
    },
    "deepspeed.inference.engine": {**from_("ds_inference", "InferenceEngine")},
    "deepspeed.inference.v2": g.RAGGED,
    "deepspeed.inference.v2.config_v2": {**from_("ds_inference", RaggedInferenceEngineConfig="RaggedConfig")},
    "deepspeed.inference.v2.engine_v2": {**from_("ds_inference", InferenceEngineV2="RaggedEngine")},
    "deepspeed.inference.v2.engine_factory": {
        **from_("ds_inference", "build_hf_engine"), **not_(SERIAL, "build_engine_from_ds_checkpoint"),
    },
    "deepspeed.inference.v2.model_implementations": {},
    "deepspeed.inference.v2.model_implementations.sharding": from_(
        "deepspeed._ours.parallel.head_sharding", "DEFAULT_SHARD_GRANULARITY", "ShardingType", "attn_out_in_features", "get_local_heads",
        "get_shard_endpoints", "qkv_out_features", "shard_attn_out_param", "shard_embedding_param", "shard_mlp_1_param",
        "shard_mlp_2_param", "shard_param", "shard_qkv_param", "shard_unembed_param", "sharded_embedding_dim",
        "sharded_intermediate_dim", "sharded_unembed_dim",
    ),
    "deepspeed.inference.v2.scheduling_utils": {**from_("ds_inference", "SchedulingError", "SchedulingResult")},
    "deepspeed.autotuning": {**from_("ds_tune.autotuner", "Autotuner")},
    "deepspeed.autotuning.autotuner": {**from_("ds_tune.autotuner", "Autotuner", "ResourceManager")},
    "deepspeed.autotuning.scheduler": {**from_("ds_tune.autotuner", "ResourceManager")},
    "deepspeed.autotuning.utils": {**from_("ds_tune.autotuner", "get_val_by_key", "set_val_by_key")},
    "deepspeed.utils.debug": from_(
        g.DEBUG, "debug_clear_module_and_param_names", "debug_extract_module_and_param_names", "debug_module2name",
        "debug_module2name_class", "debug_param2name", "debug_param2name_id",
        "debug_param2name_id_shape", "print_rank", "print_rank0",
    ),
    "deepspeed.runtime.compiler": {
        **from_("torch.compiler", "disable", "is_compiling"), "compile": "torch:compile",
    },
    "deepspeed.runtime.progressive_layer_drop": from_(g.UTILS, "ProgressiveLayerDrop"),
    "deepspeed.runtime.comm": {},
    "deepspeed.runtime.comm.coalesced_collectives": {
        **from_("deepspeed._ours.communication.coalesced", "all_to_all_loco_quant_reduce", "all_to_all_quant_reduce", "reduce_scatter_coalesced"),
    },
    "deepspeed.runtime.zero.offload_states": {
        **from_("deepspeed._ours.training_engine.state_devices", "get_state_devices"),
        **not_(
            Missing("states are moved together", "optimizer.offload_states(include=...), optimizer.reload_states()"),
            "offload_adam_states", "offload_optimizer_states", "reload_adam_states", "reload_optimizer_states",
        ),
    },
    "deepspeed.elasticity.utils": {},
    "deepspeed.utils.torch": from_(
        g.TORCH, "required_torch_version",
    ),
    "deepspeed.elasticity": {
        **from_(g.ELASTICITY, "compute_elastic_config", "elasticity_enabled"),
        **values({"ELASTICITY": "elasticity", "ENABLED": "enabled", "ENABLED_DEFAULT": False}),
        **not_(ELASTIC, "DSElasticAgent"),
    },
    "deepspeed.elasticity.config": from_(
        g.ELASTICITY, "ElasticityConfig", "ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize",
    ),
    "deepspeed.elasticity.elasticity": from_(
        g.ELASTICITY, "compute_elastic_config", "elasticity_enabled",
    ),
    "deepspeed.compile": {},
    "deepspeed.compile.passes": {
        name: f"deepspeed.compile.passes.{name}:"
        for name in (
            "contract", "offload_adam_states", "offload_parameters", "prefetch", "selective_gather", "zero3_compile",
            "zero_1_and_2_compile",
        )
    },
    "deepspeed.compile.passes.contract": from_(
        g.PASSES, "PassContract", "PassContractError", "_pass_contracts", "get_pass_contract", "register_pass_contract",
        "validate_schedule",
    ),
    "deepspeed.compile.passes.zero_1_and_2_compile": from_(
        g.PASSES, "CONTRACT_Z1", "CONTRACT_Z2", "NAME_Z1", "NAME_Z2", "add_z1_reduce", "add_z2_reduce"
    ),
    "deepspeed.compile.passes.zero3_compile": {
        **from_(g.PASSES, "add_z3_gather_release"), "NAME": f"{g.PASSES}:NAME_Z3", "CONTRACT": f"{g.PASSES}:CONTRACT_Z3",
    },
    "deepspeed.compile.passes.prefetch": {
        **from_(g.PASSES, "schedule_prefetch"), "NAME": f"{g.PASSES}:NAME_PREFETCH", "CONTRACT": f"{g.PASSES}:CONTRACT_PREFETCH",
    },
    "deepspeed.compile.passes.selective_gather": {
        **from_(g.PASSES, "selective_gather"), "NAME": f"{g.PASSES}:NAME_SELECTIVE", "CONTRACT": f"{g.PASSES}:CONTRACT_SELECTIVE",
    },
    "deepspeed.compile.passes.offload_parameters": {
        **from_(g.PASSES, "offload_parameter_fwd"), "NAME": f"{g.PASSES}:NAME_PARAMS", "CONTRACT": f"{g.PASSES}:CONTRACT_PARAMS",
    },
    "deepspeed.compile.passes.offload_adam_states": {
        **from_(
            g.PASSES, "CONTRACT_FOR_INIT", "CONTRACT_SYNC", "NAME_FOR_INIT", "NAME_SYNC", "move_opt_states", "move_opt_states_sync",
            "offload_adam_states_for_init",
        ),
        "NAME": f"{g.PASSES}:NAME_STATES", "CONTRACT": f"{g.PASSES}:CONTRACT_STATES",
    },
    "deepspeed.linear": from_(g.LINEAR, "Init", "LoRAConfig", "OptimizedLinear", "QuantizationConfig", "init_lora"),
    "deepspeed.linear.config": from_(g.LINEAR, "LoRAConfig", "QuantizationConfig"),
    "deepspeed.linear.context_manager": from_(g.LINEAR, "Init", "init_lora"),
    "deepspeed.linear.optimized_linear": from_(g.LINEAR, "LoRAOptimizedLinear", "OptimizedLinear"),
    "deepspeed.linear.quantization": from_(g.LINEAR, "QuantizedLinear", "QuantizedParameter"),
    "deepspeed.monitor": {},
    "deepspeed.monitor.comet": from_(g.MONITORS, "CometMonitor"),
    "deepspeed.monitor.config": from_(
        g.SECTIONS, "CSVConfig", "CometConfig", "DeepSpeedMonitorConfig", "TensorBoardConfig", "WandbConfig", "get_monitor_config",
    ),
    "deepspeed.monitor.csv_monitor": from_(g.MONITORS, "csvMonitor"),
    "deepspeed.monitor.monitor": from_(
        g.MONITORS, "CometMonitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor",
    ),
    "deepspeed.monitor.tensorboard": from_(g.MONITORS, "TensorBoardMonitor"),
    "deepspeed.monitor.wandb": from_(g.MONITORS, "WandbMonitor"),
    "deepspeed.profiling": {},
    "deepspeed.profiling.config": from_(g.UTILS, "DeepSpeedFlopsProfilerConfig"),
    "deepspeed.profiling.flops_profiler.profiler": from_("deepspeed._ours.monitor.flops", "FlopsProfiler", "get_model_profile"),
    "deepspeed.profiling.flops_profiler": from_("deepspeed._ours.monitor.flops", "FlopsProfiler", "get_model_profile"),
    "deepspeed.runtime.rollout": {
        **g.ROLLOUT,
    },
    "deepspeed.runtime.rollout.base": {**g.ROLLOUT_BASE},
    "deepspeed.runtime.rollout.hybrid_engine_rollout": from_(g.HYBRID, "HybridEngineRollout", "HybridEngineRolloutConfig"),
    "deepspeed.runtime.rollout.opsd": g.DIVERGENCE,
    "deepspeed.runtime.hybrid_engine": from_(g.HYBRID, "DeepSpeedHybridEngine"),
    "deepspeed.runtime.domino": {},
    "deepspeed.runtime.domino.async_linear": from_(
        g.DOMINO, "DominoAsyncColumnParallelLinear", "DominoAsyncColumnParallelLinearImpl", "RowParallelLinearNoComm",
    ),
    "deepspeed.runtime.domino.transformer": {
        **from_(g.DOMINO, "DominoModule", "DominoUtil", "NoOper", "_Wait_bwd_comm"),
        **not_(DOMINO, "CoreAttention", "DominoTransformer", "DominoTransformerLayer", "ShardedAttention", "bias_dropout_add"),
    },
    "deepspeed.domino": {**not_(DOMINO, "DominoTransformerLayer")},
}  # fmt: skip
