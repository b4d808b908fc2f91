"""The private torch names this package uses, in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

__all__ = ["ThreadState", "graph_task", "in_backward", "order_of", "saved_hooks", "set_order", "version_of"]

_Hooks = tuple[Callable[..., Any], Callable[..., Any]]


def graph_task() -> int:
    """Return the number of the backward that runs on this thread, which no other one of the process has; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place; views of the same memory share the count."""
    return tensor._version


def order_of(node: Node | None) -> int:
    """Return a node's number: of the nodes that are ready, backward takes the one with the largest. Each thread counts for itself."""
    return 0 if node is None else int(node._sequence_nr())


def set_order(node: Node | None, number: int) -> None:
    """Set a node's number. An older torch cannot: backward is then right, and waits sooner."""
    if node is not None and hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(number)


def in_backward() -> bool:
    """Whether this thread runs a backward: what is computed here is computed again."""
    return graph_task() != -1


def saved_hooks() -> _Hooks | None:
    """Return the functions that pack and unpack what autograd saves now; None where there are none."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return None
    hooks: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


@dataclass(frozen=True, slots=True)
class ThreadState:
    """What torch keeps for each thread, as it is in the thread that took it: another one works under it (`entered`).

    Attributes:
        autocast: (device type, on, dtype).
        modes, functions: Modes that see operators and functions of torch, outermost first.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    hooks: _Hooks | None
    modes: tuple[TorchDispatchMode, ...]
    functions: tuple[Any, ...]
    threads: int

    @classmethod
    def take(cls, device_type: str) -> ThreadState:
        """Return the state of this thread, for work on devices of `device_type` and on the CPU."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in dict.fromkeys(("cpu", device_type))
            ),
            saved_hooks(),
            tuple(_get_current_dispatch_mode_stack()),
            tuple(_get_current_function_mode_stack()),
            torch.get_num_threads(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Work under this state, while inside."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, on, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on))
            if self.hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
            for function in self.functions:
                torch._C._push_on_torch_function_stack(function)
                stack.callback(torch._C._pop_torch_function_stack)
            for mode in self.modes:
                _push_mode(mode)
                stack.callback(_pop_mode, getattr(mode, "_mode_key", None))
            yield
