"""From a folder or a module to a generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn

from ds_comm import GroupLike, as_group, self_group
from ds_config.errors import UnsupportedError
from ds_inference.adapters import read_adapter
from ds_inference.cache_size import cache_blocks, usable_device
from ds_inference.cuda_graphs import cuda_graph
from ds_inference.decoder_model import Decoder, refuse_unknown, replay_obstacle
from ds_inference.decoder_weights import Folder, read_config, read_weights, typed_folder_errors, unread
from ds_inference.families import DecoderFamily, ends_of, family_of, undeclared
from ds_inference.hf_runner import HFModelRunner, read_module
from ds_inference.llm_engine import LLMEngine, Tokenizer
from ds_inference.packed_checkpoints import PackedCheckpoint, unpacked
from ds_inference.packed_codes import pack_codes
from ds_inference.quantize import (
    QuantizationOptions,
    Weight,
    as_quantize,
    as_read,
    dequantised,
    keeps_codes,
    laid_out,
    moved,
    quantised,
)
from ds_inference.scheduler import SchedulerConfig
from ds_inference.spec import DecoderSpec
from ds_inference.tensor_parallel import RankShard
from ds_ops.formats import QuantTensor
from ds_ops.host_arena import trim
from ds_ops.product_choice import CodeLayout
from ds_ops.quant import quantize as quantize_rows

__all__ = ["declared", "load", "read_decoder", "refresh_weights"]


@typed_folder_errors
def load(
    source: str | PathLike[str] | nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    cache_tokens: int | None = None,
    gpu_memory_utilization: float = 0.9,
    block_size: int = 16,
    budget: SchedulerConfig | None = None,
    enable_prefix_caching: bool | None = None,
    num_speculative_tokens: int = 0,
    tokenizer: Tokenizer | None = None,
    weights: Mapping[str, Tensor] | None = None,
    quantize: QuantizationOptions | str | None = None,
    native: bool | None = None,
    cache_dtype: torch.dtype | None = None,
    adapters: Mapping[str, str | PathLike[str]] | None = None,
    group: GroupLike = None,
    enable_expert_parallel: bool = False,
    use_module_forward: bool = False,
    cuda_graphs: bool | None = None,
    lookahead: bool | None = None,
) -> LLMEngine:
    """Load an LLM engine from a folder of safetensors or a Hugging Face module.

    A family that is declared (`families`) runs through this package's own forward; any other decoder through its own,
    slower.

    Args:
        source: The folder (`config.json`, `*.safetensors`), or the module; its weights are used in place if dtype and
        device agree.
        dtype: Of weights, and of the KV cache unless `cache_dtype` says otherwise (int8 and float8_e4m3fn: half of bf16); None:
        unchanged.
        device: Of weights and cache; None: of a folder the accelerator where there is one, of a module where it is.
        cache_tokens: The KV cache has room for the keys and values of so many tokens, over all requests. None: 8,192 on a CPU; on an
            accelerator what is free of it after a trial step, as large as `budget` allows.
        gpu_memory_utilization: The part of the accelerator's memory that weights, steps and cache may take together, where
            `cache_tokens` is None.
        block_size: Tokens of a block.
        budget, enable_prefix_caching, num_speculative_tokens, tokenizer, lookahead: See `LLMEngine`.
        weights: Source of the tensors, by the names of a checkpoint; None: from `source`.
        quantize: Weights of few bits: a `QuantizationOptions`, or the name of a format; None: unchanged. Each weight is
        quantized when
            it is read.
        native: Run the native layer loop of the CPU where it supports all that the model needs; weights are packed for
        the loop, so that
            later changes of a module have no effect. None: for folders, and where weights are quantized; not with
            adapters.
        adapters: Names and folders of LoRA adapters that requests may select.
        group: Tensor-parallel ranks; all of them make the same calls (`rank_worker`). None: this rank only.
        enable_expert_parallel: Whole experts are distributed over the group's ranks, instead of sharding each expert.
        use_module_forward: The module runs through its own forward, declared or not, and its weights are not read here:
        for a module
            whose parameters are gathered and released (ZeRO-Inference: `ds_zero.shard(model, stage=3,
            offload_params=...)` before).
        cuda_graphs: Capture steps that only decode as CUDA graphs, here, one for each of some numbers of requests (1, 2, 4, 8, then by 8
            or 16), and as many for drafts; and replay them. Costs the memory of the largest; weights may then change their values, but
            not their addresses. None: on a CUDA device, where the model can: not experts whose product asks the host, not ranks that
            meet by another backend than NCCL, not through its own forward.
    Raises:
        UnsupportedError: CUDA graphs where there is no CUDA device, or of such a model ("inference-cuda-graph");
            this family of models is not declared, and it does not run through its own forward either
            ("inference-family", "inference-foreign"), or it shall be quantized or native ("inference-family"); its
            layers have states
            and it shall share prefixes or speculate ("inference-states"); the folder's codes are of an unknown packing
            ("inference-packed").
        CheckpointError: the folder lacks a file or tensor ("inference-folder", "inference-missing").
    """
    decoder = read_decoder(
        source,
        dtype=dtype,
        device=device,
        weights=weights,
        length=budget.max_model_len if budget else None,
        quantize=quantize,
        native=False if native is None and cache_dtype == torch.float8_e4m3fn else native,
        adapters=adapters,
        group=group,
        by_expert=enable_expert_parallel,
        own_forward=use_module_forward,
        graphs=cuda_graphs,
    )
    if decoder.device.type == "cpu":
        trim()  # what reading and quantising took is free only now
    return LLMEngine(
        decoder,
        blocks=cache_blocks(decoder, block_size, cache_dtype, cache_tokens, gpu_memory_utilization, budget),
        size=block_size,
        budget=budget,
        enable_prefix_caching=enable_prefix_caching,
        num_speculative_tokens=num_speculative_tokens,
        tokenizer=tokenizer,
        cache_dtype=cache_dtype,
        lookahead=lookahead,
    )


@typed_folder_errors
def read_decoder(
    source: str | PathLike[str] | nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: Mapping[str, Tensor] | None = None,
    length: int | None = None,
    quantize: QuantizationOptions | str | None = None,
    native: bool | None = None,
    adapters: Mapping[str, str | PathLike[str]] | None = None,
    group: GroupLike = None,
    by_expert: bool = False,
    own_forward: bool = False,
    graphs: bool | None = None,
) -> Decoder | HFModelRunner:
    """Load the runner of a folder or module; arguments and errors are those of `load`."""
    if isinstance(source, nn.Module):
        config: dict[str, Any] = source.config.to_dict()  # type: ignore[operator, union-attr]
        checkpoint: Mapping[str, Weight] = source.state_dict() if weights is None else weights
    else:
        config = read_config(source)
        checkpoint = unpacked(Folder(source), config) if weights is None else weights
    if device is not None or not isinstance(source, nn.Module):
        device = usable_device(device)
    how = as_quantize(quantize)
    wanted = {"quantize": how, "native": native, "adapters": adapters, "group": group, "graphs": graphs}
    more = [name for name, value in wanted.items() if value]
    if own_forward:
        if more:
            raise UnsupportedError(
                f"{', '.join(more)} for a module that runs through its own forward",
                code="inference-foreign",
                fix="Leave own_forward out, or these.",
            )
        return HFModelRunner(read_module(source, dtype, device, weights))
    try:
        family, spec = declared(config, checkpoint)
    except UnsupportedError:
        if more:
            raise
        return HFModelRunner(read_module(source, dtype, device, weights))
    spec = replace(spec, eos_ids=_ends(source, spec.eos_ids))

    if native and adapters:
        raise UnsupportedError(
            "the native loop with adapters",
            code="inference-native",
            fix="Leave native out.",
        )
    place = None if group is None else as_group(group)
    cut = None if place is None or place.size == 1 else RankShard(spec, place.rank, place.size, by_expert)
    if dtype is None and isinstance(checkpoint, PackedCheckpoint):
        dtype = checkpoint.dtype

    rounds = how is not None and how.activations == "fp8"

    def keep(role: str, weight: Weight) -> Weight | None:
        if cut is not None:
            part = cut.part(role, dequantised(weight))
            if part is None:
                return None
            weight = part
        elif (
            isinstance(weight := as_read(role, weight), QuantTensor)
            and keeps_codes(weight, device)
            and (how is None or how.spec(weight.cols) == weight.spec)
        ):
            return laid_out(moved(weight, device), dtype or weight.dtype, rounded=rounds)
        tensor = dequantised(weight)
        wanted = tensor.dtype if dtype is None or role.endswith("correction") else dtype
        whole = tensor.detach().to(device=device, dtype=wanted)
        return whole.contiguous() if how is None else laid_out(quantised(role, whole, how), wanted, rounded=rounds)

    sources = family.sources(config)
    usual = how is not None or not isinstance(source, nn.Module)
    read = read_weights(spec, sources, checkpoint, keep)
    where = cast("Tensor", read["embed.weight"]).device
    there = where.type == "cuda"
    if graphs and not there:
        raise UnsupportedError(
            "CUDA graphs for a model that is not on a CUDA device",
            code="inference-cuda-graph",
            fix="Leave graphs (enable_cuda_graph) out, or load the model onto a CUDA device.",
        )
    recorded = there if graphs is None else graphs
    if graphs is None and replay_obstacle(spec, read, self_group() if cut is None else as_group(place)):
        recorded = False
    decoder = Decoder(
        spec if cut is None else cut.spec(),
        read,
        None if length is None else min(length, spec.max_seq_len),
        native=native if native is not None else usual and not adapters,
        rounded=how is not None and how.activations == "int8",
        cut=cut,
        group=place,
        record=cuda_graph(where) if recorded else None,
    )
    for name, folder in (adapters or {}).items():
        if cut is not None:
            raise UnsupportedError(
                f"adapter {name!r} on {cut.size} ranks",
                code="inference-adapter",
                fix="Use one rank, or merge the adapter.",
            )
        adapter = read_adapter(folder, spec, sources, decoder.dtype, decoder.device)
        adapter.check(folder, decoder.weights)
        decoder.adapters[name] = adapter
    return decoder


def declared(config: Mapping[str, Any], checkpoint: Mapping[str, Weight]) -> tuple[DecoderFamily, DecoderSpec]:
    """Return the family of a configuration, and what it means for these weights.

    Raises:
        UnsupportedError: the family or this variant is not declared, or has a part that `Decoder` does not compute ("inference-family",
            "rotary-scaling").
    """
    family = family_of(config)
    spec = family.spec(config)
    refuse_unknown(spec)
    if left := unread(spec, family.sources(config), checkpoint):
        raise undeclared(f"a {spec.family} model with {', '.join(left[:4])}{' and more' if left[4:] else ''}")
    return family, spec


def _ends(source: str | PathLike[str] | nn.Module, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that end an answer: of the generation configuration, as `generate` reads it; else `default`, of the model's own.

    Models that were taught to chat end a turn with tokens that only the former names (Phi-3, Qwen 2.5).
    """
    if isinstance(source, nn.Module):
        defaults = getattr(source, "generation_config", None)
        return ends_of({"eos_token_id": getattr(defaults, "eos_token_id", None)}) or default
    return ends_of(read_config(source, "generation_config.json")) or default


