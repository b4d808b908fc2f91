"""Modules of DeepSpeed 0.19.8 that are not here, each with the reason. Imported when one of them is asked for.

A module with rows in the table is there, whatever this says.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed._surface.refusals import (
    ACCELERATORS,
    AUTOCAST,
    BUILDERS,
    COMPILE,
    COMPRESS,
    CURVATURE,
    DATA,
    ELASTIC,
    EXPERTS,
    HYBRID_GRAPH,
    INFERENCE,
    INTERNAL,
    IO,
    KERNELS,
    LAUNCHER,
    LOSSY,
    MICS,
    MUON,
    OFFLOAD,
    PINNED,
    QUANTIZED,
    QUANTIZER,
    RAGGED,
    READERS,
    SEQUENCE,
    SPARSE,
    STAGES,
    TENSOR,
    TIERS,
    TRANSPORT,
    TUNING,
    WRITERS,
)
from deepspeed._surface.rows import Missing

__all__ = ["ABSENT"]

_BY_REASON: tuple[tuple[Missing, tuple[tuple[str, str], ...]], ...] = (
    (ACCELERATORS, (
        ("accelerator", "cpu_accelerator cuda_accelerator hpu_accelerator mlu_accelerator mps_accelerator npu_accelerator"),
        ("accelerator", "sdaa_accelerator supa_accelerator xpu_accelerator"),
    )),
    (AUTOCAST, (
        ("runtime", "torch_autocast"),
    )),
    (BUILDERS, (
        ("ops.op_builder", "cpu hpu mlu npu pin_memory_load sdaa supa xpu"),
        ("ops.op_builder.cpu", "async_io builder comm cpu_adam fused_adam no_impl pin_memory"),
        ("ops.op_builder.hpu", "builder cpu_adam fp_quantizer fused_adam no_impl transformer_inference"),
        ("ops.op_builder.mlu", "builder cpu_adagrad cpu_adam fused_adam no_impl"),
        ("ops.op_builder.npu", "async_io builder cpu_adagrad cpu_adam cpu_lion fused_adam inference no_impl pin_memory"),
        ("ops.op_builder.sdaa", "builder cpu_adam fused_adam no_impl"),
        ("ops.op_builder.supa", "async_io builder cpu_adagrad cpu_adam cpu_lion fused_adam fused_lamb fused_lion inference no_impl"),
        ("ops.op_builder.supa", "pin_memory quantizer"),
        ("ops.op_builder.xpu", "async_io builder cpu_adagrad cpu_adam flash_attn fused_adam no_impl packbits pin_memory"),
    )),
    (COMPILE, (
        ("compile", "backend config constants custom_ops fx graph_param inductor init_sp init_tp init_z1_and_2 init_z3"),
        ("compile", "input_storage list_schedule partitioner passes patch_compiled_func patch_fake_tensor profilers util"),
        ("compile", "z3_eager_fallback"),
        ("compile.custom_ops", "all_to_all sp_compat sp_dp_registry tp_collectives"),
        ("compile.passes", "contract long_context_checkpointing offload_activation offload_adam_states offload_parameters"),
        ("compile.passes", "prefetch selective_gather sp_compile tp_compile zero3_compile zero_1_and_2_compile"),
        ("compile.profilers", "comm_profile graph_profile"),
    )),
    (COMPRESS, (
        ("compression", "config constants utils"),
        ("runtime", "quantize"),
    )),
    (CURVATURE, (
        ("runtime", "eigenvalue"),
    )),
    (DATA, (
        ("runtime.data_pipeline", "config"),
        ("runtime.data_pipeline.data_routing", "utils"),
    )),
    (ELASTIC, (
        ("elasticity", "elastic_agent"),
    )),
    (EXPERTS, (
        ("module_inject", "auto_ep auto_ep_config auto_ep_folding auto_ep_layer auto_ep_preset_adapters auto_ep_presets"),
        ("module_inject.auto_ep_presets", "base deepseek_v2 deepseek_v3 mixtral qwen3_5_moe qwen3_moe registry"),
        ("moe", "ep_count ep_experts ep_kernels ep_repack ep_router ep_tp_dispatch fused_expert_layout"),
    )),
    (HYBRID_GRAPH, (
        ("runtime", "hybrid_engine_graph"),
    )),
    (INFERENCE, (
        ("model_implementations", "diffusers features transformers"),
        ("model_implementations.diffusers", "unet vae"),
        ("model_implementations.features", "cuda_graph"),
        ("model_implementations.transformers", "clip_encoder ds_base ds_bert ds_bloom ds_gpt ds_llama2 ds_megatron_gpt ds_opt ds_transformer"),
        ("module_inject", "containers fusedqkv_utils inject load_checkpoint module_quantize policy replace_module"),
        ("module_inject", "replace_policy utils"),
        ("module_inject.containers", "base base_moe bert bloom clip distil_bert features gpt2 gptj gptneo gptneox internlm llama llama2"),
        ("module_inject.containers", "megatron_gpt megatron_gpt_moe opt unet vae"),
        ("module_inject.containers.features", "gated_mlp hybrid_engine hybrid_megatron megatron meta_tensor split_qkv"),
    )),
    (INTERNAL, (
        ("", "compat"),
        ("monitor", "utils"),
        ("profiling", "constants"),
        ("runtime.zero", "contiguous_memory_allocator partitioned_param_coordinator partitioned_param_profiler"),
        ("utils", "config mixed_precision_linkage"),
    )),
    (IO, (
        ("io", "base_file_writer base_io_buffer constants double_io_buffer fast_file_writer mock_file_writer"),
        ("io", "py_file_writer single_io_buffer utils"),
        ("nvme", "ds_aio_args ds_aio_basic ds_aio_constants ds_aio_handle ds_aio_job io_engine parse_nvme_stats"),
        ("nvme", "perf_generate_param perf_run_sweep perf_sweep_utils torch_fastio_engine torch_io validate_async_io"),
    )),
    (KERNELS, (
        ("ops", "compile deepspeed4science gds pin_memory random_ltd triton_ops"),
        ("ops.adagrad", "cpu_adagrad"),
        ("ops.deepspeed4science", "evoformer_attn"),
        ("ops.lamb", "fused_lamb"),
        ("ops.lion", "cpu_lion fused_lion multi_tensor_apply"),
        ("ops.random_ltd", "dropping_utils"),
        ("ops.transformer", "inference transformer"),
        ("ops.transformer.inference", "bias_add config diffusers_2d_transformer diffusers_attention diffusers_transformer_block"),
        ("ops.transformer.inference", "ds_attention ds_mlp moe_inference op_binding triton triton_ops"),
        ("ops.transformer.inference.op_binding", "base bias_add bias_gelu bias_relu bias_residual einsum_sec_sm_ecm gated_activation gelu_gemm"),
        ("ops.transformer.inference.op_binding", "layer_norm linear mlp_gemm moe_res_matmul pad_transform pre_rms_norm qkv_gemm residual_add rms_norm"),
        ("ops.transformer.inference.op_binding", "softmax softmax_context vector_add vector_matmul workspace"),
        ("ops.transformer.inference.triton", "attention gelu layer_norm matmul_ext mlp ops residual_add softmax triton_matmul_kernel"),
        ("ops.triton_ops", "_triton group_gemm_triton swiglu_triton"),
    )),
    (LAUNCHER, (
        ("launcher", "launcher_helper"),
    )),
    (LOSSY, (
        ("runtime", "compression"),
        ("runtime.comm", "compressed hccl mpi nccl utils"),
        ("runtime.compression", "cupy"),
    )),
    (MICS, (
        ("runtime.zero", "mics_utils"),
    )),
    (MUON, (
        ("runtime.zero.muon", "muon_optimizer"),
    )),
    (OFFLOAD, (
        ("runtime", "superoffload"),
        ("runtime.superoffload", "superoffload_stage3 superoffload_utils"),
        ("runtime.swap_tensor", "async_swapper constants optimizer_utils partitioned_optimizer_swapper partitioned_param_swapper"),
        ("runtime.swap_tensor", "pipelined_optimizer_swapper utils"),
    )),
    (PINNED, (
        ("utils", "pin_memory pin_memory_tracker"),
    )),
    (QUANTIZED, (
        ("inference", "quantization"),
        ("inference.quantization", "layers quantization quantization_context utils"),
        ("runtime", "weight_quantizer"),
    )),
    (QUANTIZER, (
        ("ops", "fp_quantizer quantizer"),
        ("ops.fp_quantizer", "fp8_gemm fp8_gemm_triton quantize"),
        ("ops.quantizer", "quantizer"),
    )),
    (RAGGED, (
        ("inference.v2", "allocator checkpoint inference_parameter inference_utils kernels logging model_implementations"),
        ("inference.v2", "modules ragged"),
        ("inference.v2.checkpoint", "base_engine huggingface_engine in_memory_engine"),
        ("inference.v2.kernels", "core_ops cutlass_ops ds_kernel ragged_ops"),
        ("inference.v2.kernels.core_ops", "bias_activations blas_kernels cuda_layer_norm cuda_linear cuda_rms_norm gated_activations"),
        ("inference.v2.kernels.core_ops.bias_activations", "bias_activation"),
        ("inference.v2.kernels.core_ops.blas_kernels", "blas_linear"),
        ("inference.v2.kernels.core_ops.cuda_layer_norm", "cuda_fp_ln_base cuda_ln cuda_post_ln cuda_pre_ln"),
        ("inference.v2.kernels.core_ops.cuda_linear", "cuda_linear"),
        ("inference.v2.kernels.core_ops.cuda_rms_norm", "rms_norm rms_norm_base rms_pre_norm"),
        ("inference.v2.kernels.core_ops.gated_activations", "gated_activation"),
        ("inference.v2.kernels.cutlass_ops", "mixed_gemm moe_gemm"),
        ("inference.v2.kernels.cutlass_ops.mixed_gemm", "mixed_gemm"),
        ("inference.v2.kernels.cutlass_ops.moe_gemm", "mixed_moe_gemm moe_gemm"),
        ("inference.v2.kernels.ragged_ops", "atom_builder blocked_flash embed linear_blocked_kv_rotary logits_gather moe_gather moe_scatter"),
        ("inference.v2.kernels.ragged_ops", "top_k_gating"),
        ("inference.v2.kernels.ragged_ops.atom_builder", "atom_builder"),
        ("inference.v2.kernels.ragged_ops.blocked_flash", "blocked_flash"),
        ("inference.v2.kernels.ragged_ops.embed", "embed"),
        ("inference.v2.kernels.ragged_ops.linear_blocked_kv_rotary", "blocked_kv_rotary blocked_trained_kv_rotary linear_blocked_kv_copy"),
        ("inference.v2.kernels.ragged_ops.logits_gather", "logits_gather"),
        ("inference.v2.kernels.ragged_ops.moe_gather", "moe_gather"),
        ("inference.v2.kernels.ragged_ops.moe_scatter", "moe_scatter"),
        ("inference.v2.kernels.ragged_ops.top_k_gating", "top_k_gating"),
        ("inference.v2.model_implementations", "common_parameters exaone4 exaone4_5 falcon flat_model_helpers inference_model_base"),
        ("inference.v2.model_implementations", "inference_policy_base inference_transformer_base layer_container_base llama_v2 mistral mixtral opt"),
        ("inference.v2.model_implementations", "parameter_base phi phi3 qwen qwen_v2 qwen_v2_moe sharding"),
        ("inference.v2.model_implementations.common_parameters", "attn_output_parameters embedding_parameters invfreq_parameters mlp_parameters moe_parameters"),
        ("inference.v2.model_implementations.common_parameters", "norm_parameters qkv_parameters unembed_parameters"),
        ("inference.v2.model_implementations.exaone4", "container model policy"),
        ("inference.v2.model_implementations.exaone4_5", "container model policy"),
        ("inference.v2.model_implementations.falcon", "container model policy"),
        ("inference.v2.model_implementations.llama_v2", "container model policy"),
        ("inference.v2.model_implementations.mistral", "container model policy"),
        ("inference.v2.model_implementations.mixtral", "container model policy"),
        ("inference.v2.model_implementations.opt", "container model policy"),
        ("inference.v2.model_implementations.phi", "containers model policy"),
        ("inference.v2.model_implementations.phi3", "containers model policy"),
        ("inference.v2.model_implementations.qwen", "container model policy"),
        ("inference.v2.model_implementations.qwen_v2", "container model policy"),
        ("inference.v2.model_implementations.qwen_v2_moe", "container model policy"),
        ("inference.v2.model_implementations.sharding", "attn attn_out embedding mlp qkv types unembed utils"),
        ("inference.v2.modules", "configs ds_module heuristics implementations interfaces module_registry"),
        ("inference.v2.modules.configs", "attention_configs embedding_config linear_config moe_config norm_config unembed_config"),
        ("inference.v2.modules.implementations", "attention embedding linear moe post_norm pre_norm unembed"),
        ("inference.v2.modules.implementations.attention", "dense_blocked_attention"),
        ("inference.v2.modules.implementations.embedding", "ragged_embedding"),
        ("inference.v2.modules.implementations.linear", "blas_fp_linear quantized_linear"),
        ("inference.v2.modules.implementations.moe", "cutlass_multi_gemm"),
        ("inference.v2.modules.implementations.post_norm", "cuda_post_ln"),
        ("inference.v2.modules.implementations.pre_norm", "cuda_pre_ln cuda_pre_rms"),
        ("inference.v2.modules.implementations.unembed", "ragged_unembed"),
        ("inference.v2.modules.interfaces", "attention_base embedding_base linear_base moe_base post_norm_base pre_norm_base unembed_base"),
        ("inference.v2.ragged", "blocked_allocator kv_cache manager_configs ragged_manager ragged_wrapper sequence_descriptor"),
        ("utils", "static_cache"),
    )),
    (READERS, (
        ("checkpoint", "autoep_universal autoep_zero3_metadata reshape_utils universal_checkpoint"),
    )),
    (SEQUENCE, (
        ("sequence", "auto_sp autosp_detector autosp_fusion autosp_vit cross_entropy"),
    )),
    (SPARSE, (
        ("ops.sparse_attention", "bert_sparse_self_attention matmul softmax sparse_attention_utils sparse_self_attention"),
        ("ops.sparse_attention", "sparsity_config trsrc"),
    )),
    (STAGES, (
        ("runtime.pipe", "p2p"),
    )),
    (TENSOR, (
        ("runtime.domino", "async_linear transformer"),
        ("runtime.tensor_parallel", "init_utils tp_manager"),
    )),
    (TIERS, (
        ("ops.adam", "multi_tensor_apply zenflow_cpu_adam zenflow_torch_adam"),
        ("runtime.zenflow", "engine engine_stage3 zenflow_stage_1_and_2 zenflow_utils"),
    )),
    (TRANSPORT, (
        ("comm", "backend ccl mori torch"),
    )),
    (TUNING, (
        ("autotuning", "autotuner config constants scheduler tuner utils"),
        ("autotuning.tuner", "base_tuner cost_model index_based_tuner model_based_tuner utils"),
    )),
    (WRITERS, (
        ("", "datastates nebula"),
        ("datastates", "config"),
        ("nebula", "config constants"),
        ("runtime", "model_checkpointing"),
        ("runtime.checkpoint_engine", "checkpoint_engine datastates_checkpoint_engine decoupled_checkpoint_engine fast_checkpoint_engine"),
        ("runtime.checkpoint_engine", "nebula_checkpoint_engine utils"),
        ("runtime.model_checkpointing", "config constants data_parallel_writer_factory utils writer_factory"),
    )),
)  # fmt: skip


def _listed() -> Iterator[tuple[str, Missing]]:
    for reason, folders in _BY_REASON:
        for folder, names in folders:
            for name in names.split():
                yield ".".join(filter(None, ("deepspeed", folder, name))), reason


ABSENT = dict(_listed())
"""By the full names of modules."""
