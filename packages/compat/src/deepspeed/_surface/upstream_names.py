"""The names of DeepSpeed 0.19.8 that the table decides nothing about: each is refused, for the reason of the part of DeepSpeed it is in.

`upstream.json` has all of them; `tools/upstream.py` makes it from DeepSpeed's sdist. It is read when a name is first asked for that has no row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from deepspeed._surface import refusals as r
from deepspeed._surface.surface_rows import Missing

__all__ = ["configuration_fields", "reason_of", "refused_name", "upstream_modules"]

_CONSTANT = Missing("a constant of upstream's own code", "the text of the key, or a value of your own")
# Modules of earlier releases that programs still name, below the package.
_EARLIER = (
    "compression.config compression.constants compression.utils elasticity.elastic_agent nebula ops.sparse_attention.matmul "
    "ops.sparse_attention.bert_sparse_self_attention ops.sparse_attention.softmax ops.sparse_attention.sparse_attention_utils "
    "ops.sparse_attention.sparse_self_attention ops.sparse_attention.sparsity_config ops.sparse_attention.trsrc "
    "runtime.checkpoint_engine.nebula_checkpoint_engine runtime.comm.compressed runtime.comm.hccl runtime.comm.mpi runtime.comm.nccl "
    "runtime.comm.utils runtime.compression runtime.eigenvalue runtime.quantize runtime.zero.mics_utils"
)
# Beginnings of paths below the package. The longest counts; all else belongs to the inside of the engine.
_REASONS: Mapping[Missing, str] = {
    r.AUTOCAST: "runtime.torch_autocast",
    r.BUILDERS: "ops.op_builder",
    r.COMPILE: "compile runtime.compiler",
    r.COMPRESS: "compression runtime.quantize",
    r.CURVATURE: "runtime.eigenvalue",
    r.DATA: "runtime.data_pipeline",
    r.DUALPIPE: "DualPipeV pipe.DualPipeV runtime.pipe.dualpipev",
    r.ELASTIC: "elasticity",
    r.EXPERTS: "module_inject.auto_ep moe.ep_ moe.fused_expert_layout checkpoint.autoep",
    r.GATES: "moe",
    r.HYBRID_GRAPH: "runtime.hybrid_engine runtime.rollout",
    r.DOMINO: "runtime.domino domino",
    r.INFERENCE: "model_implementations module_inject inference replace_transformer_layer revert_transformer_layer",
    r.INTERNAL: "",
    r.IO: "io nvme",
    r.KERNELS: "ops",
    r.LAUNCHER: "launcher",
    r.LOSSY: "runtime.compression runtime.comm",
    r.MICS: "runtime.zero.mics zero.MiCS",
    r.MUON: "runtime.zero.muon resolve_per_head_muon",
    r.OFFLOAD: "runtime.superoffload runtime.swap_tensor runtime.zero.offload_states",
    r.PINNED: "utils.pin_memory",
    r.PRESETS: "module_inject.AutoTPPresets module_inject.autotp_config",
    r.PROFILER: "profiling",
    r.QUANTIZED: "inference.quantization runtime.weight_quantizer",
    r.QUANTIZER: "ops.fp_quantizer ops.quantizer linear",
    r.RAGGED: "inference.v2 utils.static_cache",
    r.READERS: "checkpoint",
    r.SEQUENCE: "sequence runtime.sequence_parallel runtime.chunked_cross_entropy",
    r.SPARSE: "ops.sparse_attention",
    r.STAGES: "pipe runtime.pipe",
    r.TENSOR: "module_inject.auto_tp module_inject.layers module_inject.tp_ module_inject.ReplaceWithTensorSlicing runtime.tensor_parallel",
    r.TIERS: "ops.adam.zenflow ops.adam.multi_tensor_apply ops.adam.ZenFlow runtime.zenflow",
    r.TRANSFORMER: "ops.transformer DeepSpeedTransformer ops.DeepSpeedTransformer",
    r.TRANSPORT: "comm",
    r.TUNING: "autotuning",
    r.WRITERS: "datastates nebula runtime.checkpoint_engine runtime.model_checkpointing",
}  # fmt: skip


@cache
def _names() -> Mapping[str, Mapping[str, str]]:
    names: dict[str, dict[str, str]] = json.loads((files(__package__) / "upstream.json").read_text(encoding="utf-8"))
    names["modules"] |= dict.fromkeys((f"deepspeed.{module}" for module in _EARLIER.split()), "")
    return names


@cache
def _reasons() -> list[tuple[str, Missing]]:
    pairs = [(start, reason) for reason, starts in _REASONS.items() for start in (starts.split() or [""])]
    return sorted(pairs, key=lambda pair: -len(pair[0]))


def upstream_modules() -> Mapping[str, str]:
    """Return the modules of DeepSpeed, those of earlier releases too, each with its public names separated by spaces."""
    return _names()["modules"]


def configuration_fields() -> Mapping[str, str]:
    """Return the classes that read DeepSpeed's configuration, each with its keys separated by spaces."""
    return _names()["fields"]


def reason_of(path: str) -> Missing:
    """Return why a module or name of DeepSpeed is not here, and what to use, from its full path."""
    inner = path.removeprefix("deepspeed").removeprefix(".")
    if inner.rpartition(".")[2].isupper():
        return _CONSTANT
    return next(reason for start, reason in _reasons() if inner.startswith(start))


def refused_name(module: str, name: str) -> Missing | None:
    """Return why a name without a row is refused; None where DeepSpeed has neither such a name nor such a module."""
    path = f"{module}.{name}"
    known = path in upstream_modules() or name in upstream_modules().get(module, "").split()
    return reason_of(path) if known else None
