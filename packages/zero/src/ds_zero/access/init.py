"""Models too large to exist whole in one process: sharded while they are built, filled from files slice by slice.

    with ds_zero.Init():                       # each module is cut over the ranks as soon as it is made
        model = Net()
    with ds_zero.Init(meta=True):              # parameters have no values at all; buffers do
        model = Net()
    optimizer = ds_zero.shard(model, AdamW(model.parameters()), stage=3)
    ds_zero.load_pretrained(model, "weights/")  # each rank reads the bytes it holds

Init uses torch's own registration hooks, replaces nothing in torch, and draws no random numbers of its own: with equal seeds
the values are those of the model built without it.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import Parameter

import ds_comm as comm
from ds_comm import Group
from ds_zero.runtime.scattered import Scatter, is_scattered

__all__ = ["Init", "MiCS_Init"]


class Init:
    """Inside, modules are cut over the ranks as soon as they become part of another one, the root at the end.

    Args:
        group: Ranks to cut over; None: all.
        enabled: False makes this do nothing.
        meta: Give parameters no values: for `load_pretrained`. Buffers, also non-persistent ones, are computed as usual.
        dtype: Format of floating-point parameters; None: as the model makes them.
    A module must be built alike on every rank; values of rank 0 win. Peak memory is the largest module that is registered
    in one piece plus this rank's chunks. Nestable; collective on registration and exit.
    """

    def __init__(
        self,
        *,
        group: Group | dist.ProcessGroup | None = None,
        enabled: bool = True,
        meta: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.enabled, self.meta, self.dtype = enabled, meta, dtype
        self._scatter = Scatter(comm.as_group(group))
        self._made: list[weakref.ref[Parameter]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Init:
        self.go_on()
        return self

    def pause(self) -> None:
        """Until `go_on`, what is made is left alone."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def go_on(self) -> None:
        """Cut what is made from here on."""
        if self.enabled and not self._handles:
            self._handles = [
                register_module_parameter_registration_hook(cast(Any, self._parameter)),
                register_module_module_registration_hook(self._module),
            ]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()
        if kind is None:
            for number, ref in enumerate(self._made):
                param = ref()
                if param is not None:
                    self._take(param, f"parameter {number}")
            self._scatter.settle()
        self._made.clear()

    def _parameter(self, module: nn.Module, name: str, param: Any) -> Any:
        del module, name
        if not isinstance(param, Parameter):
            return None
        dtype = self.dtype if self.dtype is not None and param.is_floating_point() else param.dtype
        if self.meta and not param.is_meta:
            return Parameter(torch.empty(param.shape, dtype=dtype, device="meta"), param.requires_grad)
        if dtype is not param.dtype and not is_scattered(param):
            param.data = param.data.to(dtype)  # the same object: it may be tied, or carry a mark
        self._made.append(weakref.ref(param))
        return None

    def _module(self, module: nn.Module, name: str, child: Any) -> None:
        del module
        self._scatter.settle()
        if isinstance(child, nn.Module):
            for path, param in child.named_parameters():
                self._take(param, f"{name}.{path}")

    def _take(self, param: Parameter, name: str) -> None:
        if self._scatter.group.size > 1 and not self.meta:
            self._scatter.take(param, name)
        self.taken(param)

    def cut(self, model: nn.Module) -> None:
        """Cut a model that is there already. Collective."""
        for name, param in model.named_parameters():
            self._take(param, name)

    def taken(self, param: Parameter) -> None:
        """`param` was cut; also called for one that was before. For subclasses."""


class MiCS_Init(Init):  # noqa: N801  the reference's name
    """Init for a model that `shard(..., shard_size=...)` then cuts over replicas. Until then all ranks share one copy."""
