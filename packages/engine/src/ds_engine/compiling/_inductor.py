"""The private names of torch's compiler, in one place; imported for runs that use it, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config
from torch import fx
from torch._inductor import ir
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from ds_engine.compiling import graph_reader, rewriting
from ds_engine.compiling._torch import captured
from ds_engine.compiling.ops import OPS

__all__ = ["backend", "lower", "mode_options"]

# What would move a gather or a release away from where a pass has put it.
_STAY: dict[str, Any] = {"reorder_for_peak_memory": False, "reorder_for_compute_comm_overlap": False}


# A replayed CUDA graph repeats kernels, and nothing of what the verbs do on the host; what a graph hands over, or frees, would be memory of its pool.
_NEVER: dict[str, Any] = {"triton.cudagraphs": False}


_LEFT = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
"""An address that torch hands to each kernel it loads by way of the environment: child processes must not inherit it."""


@contextmanager
def _clean() -> Iterator[None]:
    """Restore, after kernels were loaded inside, the environment to its state before."""
    before = os.environ.get(_LEFT)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_LEFT, None)
        else:
            os.environ[_LEFT] = before


def backend(
    gm: fx.GraphModule, inputs: Sequence[Any], inner: Callable[..., Any], patches: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a captured graph; `inner` gets the forward and the backward graph."""
    with captured(), _clean():
        compiled: Any = compile_fx(gm, inputs, inner_compile=inner, config_patches={**_STAY, **patches, **_NEVER})
        run: Callable[..., Any] = compiled
        return run


def lower(
    gm: fx.GraphModule, inputs: Sequence[Any], fake: Any, patches: dict[str, Any], options: dict[str, Any]
) -> Callable[[list[Any]], Any]:
    """Compile a graph that contains actions to code with inductor."""
    _tell_inductor()
    last = {_LAST: _Last(patches.get(_LAST))}
    with torch._inductor.config.patch({**_STAY, **patches, **_NEVER, **last}), V.set_fake_mode(fake), _clean():
        return compile_fx_inner(gm, inputs, **options)


_LAST = "post_grad_custom_post_pass"


class _Last(CustomGraphPass):
    """After what inductor does to a graph, and the caller's own pass there: ends of uses go behind the last reader again."""

    def __init__(self, custom_pass: Any) -> None:
        self._inputs = custom_pass

    def __call__(self, graph: fx.Graph) -> None:
        if self._inputs is not None:
            self._inputs(graph)
        rewriting.put_ends_last(graph)

    def uuid(self) -> Any:
        """Return the cache key of compiled graphs; None, as for a plain function, disables the cache."""
        key = "" if self._inputs is None else getattr(self._inputs, "uuid", lambda: None)()
        return None if key is None else (get_hash_for_files((rewriting.__file__, graph_reader.__file__)), key)


def mode_options(mode: str) -> dict[str, Any]:
    """Return the inductor options of a mode of `torch.compile`."""
    return dict(torch._inductor.list_mode_options(mode))


_lowered: list[bool] = []


def _tell_inductor() -> None:
    """Register lowerings of operations that change the memory of their inputs, once in a process.

    Every operation that still reads that memory must run before; memory of gradients that were passed on belongs to
    inductor no more.
    """
    if _lowered:
        return
    for op in (OPS.need, OPS.load, OPS.expect, OPS.spare, OPS.free, OPS.arrived, OPS.park, OPS.unpark):
        register_lowering(op.default, type_promotion_kind=None)(_lowering(op.default, gives=op is OPS.arrived))
    _lowered.append(True)


def _lowering(op: Any, *, gives: bool) -> Callable[..., Any]:
    plain = fallback_handler(op, add_to_fallback_set=False)

    def lower(tensors: Sequence[Any], *args: Any) -> Any:
        params = args[0] if gives else ()
        for number, tensor in enumerate((*tensors, *params)):
            name = ir.ExternKernel.realize_input(tensor).get_name()
            V.graph.mark_buffer_mutated(name)
            if gives and number < len(tensors):
                V.graph.never_reuse_buffers.add(name)
        return plain(tensors, *args)

    return lower
