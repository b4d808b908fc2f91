"""Why names are not here, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed._surface.surface_rows import Missing

INFERENCE = Missing(
    "layers are not replaced by class", "deepspeed.init_inference(model, replace_with_kernel_inject=True)"
)
HYBRID_GRAPH = Missing(
    "generation runs the model's own code, without captured graphs", "engine.generate, or ds_engine.Rollout(engine)"
)
SERIAL = Missing("engines are read from the folders of save_pretrained", "build_hf_engine")
MOE = Missing("groups of experts belong to the layers that use them", "ds_moe.place_experts(model), which says them")
GATES = Missing("it is made of other arguments", "deepspeed.moe.layer.MoE, or ds_moe.TopKGate with a ds_moe.GateRule")
TENSOR = Missing(
    "layers are cut by a plan, in place", "the `tensor_parallel` section, or ds_parallel.tensor.parallelize_model"
)
DOMINO = Missing(
    "a model keeps its own layers, which run two half batches in turn",
    "tensor_parallel.half_batches of the configuration",
)
PRESETS = Missing("a family's rules are chosen by its type", "tensor_parallel.preset_model of the configuration")
SEQUENCE = Missing(
    "what attends shares a sequence; no graph is rewritten for it",
    "ds_parallel.sequence: DistributedAttention, RingAttention, chunked_attention",
)
DATA = Missing(
    "ds-data does not have it yet",
    "ds_data (TokenFile, TokenWriter, schedules, Rows) with a DataLoader or data_iter of your own",
)
COMPRESS = Missing("layers keep their classes", "init_compression, which adds what is done to them")
TUNING = Missing("a tuning is decided by other parts", "deepspeed.autotuning.Autotuner, or ds_tune")
TRANSFORMER = Missing("the fused BERT layer was not carried over", "torch.nn.TransformerEncoderLayer")
COMPILE = Missing(
    "it belongs to the inside of upstream's compiler", "the `compile` section and engine.compile(schedule=...)"
)
IO = Missing("upstream's file classes are not here", "ds_ops.io, or the `checkpoint` section of the configuration")
TIERS = Missing("the class exists for offloaded ZenFlow only", "DeepSpeedCPUAdam")
MICS = Missing(
    "ds-zero cuts for replicas, too", "mics_shard_size of the configuration, or ds_zero.shard(shard_size=...)"
)
INTERNAL = Missing("it belongs to the inside of upstream's engine", "the engine's own methods")
ELASTIC = Missing("the launcher starts ranks again by itself", "`ds run --nnodes MIN:MAX --max-restarts N`")

LOSSY = Missing(
    "compressed sums are chosen by the configuration",
    "zero_optimization.zero_quantized_gradients, a 1-bit optimizer, or ds_comm.codecs",
)
RAGGED = Missing(
    "the ragged engine is made of other parts", "deepspeed.inference.v2 (InferenceEngineV2, build_hf_engine)"
)
QUANTIZED = Missing(
    "weights are quantised when they are loaded", "init_inference(quant=...), or ds_inference.QuantizationOptions"
)
READERS = Missing("a checkpoint resumes on any degree without a converter", "engine.load_checkpoint, or ds_ckpt")
WRITERS = Missing(
    "checkpoints are written by one engine", "the `checkpoint` section of the configuration (saving, writer)"
)
TRANSPORT = Missing("communication goes through torch.distributed; there is no object between", "deepspeed.comm")
LAUNCHER = Missing("ds-launcher starts ranks itself", "`ds run`, or deepspeed.launcher.launch")
EXPERTS = Missing(
    "experts of transformers models are cut in place", "the `expert_parallel` section, or ds_moe.apply_expert_parallel"
)
KERNELS = Missing("kernels are not called by these names", "ds_ops, whose functions choose the kernel of the device")
SPARSE = Missing("its classes are gone in 0.19.8 too", "ds_ops.sparse_attention, which has the same patterns")
QUANTIZER = Missing("quantised tensors are values here", "ds_ops.quant: quantize, dequantize; deepspeed.linear")
BUILDERS = Missing("nothing is compiled when it is first used", "deepspeed.ops.op_builder.<Name>Builder().load()")
CURVATURE = Missing("it is a function of a loss and blocks", "ds_compress.block_eigenvalues")
STAGES = Missing("stages of a pipeline are joined by its program", "ds_pipe, whose links send and receive")
OFFLOAD = Missing(
    "state is moved by tiers, which are no classes of their own",
    "offload_optimizer and offload_param of the configuration",
)
AUTOCAST = Missing("no parameter carries a format of its own", "the `torch_autocast` section; communication_data_type")
MUON = Missing("Muon is one class here", "ds_ops.optim.Muon, or the optimizer section")
DUALPIPE = Missing(
    "a schedule is chosen by name, not by a class of modules", "PipelineModule with `pipeline.schedule` = dualpipe-v"
)
PROFILER = Missing("work is counted where torch runs it", "get_model_profile, or the `flops_profiler` section")
PINNED = Missing("pinned memory belongs to the accelerator", "get_accelerator().pin_memory, or ds_accel.PinnedPool")

TIMERS = Missing("the engine keeps no timers", "wall_clock_breakdown of the configuration, or ds_monitor.span")

MISSING_ATTRIBUTES: Mapping[str, Missing] = {
    "timers": TIMERS,
    "checkpoint_engine": Missing("checkpoints are ds-ckpt's", "save_checkpoint and load_checkpoint"),
    "quantizer": Missing("layers quantise their weights in forward", "quantize_training of the configuration"),
    "sequence_parallel_size": SEQUENCE,
}
"""Attributes of upstream's engine that this one does not have."""
