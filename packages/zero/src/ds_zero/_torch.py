"""The private torch names this package uses, in one place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy, set_eval_frame
from torch.autograd import Variable
from torch.autograd import graph as _graph
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer

__all__ = [
    "accumulates",
    "can_watch_saved",
    "foreach_add",
    "foreach_copy",
    "graph_task_id",
    "has_compiled",
    "has_step_hooks",
    "keeps_graph",
    "node_around",
    "on_compile_start",
    "outside_transforms",
    "plain_step",
    "queue_callback",
    "running_modules",
    "skip_frame",
    "uncaptured",
    "unpack_hook",
    "without_torch_function",
]

foreach_copy: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
foreach_add: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_add_
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Which backward this thread is running; -1 outside of any. A checkpointed segment's inner backward has its own."""
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that this thread is running keeps its graph for another one."""


_CALL = nn.Module._call_impl.__code__
_RUN, _APPLY = _graph._engine_run_backward.__code__, BackwardCFunction.apply.__code__

can_watch_saved: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
"""Whether hooks on what autograd saves are allowed here; inside transforms of functions (torch.func.grad) they are not."""


def unpack_hook() -> Callable[..., Any] | None:
    """Return the hook by which autograd unpacks tensors saved now; None without saved-tensor hooks.

    The hook identifies what decides about saved tensors (activation checkpointing, offloading).
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if top is None else top[1]


def has_step_hooks(optimizer: Optimizer, library: type) -> bool:
    """Whether somebody looks at the gradients before every step of this optimizer, or of all; hooks of class `library` do not."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *_optimizer._global_optimizer_pre_hooks.values()]
    return not all(isinstance(hook, library) for hook in hooks)


def accumulates(params: Iterable[Tensor]) -> bool:
    """Whether the backward that this thread is in adds to `grad` of some parameter. Cost: a few us a parameter.

    `torch.autograd.grad` does not, nor do transforms of functions (torch.func.grad), inside of which a parameter has no node.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    try:
        with without_torch_function():
            return any(torch._C._will_engine_execute_node(_graph.get_gradient_edge(param).node) for param in params)
    except RuntimeError:  # one is asked for alone
        return False


def running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose call is on this thread's stack, the innermost first. Walks the stack: for paths that are not taken often."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]


def node_around() -> _graph.Node | None:
    """Return the node of the outermost backward whose Python code runs the backward that this thread is in; None in the outermost.

    Walks the stack: once a backward.
    """
    frame, found, inner = sys._getframe(1), None, False
    while frame is not None:
        inner = inner or frame.f_code is _RUN
        if inner and frame.f_code is _APPLY:
            found = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return found


def outside_transforms() -> AbstractContextManager[Any]:
    """Run outside of all transforms of functions (torch.func), while inside: tensors made there are plain ones."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import (
        temporarily_clear_interpreter_stack,
    )  # imports the compiler, where there is a transform only

    return temporarily_clear_interpreter_stack()


class _Uncaptured:
    """A hook that torch.compile calls between graphs. A copied or pickled one, as a model's copy has it, does nothing."""

    def __init__(self, function: Callable[..., Any], pickled: Callable[[], None]) -> None:
        self._function, self._pickled = function, pickled

    def call(self, *args: Any, **kwargs: Any) -> Any:
        capturing = set_eval_frame(None)
        try:
            return self._function(*args, **kwargs)
        finally:
            set_eval_frame(capturing)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Uncaptured:
        return _Uncaptured(_nothing, _nothing)

    def __reduce__(self) -> tuple[type[_Uncaptured], tuple[Callable[..., Any], Callable[[], None]]]:
        self._pickled()
        return _Uncaptured, (_nothing, _nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, as the hook of a model that is not sharded."""


_Uncaptured.call._torchdynamo_disable = True  # type: ignore[attr-defined]
# Called from a graph's break, the frame itself would be captured, and the compiler warns of the builtin in it. What it calls decides for itself.
set_code_exec_strategy(_Uncaptured.call.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def uncaptured(function: Callable[..., Any], pickled: Callable[[], None] = _nothing) -> Callable[..., Any]:
    """Return `function` as torch.compile calls it between graphs, with all that it calls: collectives of a backend are no part of a graph.

    It does what `torch._dynamo.disable` does, without importing the compiler.

    Args:
        function: A hook of a module.
        pickled: Is called when the module is pickled, and may refuse that.
    """
    return _Uncaptured(function, pickled).call


def skip_frame(function: Callable[..., Any]) -> None:
    """Make torch.compile leave alone the frames of `function`, and of all that it calls, where they run between graphs."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


_compile_callbacks: list[Callable[[], None]] = []
_compiled: list[str] = []


def on_compile_start(callback: Callable[[], None]) -> Callable[[], None]:
    """Run `callback` before torch.compile looks at a function, from the next `has_compiled` on. Does not import the compiler."""
    _compile_callbacks.append(callback)
    return callback


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    utils, callbacks = sys.modules.get("torch._dynamo.utils"), sys.modules.get("torch._dynamo.callback")
    if utils is None or callbacks is None:
        return False
    if _begin_compile not in callbacks.callback_handler.start_callbacks:  # `torch._dynamo.reset` clears them
        callbacks.callback_handler.register_start_callback(_begin_compile)
    return bool(_compiled or utils.counters["frames"].get("total"))


def _begin_compile(*args: Any) -> None:
    del args
    _compiled.append("")
    for callback in _compile_callbacks:
        callback()


def queue_callback(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that is running ends. Call only inside one."""
    Variable._execution_engine.queue_callback(callback)


def without_torch_function() -> AbstractContextManager[None]:
    """Treat tensor subclasses as plain tensors, while inside."""
    return torch._C.DisableTorchFunctionSubclass()


def plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return an optimizer class's `step` without torch's profiler wrapper.

    The wrapper imports the profiler when it first runs.
    """
    step: Callable[..., Any] = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
