"""`deepspeed.utils.debug`: names of modules and parameters, once `debug_extract_module_and_param_names` saw a model."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

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
