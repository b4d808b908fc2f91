"""The section `autotuning`: what a run measures before it ends, and how `ds tune` looks for more. Models only; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ds_config import StrictModel

__all__ = ["AutotuningConfig"]

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]


class ModelInfoConfig(StrictModel):
    """`autotuning.model_info`: what is known of the model, or is to be written down."""

    profile: bool = Field(default=False, description="Write the facts after the first step, and end.")
    num_params: int | None = Field(
        default=None, description="Parameters; the tuner then leaves out what cannot fit at once."
    )
    hidden_size: int | None = Field(
        default=None, description="Width; gives sizes of stage 3's buckets where `fast` is false."
    )
    num_layers: int | None = Field(
        default=None, description="Layers; the largest is taken for one of so many equal ones."
    )


class AutotuningConfig(StrictModel):
    """`autotuning`."""

    enabled: bool = Field(default=False, description="A run measures its steps, writes its metrics and ends.")
    fast: bool = Field(
        default=True, description="Look at microbatches and ZeRO stages; false: at sizes of buckets, too."
    )
    results_dir: Annotated[str, Field(min_length=1)] = Field(
        default="autotuning_results", description="Folder of what came of each trial, and of the best configuration."
    )
    exps_dir: Annotated[str, Field(min_length=1)] = Field(
        default="autotuning_exps", description="Folder of what was tried, a file each."
    )
    overwrite: bool = Field(default=True, description="Try again what the folders have results of; false goes on.")
    start_profile_step: Count = Field(default=3, description="First step that is measured.")
    end_profile_step: Count = Field(default=5, description="Last step that is measured.")
    metric: Literal["throughput", "latency", "flops"] = Field(
        default="throughput", description="Samples a second, time of a step (less is better), or operations a second."
    )
    metric_path: str | None = Field(
        default=None, description="File of a run's metrics; by default autotuning_metric.json where it runs."
    )
    tuner_type: Literal["gridsearch", "random", "model_based"] = Field(
        default="gridsearch", description="Order of the trials: of a grid, drawn, or the best predicted first."
    )
    tuner_early_stopping: Count = Field(
        default=5, description="End after so many trials without a better one; 0: never."
    )
    tuner_num_trials: Count = Field(default=50, description="Trials at most; at least one is made.")
    arg_mappings: Mapping[str, str] | None = Field(
        default=None, description="Options of the script that get a value of the configuration, by key."
    )
    max_train_batch_size: int | None = Field(default=None, description="Most samples of a step; null: any number.")
    min_train_batch_size: Positive = Field(default=1, description="Least samples of a step.")
    max_train_micro_batch_size_per_gpu: Positive = Field(default=1024, description="Most samples of a forward.")
    min_train_micro_batch_size_per_gpu: Positive = Field(default=1, description="Least samples of a forward.")
    num_tuning_micro_batch_sizes: Positive = Field(
        default=3, description="How many sizes of a microbatch are looked at."
    )
    mp_size: Positive = Field(
        default=1, description="Ranks of the script's own model parallelism, which share samples."
    )
    model_info: ModelInfoConfig = Field(default=ModelInfoConfig(), description="What is known of the model.")
    model_info_path: str | None = Field(
        default=None, description="File of the facts; by default autotuning_model_info.json where it runs."
    )