@torch.no_grad()
def refresh_weights(decoder: Decoder | HFModelRunner, source: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy new values into a runner's weights, one role at a time, where they are: caches and captured graphs stay valid.

    Keys and values of the old weights are not dropped here, see `LLMEngine.weights_changed`. The runner's tensors are written, whoever else
    has them. Valid on the current stream.

    Args:
        source: A module of the configuration that the runner was read from.
        weights: By the names of the module's checkpoint, each asked for once; those of a role are in memory at a time.
    Raises:
        UnsupportedError: the native loop has packed the weights ("inference-native"), or torch's int4 product has ("inference-quantize").
        CheckpointError: a tensor is missing ("inference-missing").
    """
    if isinstance(decoder, HFModelRunner):
        for name, target in decoder.module.state_dict().items():
            target.copy_(weights[name])
        return
    if not decoder.obstacle:
        raise UnsupportedError(
            "new values for weights that the native loop has packed",
            code="inference-native",
            fix="Load with native=False, or load again.",
        )
    config: dict[str, Any] = source.config.to_dict()  # type: ignore[operator, union-attr]
    whole = decoder.spec if decoder.cut is None else decoder.cut.whole

    def write(role: str, weight: Weight) -> Weight | None:
        values = dequantised(weight)
        part = values if decoder.cut is None else decoder.cut.part(role, values)
        if part is None:
            return None
        target = decoder.weights[role]
        if isinstance(target, Tensor):
            return target.copy_(part)
        fresh = part.to(device=target.codes.device, dtype=target.dtype).contiguous()
        if isinstance(target, QuantTensor):
            return quantize_rows(fresh, target.spec, rows=target.rows, out=target)
        if target.layout is CodeLayout.TINYGEMM:
            raise UnsupportedError(
                f"new values for {role}, whose codes torch's int4 product reads with scales of bf16",
                code="inference-quantize",
                fix="Load again, or set DS_OPS=triton or DS_OPS=reference: codes then stay as they are.",
            )
        packed = pack_codes(quantize_rows(fresh, target.spec, rows=target.rows), target.layout)
        target.codes.copy_(packed.codes)
        target.params.copy_(packed.params)
        return target

    read_weights(whole, family_of(config).sources(config), weights, write)
