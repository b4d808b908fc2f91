"""The format of buffers that are made inside `zero.Init`: as in upstream, that of the parameters, if one of torch's constructors made them.

Upstream replaces `torch.zeros` and its like while the context lasts, so that what they make has the format of the parameters. Here nothing is
replaced: a mode notes what these functions make and what is computed from nothing else, and such a tensor is cast when it becomes a buffer. It
is computed in its own format, and has the same format in the end. Parameters are cast by `Init` itself. A buffer that the configuration or the
model says is fp32 (`data_types.keep_in_fp32_modules`) is fp32 again as soon as its module belongs to who says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed._ours.base._torch import tree_leaves
from ds_engine.mixed_precision import Casting

CONSTRUCTORS: frozenset[Callable[..., Any]] = frozenset(
    (torch.tensor, torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.eye, torch.randn)
)
"""What upstream replaces."""
_OTHER_FORMATS = {"float", "double", "half", "bfloat16", "type"}


class BufferFormat(TorchFunctionMode):
    """Cast buffers that are registered inside to `dtype`.

    Args:
        dtype: Of the parameters.
        casting: Which buffers are fp32 all the same.
    Attributes:
        active: False lets buffers keep their format for a while.
        narrowing: Of torch's constructors those whose tensors have the parameters' format.
    """

    def __init__(self, dtype: torch.dtype, casting: Casting) -> None:
        super().__init__()
        self.dtype, self.casting, self.active = dtype, casting, True
        self.narrowing: frozenset[Callable[..., Any]] = CONSTRUCTORS
        self._noted: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()
        self._handles: tuple[Any, ...] = ()

    def __enter__(self) -> BufferFormat:
        self._handles = (
            register_module_buffer_registration_hook(self._register),
            register_module_module_registration_hook(self._widen),
        )
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.active and type(result) is Tensor and result.is_floating_point():
            if self._notes(func, args, kwargs):
                self._noted[result] = True
            else:
                self._noted.pop(result, None)  # `.float()` of what is float32 already
        return result

    def _notes(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if func in CONSTRUCTORS:
            return func in self.narrowing
        name = getattr(func, "__name__", "")
        if name in _OTHER_FORMATS or (
            name == "to" and any(isinstance(v, torch.dtype) for v in (*args, *kwargs.values()))
        ):
            return False
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        return bool(inputs) and all(t in self._noted for t in inputs)

    def _register(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        del module, name
        if self.active and buffer is not None and buffer in self._noted and buffer.dtype != self.dtype:
            buffer.data = buffer.data.to(self.dtype)  # the same object: the model may keep it elsewhere, too

    def _widen(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Make those buffers of a new child fp32 again that the configuration, or the parent's lists, say are fp32."""
        listed = any(getattr(parent, attribute, None) for attribute in self.casting.fp32_lists)
        if child is None or not self.active or not (listed or self.casting.fp32_names):
            return
        stays = self.casting.keeps_fp32(parent)
        for path, buffer in child.named_buffers():
            if buffer.is_floating_point() and stays(f"{name}.{path}"):
                buffer.data = buffer.data.float()
