"""What of a model cannot be sharded, or would fail in its first forward with words that blame something else. Pure."""

from __future__ import annotations

import torch
from torch import nn

from ds_config.errors import PlanError, UnsupportedError
from ds_zero.layout.dtypes_plan import Precision
from ds_zero.layout.model_members import named_members

__all__ = ["check_model", "is_scripted"]

_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


_KEYS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Names of formats as configurations have them."""


def is_scripted(model: nn.Module) -> bool:
    """Whether a module of it is scripted or traced by `torch.jit`: its forward takes no hooks, and reads parameters in C++."""
    return any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())


def _check_scripted(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"module {name or '(the model itself)'} is scripted or traced by torch.jit: nothing gathers its parameters before its forward",
                code="zero-scripted",
                fix="Use stage 0, 1 or 2, or pass the module that it was made from; torch.compile works on a sharded model.",
            )


def check_model(model: nn.Module, precision: Precision, ranks: int, *, released: bool) -> None:
    """Raise if the model cannot be sharded over so many ranks, or cannot run in the formats asked for.

    Args:
        released: Whether parameters are with other ranks between uses (stage 3).
    Raises:
        UnsupportedError: a module is scripted, and parameters are released ("zero-scripted"), a weight converts itself for FSDP2's all-gather ("zero-fsdp-gather"), a
            parameter of several ranks is complex ("zero-complex"), an embedding of several ranks writes to its weight in forward
            ("zero-max-norm").
        PlanError: a norm's buffers have another format than its weights will have ("zero-buffer-format").
    """
    if released:
        _check_scripted(model)
    _check_gather_hooks(model)
    if ranks > 1:
        _check_complex(model)
        _check_max_norm(model)
    _check_norms(model, precision)


def _check_gather_hooks(model: nn.Module) -> None:
    # torchao's weights for `enable_fsdp_float8_all_gather`: FSDP2 calls them around its all-gather, no other library does.
    names = [name for name, param in named_members(model).items() if hasattr(param, "fsdp_pre_all_gather")]
    if names:
        raise UnsupportedError(
            f"{', '.join(names[:5])}: weights that convert themselves for FSDP2's all-gather (enable_fsdp_float8_all_gather)",
            code="zero-fsdp-gather",
            fix="Convert the model without enable_fsdp_float8_all_gather; zero_quantized_weights (quantized_comm of shard) sends weights as 8 bits.",
        )


def _check_complex(model: nn.Module) -> None:
    names = [name for name, param in named_members(model).items() if param.is_complex() and param.requires_grad]
    if names:
        raise UnsupportedError(
            f"{', '.join(names[:5])}: complex parameters cannot be summed over ranks",
            code="zero-complex",
            fix="Keep real and imaginary parts in a real parameter of shape [..., 2], and use torch.view_as_complex(param) in forward.",
        )


def _check_max_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise UnsupportedError(
                f"{name} has max_norm={module.max_norm}: its forward writes to rows of its weight, on each rank to those of its batch",
                code="zero-max-norm",
                fix="Leave max_norm out, and clip the norms of rows in forward (F.embedding of a renormed weight), where gradients see it.",
            )


def _check_norms(model: nn.Module, precision: Precision) -> None:
    for name, module in model.named_modules():
        if type(module) not in _NORMS or not isinstance(module.weight, nn.Parameter) or module.running_mean is None:
            continue
        param = precision.resolve(module.weight.dtype, f"{name}.weight".lstrip(".")).param
        buffer = module.running_mean.dtype
        if param != buffer:
            raise PlanError(
                f"{name or 'the model'}, a {type(module).__name__}, would have weights in {_name(param)} and buffers in {_name(buffer)}, "
                "which torch's kernel refuses",
                code="zero-buffer-format",
                fix=f'Set data_types.buffer_dtype = "{_KEYS.get(param, "fp32")}" in the configuration; without one, call model.to(torch.{_name(param)}) before '
                "`shard`, or give a PrecisionRule that keeps the weights of norms.",
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
