"""Sections that say what becomes of a model's layers: stages, attention, weights; and where checkpoints went. Models only; no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ds_config import NoEffect, StrictModel, Unsupported

__all__ = ["FusedKind", "NebulaConfig", "PipelineConfig", "SparseAttentionConfig", "WeightQuantizationConfig"]

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
FusedKind = Literal["norms", "rotary", "gated_mlp", "head"]
"""Layers of transformers models that fused kernels can compute: `kernels`."""


class PipelineConfig(StrictModel):
    """`pipeline`: for models made of stages. The model is cut when it is made; the first three keys say what is expected of it."""

    stages: Positive | Literal["auto"] = Field(default="auto", description="Stages that the model must have.")
    partition: str = Field(default="best", description="`partition_method` that the model must have; best is any.")
    seed_layers: bool = Field(default=False, description="Whether the model must have been made with `seed_layers`.")
    activation_checkpoint_interval: Count = Field(
        default=0, description="Layers that keep only their input; 0 as the model says."
    )
    pipe_partitioned: Annotated[bool, NoEffect("what passes between stages passes whole")] = True
    grad_partitioned: Annotated[bool, NoEffect("what passes between stages passes whole")] = True
    use_reentrant: Annotated[
        bool, NoEffect("either way gives the same numbers; only DeepSpeed's PipelineModule has both")
    ] = True


class SparseAttentionConfig(StrictModel):
    """`sparse_attention`: which blocks of keys a transformers model's attention sees."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = Field(
        default="fixed", description="Which pattern."
    )
    block: Positive = Field(default=16, description="Tokens of a block.")
    different_layout_per_head: bool = Field(default=False, description="Give each head a layout of its own.")
    num_local_blocks: Count = Field(default=4, description="fixed: blocks of a window, inside of which all see all.")
    num_global_blocks: Count = Field(default=1, description="fixed, bigbird: blocks that all others see.")
    attention: Literal["bidirectional", "unidirectional"] = Field(
        default="bidirectional", description="unidirectional: no token sees a later one."
    )
    horizontal_global_attention: bool = Field(default=False, description="Blocks that all others see, see all.")
    num_different_global_patterns: Count = Field(
        default=1, description="fixed: as many heads differ in which blocks of a window are seen by all."
    )
    num_random_blocks: Count = Field(default=0, description="variable, bigbird: drawn for each row of blocks.")
    local_window_blocks: tuple[int, ...] = Field(
        default=(4,), description="variable: sizes of windows; the last one repeats."
    )
    global_block_indices: tuple[int, ...] = Field(
        default=(0,), description="variable, bslongformer: blocks that all others see, or where ranges of them begin."
    )
    global_block_end_indices: tuple[int, ...] | None = Field(default=None, description="Where these ranges end.")
    num_sliding_window_blocks: Count = Field(
        default=3, description="bigbird, bslongformer: blocks of a sliding window."
    )

    @model_validator(mode="after")
    def _ranges(self) -> SparseAttentionConfig:
        ends = self.global_block_end_indices
        if ends is not None and (
            len(ends) != len(self.global_block_indices)
            or any(b >= e for b, e in zip(self.global_block_indices, ends, strict=True))
        ):
            raise ValueError(
                f"global_block_end_indices {ends} do not end the ranges that begin at {self.global_block_indices}"
            )
        return self


class LayerQuantization(StrictModel):
    """How matrices are quantised."""

    num_bits: Literal[4, 8] = Field(default=8, description="Bits of a code.")
    group_size: Positive = Field(default=128, description="Inputs of one output that share a scale, a multiple of 8.")
    group_dim: Annotated[int, Unsupported("group_dim = 1: groups lie along a row")] = 1
    symmetric: bool = Field(default=True, description="Without zero points.")

    @model_validator(mode="after")
    def _whole_bytes(self) -> LayerQuantization:
        if self.group_size % 8:
            raise ValueError(f"group_size = {self.group_size} is not a multiple of 8")
        return self


class WeightQuantizationConfig(StrictModel):
    """`weight_quantization`: frozen linear layers keep their weights as codes. On as soon as it is there, unless it says otherwise."""

    enabled: bool = Field(default=True, description="Quantise frozen weights.")
    num_bits: Literal[4, 8] = Field(default=8, description="Bits of a code, where nothing else is said of a layer.")
    q_type: Literal["symmetric", "asymmetric"] = Field(default="symmetric", description="Without or with zero points.")
    q_groups: Positive = Field(default=1, description="Fewest groups of a matrix; a row has at least one.")
    quantized_initialization: LayerQuantization | None = Field(
        default=None, description="The same for all frozen layers."
    )
    post_init_quant: dict[str, LayerQuantization] = Field(
        default_factory=dict, description="Only layers whose names contain one of these keys, each in its way."
    )

    def of_layer(self, name: str, shape: tuple[int, ...]) -> tuple[int, int, bool] | None:
        """Return bits, group size and symmetry for a layer with a weight of `shape`; None: not quantized."""
        rows, cols = shape
        how = next((how for key, how in self.post_init_quant.items() if key in name), None)
        if how is None and self.post_init_quant:
            return None
        how = how or self.quantized_initialization
        if how is not None:
            return how.num_bits, min(how.group_size, -(-cols // 8) * 8), how.symmetric
        group = min(cols, max(1, rows * cols // self.q_groups))
        return self.num_bits, max(8, -(-group // 8) * 8), self.q_type == "symmetric"


class NebulaConfig(StrictModel):
    """`nebula`: refused; asynchronous saves are `checkpoint.saving.asynchronous`."""

    enabled: bool = Field(default=False, description="Save behind the steps.")
    persistent_storage_path: str | None = Field(default=None, description="Where checkpoints go.")
    persistent_time_interval: Positive = Field(default=100, description="Seconds between two of them.")
    num_of_version_in_retention: Positive = Field(default=2, description="How many are kept.")
    enable_nebula_load: bool = Field(default=True, description="Load from there.")
    nebula_load_path: str | None = Field(default=None, description="Where they are loaded from.")
