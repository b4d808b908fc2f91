"""Modules of DeepSpeed 0.19.8 that are not here, each with the reason. Imported when one of them is asked for.

A module with rows in the table is there, whatever this says. What lies below a module that is not here is not listed: Python
imports the outer one first.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed._surface import refusals as r
from deepspeed._surface.surface_rows import Missing

__all__ = ["ABSENT"]

_BY_REASON: tuple[tuple[Missing, tuple[tuple[str, str], ...]], ...] = (
    (r.AUTOCAST, (
        ("runtime", "torch_autocast"),
    )),
    (r.BUILDERS, (
        ("ops.op_builder", "cpu hpu mlu npu pin_memory_load sdaa supa xpu"),
    )),
    (r.COMPILE, (
        ("compile", "backend config constants custom_ops fx graph_param inductor init_sp init_tp init_z1_and_2 init_z3"),
        ("compile", "input_storage list_schedule partitioner patch_compiled_func patch_fake_tensor profilers util"),
        ("compile", "z3_eager_fallback"),
    )),
    (r.COMPRESS, (
        ("compression", "config constants utils"),
        ("runtime", "quantize"),
    )),
    (r.CURVATURE, (
        ("runtime", "eigenvalue"),
    )),
    (r.DATA, (
        ("runtime.data_pipeline", "config"),
        ("runtime.data_pipeline.data_routing", "utils"),
    )),
    (r.ELASTIC, (
        ("elasticity", "elastic_agent"),
    )),
    (r.EXPERTS, (
        ("module_inject", "auto_ep auto_ep_config auto_ep_folding auto_ep_layer auto_ep_preset_adapters auto_ep_presets"),
        ("moe", "ep_count ep_experts ep_kernels ep_repack ep_router ep_tp_dispatch fused_expert_layout"),
    )),
    (r.HYBRID_GRAPH, (
        ("runtime", "hybrid_engine_graph"),
    )),
    (r.INFERENCE, (
        ("model_implementations", "diffusers features transformers"),
        ("module_inject", "containers fusedqkv_utils inject load_checkpoint module_quantize policy replace_module"),
        ("module_inject", "replace_policy utils"),
    )),
    (r.INTERNAL, (
        ("", "compat"),
        ("monitor", "utils"),
        ("profiling", "constants"),
        ("runtime.zero", "contiguous_memory_allocator partitioned_param_coordinator partitioned_param_profiler"),
        ("utils", "config mixed_precision_linkage"),
    )),
    (r.IO, (
        ("io", "base_file_writer base_io_buffer constants double_io_buffer fast_file_writer mock_file_writer"),
        ("io", "py_file_writer single_io_buffer utils"),
        ("nvme", "ds_aio_args ds_aio_basic ds_aio_constants ds_aio_handle ds_aio_job io_engine parse_nvme_stats"),
        ("nvme", "perf_generate_param perf_run_sweep perf_sweep_utils torch_fastio_engine torch_io validate_async_io"),
    )),
    (r.KERNELS, (
        ("ops", "compile deepspeed4science gds pin_memory random_ltd triton_ops"),
        ("ops.adagrad", "cpu_adagrad"),
        ("ops.lamb", "fused_lamb"),
        ("ops.lion", "cpu_lion fused_lion multi_tensor_apply"),
        ("ops.transformer", "inference transformer"),
    )),
    (r.LAUNCHER, (
        ("launcher", "launcher_helper"),
    )),
    (r.LOSSY, (
        ("runtime", "compression"),
        ("runtime.comm", "compressed hccl mpi nccl utils"),
    )),
    (r.MICS, (
        ("runtime.zero", "mics_utils"),
    )),
    (r.MUON, (
        ("runtime.zero.muon", "muon_optimizer"),
    )),
    (r.OFFLOAD, (
        ("runtime", "superoffload"),
        ("runtime.swap_tensor", "async_swapper constants optimizer_utils partitioned_optimizer_swapper partitioned_param_swapper"),
        ("runtime.swap_tensor", "pipelined_optimizer_swapper utils"),
    )),
    (r.PINNED, (
        ("utils", "pin_memory pin_memory_tracker"),
    )),
    (r.QUANTIZED, (
        ("inference", "quantization"),
        ("runtime", "weight_quantizer"),
    )),
    (r.QUANTIZER, (
        ("ops", "fp_quantizer quantizer"),
    )),
    (r.RAGGED, (
        ("inference.v2", "allocator checkpoint inference_parameter inference_utils kernels logging"),
        ("inference.v2", "modules ragged"),
        ("inference.v2.model_implementations", "common_parameters exaone4 exaone4_5 falcon flat_model_helpers inference_model_base"),
        ("inference.v2.model_implementations", "inference_policy_base inference_transformer_base layer_container_base llama_v2 mistral mixtral opt"),
        ("inference.v2.model_implementations", "parameter_base phi phi3 qwen qwen_v2 qwen_v2_moe"),
        ("inference.v2.model_implementations.sharding", "attn attn_out embedding mlp qkv types unembed utils"),
        ("utils", "static_cache"),
    )),
    (r.READERS, (
        ("checkpoint", "autoep_zero3_metadata reshape_utils universal_checkpoint"),
    )),
    (r.SEQUENCE, (
        ("sequence", "auto_sp autosp_detector autosp_fusion autosp_vit cross_entropy"),
    )),
    (r.SPARSE, (
        ("ops.sparse_attention", "bert_sparse_self_attention matmul softmax sparse_attention_utils sparse_self_attention"),
        ("ops.sparse_attention", "sparsity_config trsrc"),
    )),
    (r.STAGES, (
        ("runtime.pipe", "p2p"),
    )),
    (r.TENSOR, (
        ("runtime.domino", "async_linear transformer"),
        ("runtime.tensor_parallel", "init_utils tp_manager"),
    )),
    (r.TIERS, (
        ("ops.adam", "multi_tensor_apply zenflow_cpu_adam zenflow_torch_adam"),
        ("runtime.zenflow", "engine engine_stage3 zenflow_stage_1_and_2 zenflow_utils"),
    )),
    (r.TRANSPORT, (
        ("comm", "backend ccl mori torch"),
    )),
    (r.TUNING, (
        ("autotuning", "config constants tuner"),
    )),
    (r.WRITERS, (
        ("", "datastates nebula"),
        ("runtime", "model_checkpointing"),
        ("runtime.checkpoint_engine", "checkpoint_engine datastates_checkpoint_engine decoupled_checkpoint_engine fast_checkpoint_engine"),
        ("runtime.checkpoint_engine", "nebula_checkpoint_engine utils"),
    )),
)  # fmt: skip


def _listed() -> Iterator[tuple[str, Missing]]:
    for reason, folders in _BY_REASON:
        for folder, names in folders:
            for name in names.split():
                yield ".".join(filter(None, ("deepspeed", folder, name))), reason


ABSENT = dict(_listed())
"""By the full names of modules."""
