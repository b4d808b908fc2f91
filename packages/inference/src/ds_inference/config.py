"""What DeepSpeed's two inference engines were configured with, as strict models: every key acts or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, model_validator

from ds_config import Alias, Deprecated, NoEffect, StrictModel, Unsupported

__all__ = ["InferenceConfig", "InferenceTensorParallelConfig", "RaggedConfig"]

Positive = Annotated[int, Field(ge=1)]

_DTYPES = {
    "fp16": torch.float16,
    "half": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float": torch.float32,
    "float32": torch.float32,
}
_CODES = {"int8": torch.int8}
"""Formats of `init_inference` besides these: weights become codes."""


def _dtype(value: Any) -> Any:
    known = {**_DTYPES, **_CODES}
    if isinstance(value, torch.dtype) and (value.is_floating_point or value in _CODES.values()):
        return value
    if isinstance(value, str | torch.dtype):
        name = str(value).removeprefix("torch.")
        if name not in known:
            raise ValueError(f"{value} is no format of weights here; use one of {', '.join(known)}")
        return known[name]
    return value


Dtype = Annotated[torch.dtype, BeforeValidator(_dtype)]


class InferenceTensorParallelConfig(StrictModel):
    """`tensor_parallel` of `init_inference`."""

    enabled: bool = Field(default=True, description="False counts as a size of 1.")
    tp_size: Positive = Field(default=1, description="Ranks that each layer is cut over.")
    tp_grain_size: Annotated[int, NoEffect("layers are cut at whole heads and, in the feed-forward part, evenly")] = 64
    mpu: Any = Field(
        default=None,
        description="Megatron's parallel_state: its model-parallel ranks are `tp_group`, as many `tp_size`.",
    )
    tp_group: Any = Field(default=None, description="The group of these ranks; null: all ranks.")

    @model_validator(mode="before")
    @classmethod
    def _ranks_of_mpu(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("mpu") is None:
            return values
        group = values["mpu"].get_model_parallel_group()
        return {**values, "tp_group": group, "tp_size": group.size()}


class QuantWeightConfig(StrictModel):
    """`quant.weight`."""

    enabled: bool = Field(default=True, description="False: weights stay as they are.")
    num_bits: Literal[4, 8] | None = Field(default=None, description="Of a code; null: weights stay as they are.")
    q_type: Literal["symmetric", "asymmetric"] = Field(default="symmetric", description="Without or with a zero point.")
    q_groups: Positive = Field(default=1, description="Scales of one output of a matrix, each for as many inputs.")
    quantized_initialization: Annotated[
        Mapping[str, Any], Unsupported("give num_bits; weights are quantised one by one")
    ] = Field(default_factory=dict)
    post_init_quant: Annotated[Mapping[str, Any], Unsupported("give num_bits; weights are quantised one by one")] = (
        Field(default_factory=dict)
    )


class QuantActivationConfig(StrictModel):
    """`quant.activation`."""

    enabled: bool = Field(default=True, description="False: products multiply floats.")
    num_bits: Literal[8] | None = Field(default=None, description="8: what products read is rounded to 8 bits, too.")
    q_type: Annotated[str, NoEffect("activations are symmetric")] = "symmetric"
    q_groups: Annotated[int, NoEffect("activations have the groups of the weights")] = 1


class QuantConfig(StrictModel):
    """`quant` of `init_inference`: weights of few bits, for `replace_with_kernel_inject`."""

    enabled: bool = Field(default=True, description="False: nothing is quantised.")
    activation: QuantActivationConfig = Field(
        default_factory=QuantActivationConfig, description="What the products of quantised weights read."
    )
    weight: QuantWeightConfig = Field(default_factory=QuantWeightConfig, description="Of linears and the head.")
    qkv: Annotated[Mapping[str, Any], NoEffect("queries, keys and values are weights as the others")] = Field(
        default_factory=dict
    )


class CheckpointPlace(StrictModel):
    """`checkpoint_config`: three keys in one."""

    checkpoint_dir: str | None = Field(default=None, description="As `checkpoint`.")
    save_mp_checkpoint_path: Annotated[str | None, Unsupported("save_pretrained of the module")] = None
    base_dir: str | None = Field(default=None, description="Before the names of files.")


class InferenceMoEConfig(StrictModel):
    """`moe` of `init_inference`. true and false are `enabled`."""

    enabled: bool = Field(default=True, description="Whether the model has experts; it knows itself.")
    ep_size: Annotated[int, Unsupported("load the model on each rank")] = 1
    moe_experts: Annotated[Any, Alias("num_experts"), NoEffect("the module knows its experts")] = Field(
        default_factory=lambda: [1]
    )
    type: Annotated[str, NoEffect("the module knows its experts")] = "standard"
    ep_mp_group: Annotated[Any, Alias("expert_mp_group"), Unsupported("load the model on each rank")] = None
    ep_group: Annotated[Any, Alias("expert_group"), Unsupported("load the model on each rank")] = None


def _enabled(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else value


class InferenceConfig(StrictModel):
    """What `init_inference` takes."""

    replace_with_kernel_inject: Annotated[bool, Alias("kernel_inject")] = Field(
        default=False,
        description="`generate` runs through the paged engine. A model of a family that is not declared runs as it is, with a warning.",
    )
    dtype: Dtype = Field(
        default=torch.float16,
        description="Format the module is cast to. int8: linears and the head are quantised, as by `quant.weight.num_bits` 8.",
    )
    tensor_parallel: Annotated[InferenceTensorParallelConfig, Alias("tp")] = Field(
        default_factory=InferenceTensorParallelConfig, description="Over how many ranks layers are cut."
    )
    enable_cuda_graph: bool = Field(default=False, description="Capture the forward; needs CUDA and one rank.")
    use_triton: Annotated[bool, NoEffect("the kernels are those of torch and ds-ops")] = False
    triton_autotune: Annotated[bool, NoEffect("the kernels are those of torch and ds-ops")] = False
    zero: Annotated[Mapping[str, Any], Unsupported("shard the module with ds_zero.shard(model, stage=3)")] = Field(
        default_factory=dict
    )
    triangular_masking: Annotated[bool, Alias("tm"), NoEffect("the module says what it masks")] = True
    moe: Annotated[InferenceMoEConfig, BeforeValidator(_enabled)] = Field(
        default_factory=InferenceMoEConfig, description="Accepted for models that have experts themselves."
    )
    keep_module_on_host: bool = Field(default=False, description="Do not move the module to the device.")
    quant: QuantConfig = Field(default_factory=QuantConfig, description="Weights of few bits.")
    checkpoint: str | Mapping[str, Any] | None = Field(
        default=None,
        description="A folder, a descriptor's path, or a descriptor: weights for the module, which may be on meta.",
    )
    base_dir: str = Field(default="", description="Before the names of a descriptor's files.")
    set_empty_params: Annotated[bool, NoEffect("build the module on meta and give a checkpoint")] = False
    save_mp_checkpoint_path: Annotated[str | None, Unsupported("save_pretrained of the module")] = None
    checkpoint_config: Annotated[CheckpointPlace, Alias("ckpt_config")] = Field(
        default_factory=CheckpointPlace, description="`checkpoint` and `base_dir` in one object."
    )
    return_tuple: Annotated[bool, NoEffect("the module returns what it always returned")] = True
    training_mp_size: Annotated[int, NoEffect("checkpoints hold whole tensors")] = 1
    injection_policy: Annotated[Mapping[Any, Any] | None, Alias("injection_dict")] = Field(
        default=None, description="{class: names of its row-parallel linears}."
    )
    injection_policy_tuple: tuple[str, ...] | None = Field(default=None, description="The names alone.")
    config: Annotated[Mapping[str, Any] | None, Alias("args"), Unsupported("give the module its configuration")] = None
    max_out_tokens: Annotated[int, Alias("max_tokens")] = Field(
        default=1024, description="Most tokens of a sequence, prompt and answer."
    )
    min_out_tokens: Annotated[int, Alias("min_tokens")] = Field(
        default=1, description="Room for at least so many tokens in an answer."
    )
    transposed_mode: Annotated[bool, NoEffect("weights are taken as the module has them")] = False
    mp_size: Annotated[int, Deprecated("tensor_parallel.tp_size")] = 1
    mpu: Annotated[Any, Deprecated("tensor_parallel.mpu")] = None
    ep_size: Annotated[int, Unsupported("load the model on each rank")] = 1
    ep_group: Annotated[Any, Alias("expert_group"), Unsupported("load the model on each rank")] = None
    ep_mp_group: Annotated[Any, Alias("expert_mp_group"), Unsupported("load the model on each rank")] = None
    moe_experts: Annotated[Any, NoEffect("the module knows its experts")] = Field(default_factory=lambda: [1])
    moe_type: Annotated[str, NoEffect("the module knows its experts")] = "standard"
    replace_method: Annotated[str, NoEffect("there is one method")] = "auto"


class MemoryConfig(StrictModel):
    """`state_manager.memory_config`."""

    mode: Literal["reserve", "allocate"] = Field(
        default="reserve", description="reserve: all memory but `size` bytes is the cache; allocate: `size` blocks are."
    )
    size: Positive = Field(default=1_000_000_000, description="Bytes left free, or blocks.")


class StateManagerConfig(StrictModel):
    """`state_manager` of the ragged engine: how much is under way."""

    max_tracked_sequences: Positive = Field(default=2048, description="Sequences that may have tokens in the cache.")
    max_ragged_batch_size: Positive = Field(default=768, description="Tokens of one forward.")
    max_ragged_sequence_count: Positive = Field(default=512, description="Sequences of one forward.")
    max_context: Positive = Field(default=8192, description="Tokens of one sequence.")
    memory_config: MemoryConfig = Field(default_factory=MemoryConfig, description="Size of the cache.")
    offload: Annotated[bool, Unsupported("a smaller cache; what does not fit is computed again")] = False

    @model_validator(mode="after")
    def _fits(self) -> StateManagerConfig:
        count = self.max_ragged_sequence_count
        for name in ("max_ragged_batch_size", "max_tracked_sequences"):
            if "max_ragged_sequence_count" in self.model_fields_set and count > getattr(self, name):
                raise ValueError(f"max_ragged_sequence_count is {count}, {name} {getattr(self, name)}: raise it")
        return self


class _TpSize(StrictModel):
    """`tensor_parallel` of the ragged engine."""

    tp_size: Positive = Field(default=1, description="Ranks that each layer is cut over.")


class InferenceQuantizationConfig(StrictModel):
    """`quantization` of the ragged engine."""

    quantization_mode: Literal["wf6af16", "int8", "int4", "fp8"] | None = Field(
        default=None,
        description="Format of weights: wf6af16 is 6-bit floats with one scale an output, the others have a scale for 128 inputs.",
    )


class RaggedConfig(StrictModel):
    """What `build_hf_engine` takes (`RaggedInferenceEngineConfig`)."""

    tensor_parallel: Annotated[_TpSize, Alias("tp")] = Field(
        default_factory=_TpSize, description="Over how many ranks."
    )
    state_manager: Annotated[StateManagerConfig, Alias("manager")] = Field(
        default_factory=StateManagerConfig, description="How much is under way."
    )
    quantization: InferenceQuantizationConfig = Field(
        default_factory=InferenceQuantizationConfig, description="Of weights."
    )
