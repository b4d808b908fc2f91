"""Upstream's estimators, answered by ds-zero's plan: the sizes that will be, not a rule of thumb. Rank 0 logs them."""

from __future__ import annotations

import logging

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


def _cold(total_params: int, largest_layer_params: int) -> list[ParamInfo]:
    layers = max(1, total_params // max(1, largest_layer_params))
    size = total_params // layers
    return [ParamInfo(f"layer{i}", (size,), "float32", f"layer{i}", 0) for i in range(layers)]


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> int:
    """Estimate and log the peak bytes of model states on a rank at stage 2.

    `additional_buffer_factor` is ignored: the estimate has no buffers to multiply.
    """
    del additional_buffer_factor
    return _estimate(model, 2, num_gpus_per_node * num_nodes)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> int:
    """Estimate and log the peak bytes of model states on a rank at stage 3."""
    del additional_buffer_factor
    return _estimate(model, 3, num_gpus_per_node * num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> int:
    """Estimate and log the peak bytes of model states on a rank at stage 2 for a number of parameters."""
    del additional_buffer_factor
    return _estimate(_cold(total_params, total_params), 2, num_gpus_per_node * num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> int:  # fmt: skip
    """Estimate and log the peak bytes of model states on a rank at stage 3 for a number of parameters.

    The largest layer has `largest_layer_params` parameters.
    """
    del additional_buffer_factor
    return _estimate(_cold(total_params, largest_layer_params), 3, num_gpus_per_node * num_nodes)
