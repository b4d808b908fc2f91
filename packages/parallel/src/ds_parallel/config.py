"""The sections `activation_checkpointing` and `tensor_parallel`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ds_config import Alias, StrictModel, Unsupported
from ds_parallel.activation_store import ActivationPolicy
from ds_parallel.tensor.layer_rules import ShardKind
from ds_parallel.tensor.tp_plan import TensorOptions

__all__ = [
    "ActivationCheckpointingConfig",
    "LayerSpecConfig",
    "PartitionConfig",
    "TensorParallelConfig",
    "TensorParallelDegreeConfig",
]


class ActivationCheckpointingConfig(StrictModel):
    """`activation_checkpointing`: what checkpointed calls keep of their inputs, and where.

    It concerns the modules named here, and of calls of `ds_parallel.checkpoint` in the model's own forward.
    """

    partition_activations: bool = Field(
        default=False, description="Each tensor-parallel rank keeps 1/N of every input; backward gathers it."
    )
    cpu_checkpointing: bool = Field(default=False, description="Keep inputs in host memory until backward.")
    contiguous_memory_optimization: bool = Field(
        default=False, description="Keep inputs in buffers that are made once; needs number_checkpoints."
    )
    number_checkpoints: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Buffers of contiguous_memory_optimization: checkpointed calls of one forward."
    )
    synchronize_checkpoint_boundary: bool = Field(
        default=False, description="Wait for the device before and after every checkpointed call."
    )
    profile: bool = Field(
        default=False, description="Report the times of every checkpointed call: forward, recomputation, backward."
    )
    modules: tuple[str, ...] = Field(
        default=(),
        description="Modules whose forward is checkpointed, by name; `*` is any one part of it (`layers.*`), `**` any number.",
    )

    @model_validator(mode="after")
    def _sized(self) -> Self:
        if self.contiguous_memory_optimization and self.number_checkpoints is None:
            raise ValueError(
                "contiguous_memory_optimization needs number_checkpoints: the number of layers, for each of which a buffer is made"
            )
        return self

    @property
    def keeping(self) -> ActivationPolicy:
        """The same as what `ActivationCheckpointing` takes."""
        return ActivationPolicy(
            slices=self.partition_activations,
            host=self.cpu_checkpointing,
            slots=self.number_checkpoints if self.contiguous_memory_optimization else None,
            synchronize=self.synchronize_checkpoint_boundary,
            profile=self.profile,
        )


class LayerSpecConfig(StrictModel):
    """One rule of `tensor_parallel.partition_config.layer_specs`; the first that matches a layer counts."""

    patterns: tuple[str, ...] = Field(
        description="Regular expressions, matched from the start of a parameter's path (`.*\\.o_proj\\.weight$`)."
    )
    partition_type: Literal["column", "row", "skip"] = Field(
        default="column", description="Output features are cut, input features are cut, or the layer stays whole."
    )
    shape: tuple[int | tuple[int, ...], ...] | None = Field(
        default=None,
        description="Parts of a fused weight: `[3, -1]` three equal ones, `[[q, k, v], -1]` parts of these sizes.",
    )
    partition_dim: int | None = Field(default=None, description="The dim that has the parts; 0 for column, 1 for row.")
    model_types: tuple[str, ...] | None = Field(default=None, description="Only for models of these `model_type`s.")
    gather_output: bool = Field(default=False, description="A column layer's whole output is made on every rank.")
    grad_allreduce: bool = Field(
        default=False,
        description="For skip: each rank sees a part of the activations, so gradients are summed over the ranks.",
    )


class PartitionConfig(StrictModel):
    """`tensor_parallel.partition_config`: which layer is cut how."""

    tp_size: Annotated[int, Field(ge=1)] | None = Field(default=None, description="Must be autotp_size, if given.")
    layer_specs: tuple[LayerSpecConfig, ...] = Field(default=(), description="Rules, tried in order.")
    embedding_partition_dim: Literal[0, 1] = Field(
        default=1,
        description="Token embeddings are cut by features (1, given explicitly) or by vocabulary (0, and when left out).",
    )
    lm_head_patterns: tuple[str, ...] = Field(
        default=("lm_head", "embed_out"),
        description="Names of last layers: cut by vocabulary, logits put together on every rank.",
    )
    use_default_specs: bool = Field(
        default=True, description="After these rules, ask the preset, the model's own plan and its structure."
    )
    strict_mode: bool = Field(default=False, description="A linear layer that no rule matches is an error.")


class TensorParallelDegreeConfig(StrictModel):
    """`tensor_parallel.tp`."""

    tp_size: Annotated[int, Field(gt=0)] = Field(default=1, description="Must be 1 or autotp_size.")
    tp_grain_size: Annotated[int, Field(gt=0)] = Field(
        default=1, description="Elements that stay together where a dim is cut evenly."
    )
    mpu: Annotated[Any, Unsupported("leave it out: the engine makes the groups from autotp_size")] = None
    tp_group: Annotated[Any, Unsupported("leave it out: the engine makes the groups from autotp_size")] = None


class TensorParallelConfig(StrictModel):
    """`tensor_parallel`: layers of the model are cut over ranks."""

    autotp_size: Annotated[int, Field(ge=0)] = Field(default=0, description="Tensor-parallel ranks; 0 and 1 are off.")
    dtype: str = Field(
        default="torch.float16", description="If given, it must be the format that the precision sections say."
    )
    tp_overlap_comm: bool = Field(
        default=False,
        description="In backward the all-reduce of a column layer's input gradient travels while gradients of weights are computed.",
    )
    half_batches: bool = Field(
        default=False,
        description="Each layer computes two halves of its batch in turn, one while the all-reduces of the other travel; with tp_overlap_comm.",
    )
    vocab_parallel_lm_head: bool | None = Field(
        default=None,
        description="True leaves logits cut by vocabulary and computes a transformers model's loss from the parts; null and false put them together.",
    )
    vocab_parallel_ce_backend: Annotated[
        Literal["torch", "liger"], Unsupported("torch; the loss of cut logits is one pass without a kernel of its own")
    ] = "torch"
    tp: Annotated[TensorParallelDegreeConfig, Alias("tensor_parallel")] = TensorParallelDegreeConfig()
    injection_policy_tuple: Annotated[tuple[str, ...] | None, Unsupported("partition_config.layer_specs")] = None
    megatron_layers: bool = Field(
        default=False,
        description="The model's layers are parallel by themselves (Megatron's): nothing is cut; marked parameters are parts.",
    )
    preset_model: str | None = Field(
        default=None,
        description="Use the rules of this family (llama, phi3, ...) instead of those of the model's type.",
    )
    partition_config: PartitionConfig | None = Field(default=None, description="Which layer is cut how.")
    keep_module_on_host: Annotated[
        bool, Unsupported("build the model on meta and read weights with ds_parallel.tensor.load_sharded_weights")
    ] = False
    replace_with_kernel_inject: Annotated[
        bool, Alias("kernel_inject"), Unsupported("leave it out: it is an option of inference")
    ] = False

    @property
    def degree(self) -> int:
        """Tensor-parallel ranks."""
        return max(self.autotp_size, 1) if self.autotp_size else self.tp.tp_size

    @property
    def other_degrees(self) -> dict[str, int]:
        """Keys that name another number of ranks than `autotp_size`."""
        degrees = {"tp.tp_size": self.tp.tp_size} if self.tp.tp_size > 1 else {}
        if self.partition_config is not None and self.partition_config.tp_size is not None:
            degrees["partition_config.tp_size"] = self.partition_config.tp_size
        return {key: value for key, value in degrees.items() if value != self.degree}

    @property
    def options(self) -> TensorOptions:
        """The same as what `make_tensor_plan` takes."""
        part = self.partition_config or PartitionConfig()
        by_features = "embedding_partition_dim" in part.model_fields_set and part.embedding_partition_dim == 1
        return TensorOptions(
            degree=self.degree,
            specs=part.layer_specs,
            preset=self.preset_model,
            defaults=part.use_default_specs,
            heads=part.lm_head_patterns,
            grain=self.tp.tp_grain_size,
            strict=part.strict_mode,
            embeddings=ShardKind.FEATURES if by_features else ShardKind.VOCABULARY,
            gather_logits=not self.vocab_parallel_lm_head,
            late_gradients=self.tp_overlap_comm,
            half_batches=self.half_batches,
        )
