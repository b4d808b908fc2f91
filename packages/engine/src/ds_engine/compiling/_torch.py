"""The private torch names of compiled training, in one place; imported when a run is compiled, not before."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.guards
import torch._functorch.config
from torch import fx
from torch._dynamo import exc, trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.callback import callback_handler
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.distributed import distributed_c10d as c10d

from ds_comm import Group, as_group

__all__ = [
    "CAPTURE_ERRORS",
    "Context",
    "bind",
    "break_reasons",
    "captured",
    "compile_model",
    "eager_backend",
    "group_named",
    "inputs_of",
    "keep_out",
    "lower_eager",
    "own_results",
    "quiet",
    "substitute",
    "watch_compiles",
    "without_torch_function",
]

CAPTURE_ERRORS = (exc.Unsupported, exc.BackendCompilerFailed)
"""What torch raises where a capture that must be one graph ends early, and where something of ours raised inside one."""
without_torch_function = torch._C.DisableTorchFunctionSubclass


def _described(value: object) -> str:
    return f"<{type(value).__name__}>" if isinstance(value, torch.Tensor) else builtins.repr(value)


# Up to torch 2.11 the text of a guard on a tensor's identity has its numbers. Released weights have none: reading them is a fault of the device.
torch._dynamo.guards.repr = _described  # type: ignore[attr-defined]


class Context:
    """What surrounds the lowering of a graph, to lower it again later."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.tracing = TracingContext.try_get()
        self.fake = detect_fake_mode(inputs)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the tracing context of the graph's capture, while inside."""
        with tracing(self.tracing):
            yield


def own_results() -> int | None:
    """Return how many results of the forward graph being compiled belong to the caller; None outside of a compile."""
    context = TracingContext.try_get()
    return None if context is None or context.fw_metadata is None else context.fw_metadata.num_forward


def inputs_of(gm: fx.GraphModule) -> list[torch.Tensor | None]:
    """Return the tensors behind the inputs of a captured graph, in order; None for numbers."""
    tensors: list[torch.Tensor | None] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            graph_arg = node.meta.get("grapharg")
            example = None if graph_arg is None else graph_arg.example
            tensors.append(example if isinstance(example, torch.Tensor) else None)
    return tensors


_PIECES = 4096  # one a module and shape: torch's limit of 8 is meant for shapes that keep changing


def keep_out(*packages: str) -> None:
    """Exclude functions of these packages from capture: torch runs them eagerly. Once in a process."""
    for name in packages:
        if name not in _kept_out:
            trace_rules.add(name)
            _kept_out.add(name)


_kept_out: set[str] = set()


def substitute(function: Callable[..., Any], traced: Callable[..., Any]) -> None:
    """Replace `function` by `traced` in captures, once in a process. Outside of captures nothing changes."""
    if function not in _substituted:
        _substituted.add(function)
        torch.compiler.substitute_in_graph(function)(traced)


_substituted: set[Callable[..., Any]] = set()


def group_named(name: str) -> Group:
    """Return the group that torch knows by a process group name."""
    return as_group(c10d._resolve_process_group(name))  # type: ignore[arg-type]


def compile_model(
    call: Callable[..., Any], backend: Callable[..., Any], params: Sequence[torch.Tensor], **options: Any
) -> Any:
    """Compile `call` with `torch.compile`, without tensor guards on `params`.

    Guards would check before each call what cannot change, or changes between uses: their class. Their identity is
    checked, see `bind`.
    """
    ours = {id(param) for param in params}

    def checked(guards: Sequence[Any]) -> list[bool]:
        return [
            not (guard.guard_type == "TENSOR_MATCH" and guard.has_value and id(guard.value) in ours) for guard in guards
        ]

    options["options"] = {"guard_filter_fn": checked}
    for name, value in (("recompile_limit", _PIECES), ("isolate_recompiles", True)):
        if name in inspect.signature(torch.compile).parameters:
            options[name] = value
    return torch.compile(call, backend=backend, **options)


def bind(gm: fx.GraphModule, ours: Callable[[torch.Tensor], bool]) -> None:
    """Let a captured piece run with the parameters that it was captured with, and no others. Call while it is captured.

    Actions name units: a piece of one layer must not run for another layer of the same class.
    """
    for node in gm.graph.nodes:
        graph_arg = node.meta.get("grapharg") if node.op == "placeholder" else None
        if graph_arg is not None and isinstance(graph_arg.example, torch.Tensor) and ours(graph_arg.example):
            install_guard(graph_arg.source.make_guard(GuardBuilder.ID_MATCH))


def quiet(hook: Callable[..., None]) -> Callable[..., None]:
    """`hook` for modules that run outside of graphs; while a graph is captured it is not there."""
    eager = torch._dynamo.disable(hook)

    def hooked(*args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        eager(*args, **kwargs)

    return hooked


@contextmanager
def watch_compiles(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call `begin` and `end` around every capture of a graph in this process, while inside."""

    def begun(args: object) -> None:
        del args
        begin()

    def ended(args: object) -> None:
        del args
        end()

    callback_handler.register_start_callback(begun)
    callback_handler.register_end_callback(ended)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begun)
        callback_handler.remove_end_callback(ended)


def break_reasons() -> dict[str, int]:
    """Return why captures broke so far in this process, and how often."""
    return dict(counters["graph_break"])


@contextmanager
def captured() -> Iterator[None]:
    """Configure torch while a graph is split into forward and backward."""
    # torch's cache of whole captures would find a run's graphs with the actions of another run in them.
    with torch._functorch.config.patch(enable_autograd_cache=False, donated_buffer=False):
        yield


def eager_backend(gm: fx.GraphModule, inputs: Sequence[Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """Split a captured graph like `backend`, but run graphs operation by operation, without a compiler."""

    def side(backward: bool, inference: bool = False) -> Callable[..., Any]:
        return lambda graph, examples: inner(graph, examples, is_backward=backward, is_inference=inference)

    compiler = aot_autograd(
        fw_compiler=side(False),
        bw_compiler=side(True),
        inference_compiler=side(False, True),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    with captured():
        return compiler(gm, inputs)


def lower_eager(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Generate Python for a graph that drops its inputs as soon as they are used."""
    gm.graph.set_codegen(fx.graph._BoxedCodeGen())
    gm.recompile()
    return gm.forward
