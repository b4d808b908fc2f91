"""Stands in for ds_zero.config until it lands: the keys that the engine reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_config import Alias, StrictModel

__all__ = ["BF16Config", "DataTypesConfig", "FP16Config", "ZeroConfig"]


class ZeroConfig(StrictModel):
    stage: Literal[0, 1, 2, 3] = 0
    overlap_comm: bool | None = None
    reduce_bucket_size: int = Field(default=500_000_000, ge=0)
    param_persistence_threshold: Annotated[int, Alias("stage3_param_persistence_threshold")] = 100_000


class FP16Config(StrictModel):
    enabled: bool = False
    loss_scale: float = Field(default=0, ge=0)
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1


class BF16Config(StrictModel):
    enabled: bool = False
    check_grad_overflow: bool = True


class DataTypesConfig(StrictModel):
    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None
