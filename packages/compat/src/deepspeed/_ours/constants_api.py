"""Small modules of upstream that programs import a name or two of: names of parameters, layer drop, reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed._ours.deepspeed_engine import DeepSpeedEngine
from deepspeed._ours.offload_enums import OffloadStateTypeEnum
from ds_comm import as_group, reduce_scatter_single
from ds_engine.feature_table import LayerDropConfig
from ds_zero import safe_get_local_fp32_param, safe_get_local_grad, safe_get_local_optimizer_state

__all__ = [
    "ProgressiveLayerDrop", "all_to_all_loco_quant_reduce", "all_to_all_quant_reduce", "debug_clear_module_and_param_names", "debug_extract_module_and_param_names",
    "debug_module2name", "debug_module2name_class", "debug_param2name",
    "debug_param2name_id", "debug_param2name_id_shape",
    "get_state_devices",
    "print_rank", "print_rank0", "reduce_scatter_coalesced",
]  # fmt: skip


class ProgressiveLayerDrop:
    """How likely a layer is kept, by the engine's rule (`progressive_layer_drop`)."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta, self.gamma, self.current_theta = theta, gamma, 1.0

    def get_state(self) -> dict[str, Any]:
        """Return the keyword arguments for a model's forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        """Return theta of the last updated step."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Go to a step."""
        self.current_theta = LayerDropConfig(enabled=True, theta=self.theta, gamma=self.gamma).keep(global_step)


def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Reduce-scatter the average of every rank's `tensors`. Collective.

    The shards are flat and in order; the last ranks' shards may be shorter.
    """
    ranks = as_group(group)
    shards = []
    for tensor in tensors:
        part = -(-tensor.numel() // ranks.size)
        padded = nn.functional.pad(tensor.reshape(-1) / ranks.size, (0, part * ranks.size - tensor.numel()))
        out = padded.new_empty(part)
        reduce_scatter_single(out, padded, group=ranks)
        shards.append(out[: max(0, min(part, tensor.numel() - ranks.rank * part))])
    return shards


def all_to_all_quant_reduce(tensors: Sequence[Tensor], groups: Mapping[str, Any]) -> list[Tensor]:
    """`reduce_scatter_coalesced` over all ranks: exact, as upstream's for tensors that cannot be coded. Collective."""
    del groups
    return reduce_scatter_coalesced(tensors)


def all_to_all_loco_quant_reduce(
    params: Sequence[nn.Parameter], groups: Mapping[str, Any], loco_param: Any = None
) -> list[Tensor]:
    """Reduce-scatter the average of gradients, exact: without rounding there is no error to feed back. Collective."""
    del loco_param
    return all_to_all_quant_reduce([param.grad for param in params if param.grad is not None], groups)


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


# ---- `deepspeed.utils.debug`: names of modules and parameters, once `debug_extract_module_and_param_names` saw a model


_modules: dict[int, str] = {}
_params: dict[int, str] = {}


def debug_clear_module_and_param_names() -> None:
    """Forget all names."""
    _modules.clear()
    _params.clear()


def debug_extract_module_and_param_names(model: nn.Module) -> None:
    """Register the names of a model's modules and parameters."""
    _modules.update({id(module): name for name, module in model.named_modules()})
    _params.update({id(param): name for name, param in model.named_parameters()})


def debug_module2name(module: nn.Module) -> str:
    """Return the registered name of a module, or `unknown`."""
    return _modules.get(id(module), "unknown")


def debug_module2name_class(module: nn.Module) -> str:
    return f"name={debug_module2name(module)} {type(module).__name__}"


def debug_param2name(param: Tensor) -> str:
    """Return the registered name of a parameter, or `unknown`."""
    return _params.get(id(param), "unknown")


def debug_param2name_id(param: Tensor) -> str:
    return f"name={debug_param2name(param)} id={getattr(param, 'ds_id', None)}"


def debug_param2name_id_shape(param: Tensor) -> str:
    return f"{debug_param2name_id(param)} shape={tuple(getattr(param, 'ds_shape', param.shape))}"


def print_rank(*msg: object, force: bool = False) -> None:
    """Print on every rank, with its number; only if `force`."""
    if force:
        print(f"[rank {dist.get_rank() if dist.is_initialized() else 0}]", *msg, flush=True)


def print_rank0(*msg: object, force: bool = False) -> None:
    """Print on rank 0; only if `force`."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print_rank(*msg, force=force)
