"""Moving the model to its device, and batches to where the model is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_accel import streams
from ds_engine.mixed_precision import Casting
from ds_zero.runtime.init_shards import is_scattered
from ds_zero.runtime.sharded_parameter import keeper_of

__all__ = ["placed", "to_device"]


@contextmanager
def placed(model: nn.Module, device: torch.device, casting: Casting) -> Iterator[None]:
    """Move `model` to `device`, and back if the body raises; its floating-point buffers get the formats of `casting`."""
    params = [(p, p.device) for p in model.parameters()]
    before = [(m, name, buffer) for m in model.modules() for name, buffer in m.named_buffers(recurse=False)]
    try:
        _place(model, device)
        stays = casting.keeps_fp32(model)
        for path, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                dtype = torch.float32 if stays(f"{path}.{name}" if path else name) else casting.buffers
                if dtype is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(device, dtype)
        yield
    except BaseException:
        for param, old in params:
            if param.device != old and not is_scattered(param):
                param.data = param.data.to(old)
        for module, name, buffer in before:
            module._buffers[name] = buffer
        raise


def _place(model: nn.Module, device: torch.device) -> None:
    """`model.to(device)` that makes no scattered parameter whole, and leaves those on meta there. Collective only if a view keeps
    one whole."""
    scattered = [p for p in model.parameters() if is_scattered(p)]
    if not scattered and not any(p.is_meta for p in model.parameters()):
        model.to(device)
        return
    for param in scattered:
        keeper_of(param).move(param, device)
    with torch.no_grad():
        for param in model.parameters():
            if not is_scattered(param) and not param.is_meta and param.device != device:
                param.data = param.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                module._buffers[name] = buffer.to(device)


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move every tensor in tuples, lists and dicts to `device`; other leaves stay unchanged.

    Args:
        dtype: Dtype of floating-point tensors; None leaves them unchanged.
    A pinned host tensor is copied without blocking, on the current stream. A tensor that is there already is not
    copied.
    """
    if isinstance(value, Tensor):
        cast = dtype if dtype is not None and value.is_floating_point() else value.dtype
        same = value.device == device and value.dtype == cast
        if same:
            return value
        return streams.copy_to(value, device, cast) if value.is_pinned() else value.to(device, cast)
    if isinstance(value, tuple):
        moved = [to_device(item, device, dtype) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    if isinstance(value, list):
        return [to_device(item, device, dtype) for item in value]
    if isinstance(value, Mapping):
        changed = {key: to_device(item, device, dtype) for key, item in value.items()}
        return changed if type(value) is dict else _rebuilt(value, changed)
    return value


def _rebuilt(old: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    # Batches of tokenizers are mappings with methods of their own: change a copy, keep the class.
    copied = getattr(old, "copy", None)
    if copied is None:
        return values
    new = copied()
    for key, value in values.items():
        new[key] = value
    return new
