"""Sections of the schema whose package does not exist yet. Models only; no torch.

Each is checked down to its last key, so that a typo is found and editors complete it. The outermost configuration marks the
section `Unbuilt`: it may be there as long as it is off. When its package is made, the model moves there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ds_config import Dead, StrictModel

__all__ = [
    "AutotuningConfig",
    "CompileConfig",
    "NebulaConfig",
    "PipelineConfig",
    "SparseAttentionConfig",
    "WeightQuantizationConfig",
]

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]


# ---- ds-pipe, stages


class PipelineConfig(StrictModel):
    """`pipeline`: for models made of stages. The model is cut when it is made; the first three keys say what is expected of it."""

    stages: Positive | Literal["auto"] = Field(default="auto", description="Stages that the model must have.")
    partition: str = Field(default="best", description="`partition_method` that the model must have; best is any.")
    seed_layers: bool = Field(default=False, description="Whether the model must have been made with `seed_layers`.")
    activation_checkpoint_interval: Count = Field(
        default=0, description="Layers that keep only their input; 0 as the model says."
    )
    pipe_partitioned: Annotated[bool, Dead("what passes between stages passes whole")] = True
    grad_partitioned: Annotated[bool, Dead("what passes between stages passes whole")] = True
    use_reentrant: Annotated[bool, Dead("layers of a stage are always computed again in one way")] = True


# ---- ds-inference


class WeightQuantizationConfig(StrictModel):
    """`weight_quantization`: frozen weights in int8 or int4. On as soon as it is there, unless it says otherwise."""

    enabled: bool = True
    num_bits: int = 8
    q_type: Literal["symmetric", "asymmetric"] = "symmetric"
    q_groups: Positive = 1
    quantized_initialization: Mapping[str, Any] = Field(default_factory=dict)
    post_init_quant: Mapping[str, Any] = Field(default_factory=dict)


class SparseAttentionConfig(StrictModel):
    """`sparse_attention`."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = "fixed"
    block: Positive = 16
    different_layout_per_head: bool = False
    num_local_blocks: Count = 4
    num_global_blocks: Count = 1
    attention: Literal["bidirectional", "unidirectional"] = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: Count = 1
    num_random_blocks: Count = 0
    local_window_blocks: tuple[int, ...] = (4,)
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    num_sliding_window_blocks: Count = 3


# ---- compile passes, autotuner


class CompileConfig(StrictModel):
    """`compile`."""

    deepcompile: bool = False
    free_activation: bool = False
    free_activation_threshold: Count = 10 * 2**20
    offload_activation: bool = False
    offload_activation_pin_memory: bool = True
    offload_opt_states: bool = False
    double_buffer: bool = True
    symmetric_memory: bool = False
    debug_log: bool = False
    offload_parameters: bool = False
    sync_before_reduce: bool = False
    sync_after_reduce: bool = False
    sync_before_allgather: bool = False
    sync_after_allgather: bool = False
    keep_int_input_tensors: bool = True
    keep_all_input_tensors: bool = False
    passes: tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None = None

    @property
    def enabled(self) -> bool:
        """Whether it asks for something: every other key speaks of it."""
        return self.deepcompile


class ModelInfoConfig(StrictModel):
    """`autotuning.model_info`."""

    profile: bool = False
    num_params: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None


class AutotuningConfig(StrictModel):
    """`autotuning`."""

    enabled: bool = False
    fast: bool = True
    results_dir: Annotated[str, Field(min_length=1)] = "autotuning_results"
    exps_dir: Annotated[str, Field(min_length=1)] = "autotuning_exps"
    overwrite: bool = True
    start_profile_step: Count = 3
    end_profile_step: Count = 5
    metric: Literal["throughput", "latency", "flops"] = "throughput"
    metric_path: str | None = None
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    tuner_early_stopping: Count = 5
    tuner_num_trials: Count = 50
    arg_mappings: Mapping[str, str] | None = None
    max_train_batch_size: int | None = None
    min_train_batch_size: Positive = 1
    max_train_micro_batch_size_per_gpu: Positive = 1024
    min_train_micro_batch_size_per_gpu: Positive = 1
    num_tuning_micro_batch_sizes: Positive = 3
    mp_size: Positive = 1
    model_info: ModelInfoConfig = ModelInfoConfig()
    model_info_path: str | None = None


# ---- what other tiers and stores would read


class NebulaConfig(StrictModel):
    """`nebula`."""

    enabled: bool = False
    persistent_storage_path: str | None = None
    persistent_time_interval: Positive = 100
    num_of_version_in_retention: Positive = 2
    enable_nebula_load: bool = True
    nebula_load_path: str | None = None
