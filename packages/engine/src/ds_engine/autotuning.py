"""The section `autotuning`. Its keys are checked; what it asks for is not built. Models only; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ds_config import StrictModel

__all__ = ["AutotuningConfig"]

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]


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
