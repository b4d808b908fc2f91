"""Upstream's estimators, answered by ds-zero's plan: the sizes that will be, not a rule of thumb. Rank 0 logs them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from ds_comm import world_group
from ds_zero import ShardOptions, plan
from ds_zero.layout.units import ParamInfo

_log = logging.getLogger("DeepSpeed")


def _estimate(model: nn.Module | list[ParamInfo], stage: int, ranks: int) -> int:
    memory_plan = plan(model, ranks, ShardOptions(stage=stage, precision="bf16"))
    if world_group().rank == 0:
        _log.info("model states at stage %d, bf16 with fp32 masters and Adam:\n%s", stage, memory_plan)
    return memory_plan.peak


def _cold(total_params: float, largest_layer_params: float) -> list[ParamInfo]:
    layers = max(1, int(total_params // max(1, largest_layer_params)))
    size = int(total_params // layers)
    return [ParamInfo(f"layer{i}", (size,), "float32", "", 0) for i in range(layers)]


def _estimates(
    stage: int, of: str, sizes: Callable[..., nn.Module | list[ParamInfo]], count: int
) -> Callable[..., int]:
    """Build the estimator of a stage: the peak bytes of a rank, for what `sizes` makes of the first `count` arguments."""

    def estimate(*args: Any, **options: Any) -> int:
        names = ("num_gpus_per_node", "num_nodes", "additional_buffer_factor")
        settings = {"num_gpus_per_node": 1, "num_nodes": 1} | dict(zip(names, args[count:], strict=False))
        settings |= {name: options.pop(name) for name in names if name in options}
        return _estimate(sizes(*args[:count], **options), stage, settings["num_gpus_per_node"] * settings["num_nodes"])

    estimate.__name__ = estimate.__qualname__ = f"estimate_zero{stage}_model_states_mem_needs_all_{of}"
    estimate.__doc__ = f"""Estimate and log the peak bytes of model states on a rank at stage {stage}.

    Args: {"model" if of == "live" else "total_params, and at stage 3 largest_layer_params"}, num_gpus_per_node = 1, num_nodes = 1.
    `additional_buffer_factor` is ignored: the estimate has no buffers to multiply.
    """
    return estimate


estimate_zero2_model_states_mem_needs_all_live = _estimates(2, "live", lambda model: model, 1)
estimate_zero3_model_states_mem_needs_all_live = _estimates(3, "live", lambda model: model, 1)
estimate_zero2_model_states_mem_needs_all_cold = _estimates(
    2, "cold", lambda total_params: _cold(total_params, total_params), 1
)
estimate_zero3_model_states_mem_needs_all_cold = _estimates(3, "cold", _cold, 2)
