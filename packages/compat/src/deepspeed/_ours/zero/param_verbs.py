"""What upstream's parameters of stage 3 do themselves: `all_gather`, `all_gather_coalesced` and `partition`, which are `GatheredParameters` in two calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import Parameter
from torch.utils.weak import WeakIdKeyDictionary

import ds_zero
from ds_config.errors import ShardedAccessError

_held: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The open `GatheredParameters` of each parameter that a call has gathered."""


class Verb:
    """A function of a parameter, which does not keep it alive."""

    __slots__ = ("_param", "_run")

    def __init__(self, run: Callable[..., Any], param: Parameter) -> None:
        self._run, self._param = run, weakref.ref(param)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._run(self._param(), *args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (self._run, None)


class DoneGather:
    """What `all_gather` returns: it is done."""

    def wait(self, **options: Any) -> None:
        """Return at once."""


def all_gather(
    param: Parameter, param_list: Iterable[Parameter] | None = None, async_op: bool = False, hierarchy: int = 0
) -> DoneGather:
    """Make parameters whole until `partition`. Collective."""
    del async_op, hierarchy
    for one in [param] if param_list is None else param_list:
        if one not in _held:
            with torch.no_grad():  # what a graph saved would be watched until `partition`
                _held[one] = _enter(ds_zero.GatheredParameters(one))
    return DoneGather()


def all_gather_coalesced(
    param: Parameter, params: Iterable[Parameter], safe_mode: bool = False, quantize: bool = False
) -> DoneGather:
    """Make `params` whole until `partition`. Collective."""
    del safe_mode, quantize
    return all_gather(param, params)


def partition(
    param: Parameter, param_list: Iterable[Parameter] | None = None, backward: bool = False, hierarchy: int = 0,
    has_been_updated: bool = False, free_data: bool = True,
) -> None:  # fmt: skip
    """Let go of what `all_gather` gathered. Collective.

    Args:
        has_been_updated: Each rank's own elements are kept as they are now; else changes are dropped.
    """
    del backward, hierarchy, free_data
    for one in [param] if param_list is None else param_list:
        context = _held.pop(one, None)
        if context is None:
            continue
        values = one.detach().clone() if has_been_updated else None
        with suppress(ShardedAccessError):  # of changes, also by a step meanwhile
            context.__exit__(None, None, None)
        if values is not None:
            with ds_zero.GatheredParameters(one, write=True), torch.no_grad():
                one.copy_(values)


def _enter(context: AbstractContextManager[None]) -> AbstractContextManager[None]:
    context.__enter__()
    return context
