"""From the precision sections of the configuration to the formats that ds-zero works with. Pure."""

from __future__ import annotations

from dataclasses import replace

import torch

from ds_engine.config import Config
from ds_zero import LossScale, Precision

__all__ = ["precision_of", "precision_text"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def precision_of(config: Config) -> Precision:
    """The formats of parameters, of gradients on the way and added up, and the loss scale."""
    formats = Precision(
        reduce=None if config.communication_data_type is None else _DTYPES[config.communication_data_type],
        accumulate=None if config.data_types.grad_accum_dtype is None else _DTYPES[config.data_types.grad_accum_dtype],
    )
    if config.bf16.enabled:
        return replace(formats, param=torch.bfloat16, skip_nonfinite=config.bf16.check_grad_overflow)
    if not config.fp16.enabled:
        return formats
    fp16 = config.fp16
    scale = LossScale(
        static=fp16.loss_scale or None,
        initial=2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        minimum=fp16.min_loss_scale,
        hysteresis=fp16.hysteresis,
        consecutive=fp16.consecutive_hysteresis,
    )
    return replace(formats, param=torch.float16, scale=scale, skip_nonfinite=True)


def precision_text(precision: Precision) -> str:
    """One line for the plan."""

    def name(dtype: torch.dtype | None, default: str) -> str:
        return default if dtype is None else str(dtype).removeprefix("torch.")

    text = (
        f"parameters {name(precision.param, 'as the model')}, gradients travel {name(precision.reduce, 'as parameters')}"
        f", add up {name(precision.accumulate, 'float32')}"
    )
    if precision.scale is None:
        return text
    static = precision.scale.static
    return text + (f", loss scale {static:g}" if static else f", loss scale from {precision.scale.initial:g}")
