"""`deepspeed.runtime.zero.offload_states`: where a kind of an engine's state lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed._ours.config.section_models import OffloadStateTypeEnum
from deepspeed._ours.training_engine.deepspeed_engine import DeepSpeedEngine
from ds_zero import safe_get_local_fp32_param, safe_get_local_grad, safe_get_local_optimizer_state


def get_state_devices(model: DeepSpeedEngine, state: OffloadStateTypeEnum) -> set[torch.device]:
    """Return the devices of a kind of an engine's state; an empty set while the state is moved away."""
    params = [param for param in model.module.parameters() if param.requires_grad]
    if state is OffloadStateTypeEnum.lp_params:
        tensors: list[Any] = [param.data for param in params]
    elif state is OffloadStateTypeEnum.hp_params:
        tensors = [safe_get_local_fp32_param(param) for param in params]
    elif state is OffloadStateTypeEnum.optim_states:
        tensors = [safe_get_local_optimizer_state(param, key) for param in params for key in ("exp_avg", "exp_avg_sq")]
    else:
        tensors = [safe_get_local_grad(param) for param in params]
    return {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
