"""New weights of units that stay gathered: on their way from an update to the forward that needs them.

`ShardedModel.gather_kept` starts the all-gathers in canonical order, and `step` returns while they run. They are waited for in that order, up to the
unit that is needed: by a hook before the forward of the modules that own it, and by any other use of a parameter. Until then its class is
`ShardedParameter`, which asks its handler before anything reads or writes values. So a program sees new weights only, wherever it looks. Not seen is
code in C++ that is given a parameter itself between a step and the forward of its module, and asks torch for no pointer: `finish` goes before it.

Note "in step". What cannot be made to wait is waited for before `step` returns: memory that other tensors alias (`flat = p.data.view(-1)`, kept),
and everything once torch.compile has compiled something, whose guards look at classes and whose graphs a hook would break.

A model that is dropped meanwhile, without `close`, waits for its gathers as it goes: what this rank has not sent yet, others still wait for.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import Parameter

from ds_accel import streams
from ds_config.errors import CommError
from ds_zero._torch import has_compiled, on_compile_start, outside_transforms, uncaptured
from ds_zero.layout.shard_options import has_forward
from ds_zero.runtime.sharded_parameter import AccessHandler
from ds_zero.runtime.unit import Full, Unit

__all__ = ["WeightArrivals", "modules_to_hook"]

_UNITS_A_HOOK = 2
"""A hook waits for so many units at most, if modules are small enough: blocks have one, or two where a cut goes through them."""


class WeightArrivals(AccessHandler):
    """The all-gathers of new weights of one model that have not been waited for.

    Args:
        model: Its root module.
        units: In canonical order, the same on every rank.
        overlap: Whether gathers may go on after `start` has returned.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], *, overlap: bool) -> None:
        self._model, self._overlap = model, overlap
        self._kept = [unit for unit in units if not unit.releases]
        self._number = {id(param): unit.number for unit in self._kept for param in unit.params}
        self._under_way: deque[Unit] = deque()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._streams: dict[torch.device, Any] = {}
        self._thread = threading.get_ident()

    def __del__(self) -> None:
        if not self._under_way:
            return
        if threading.get_ident() == self._thread:
            self._finish_unread()
        else:  # perhaps a transport's own thread, which must not wait for itself
            # A `Thread` would wait until it has begun, inside whatever line this is.
            _thread.start_new_thread(self._finish_unread, ())

    def _finish_unread(self) -> None:
        with contextlib.suppress(CommError):  # a rank that left waits for nothing, and nobody reads these weights here
            self.finish()

    # ---- gathers

    def start(self) -> None:
        """Start to gather every unit that stays gathered and whose shards are newer. (N-1)/N of their bytes, all in flight together.

        Call after all ranks published and passed a barrier. On every rank alike. Afterwards parameters are usable, at the cost of a wait.
        """
        self.finish()
        stays = self._overlap and not has_compiled() and not any(unit.has_aliases for unit in self._kept)
        for unit in self._kept:
            unit.start_renew()
            if not self._overlap:
                unit.finish_unshard()
        self._under_way.extend(unit for unit in self._kept if unit.state is Full.GATHERING)
        if not self._under_way:
            return
        has_routes = any(unit.groups.route is not None for unit in self._under_way)  # whose second half needs a push
        if not stays or has_routes:
            self.finish()
            return
        self._attach()
        for unit in self._under_way:
            unit.storage.guard(self)
            if streams.is_device_memory(unit.full):
                self._streams[unit.device] = streams.current_stream(unit.device)

    def finish(self, upto: int | None = None) -> None:
        """Wait for the gathers up to that of unit `upto`, by default for all.

        Their values are valid on the current stream and on the one on which `start` was called.
        """
        if not self._under_way or (upto is not None and self._under_way[0].number > upto):
            return
        # Whoever begins to capture a graph has waited for the device (`torch.cuda.graph` does), and a capture may not wait for what began before.
        captured = any(streams.is_capturing(device) for device in self._streams)
        with outside_transforms(), torch.no_grad():
            while self._under_way and (upto is None or self._under_way[0].number <= upto):
                unit = self._under_way[0]
                unit.finish_unshard(arrived=captured)
                if self._under_way and self._under_way[0] is unit:  # a wait may run code that waited for it
                    self._under_way.popleft()
        for device, started in self._streams.items() if not captured else ():
            current = streams.current_stream(device)
            if current != started:
                streams.wait_stream(started, current)

    # ---- hooks

    def _attach(self) -> None:
        if self._hooks:
            return
        for module, number in modules_to_hook(self._model, self._number).items():
            self._hooks.append(module.register_forward_pre_hook(uncaptured(self._before(number)), prepend=True))
        _LIVE.add(self)

    def _before(self, number: int) -> Callable[..., None]:
        arrivals = weakref.ref(self)  # a copy of the module has this hook, too

        def finish_before_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
            known = arrivals()
            if known is not None and known._under_way:
                known.finish(number)

        return finish_before_forward

    def detach(self) -> None:
        """Wait for all gathers and take the hooks back. Afterwards `start` waits for its gathers."""
        self.finish()
        self._overlap = False
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        _LIVE.discard(self)

    # ---- uses of parameters (access handler)

    def name_of(self, param: Parameter) -> str:
        number = self._number[id(param)]
        for unit in self._kept:
            if unit.number == number:
                return next(info.name for info, p in zip(unit.spec.params, unit.params, strict=True) if p is param)
        return ""

    def on_access(self, param: Parameter, what: str) -> bool:
        del what
        return self.arrive(param)

    def arrive(self, param: Parameter) -> bool:
        self.finish(self._number[id(param)])
        return True


def modules_to_hook(model: nn.Module, number_of: Mapping[int, int]) -> dict[nn.Module, int]:
    """Choose the modules before whose forward units are waited for, and for each the last unit that it needs.

    Large modules are preferred, since hooks take time: those that need two units at most; else the modules within them.

    Args:
        number_of: Of each parameter, by id, the number of its unit.
    """
    chosen: dict[nn.Module, int] = {}

    def choose(module: nn.Module) -> set[int]:
        """Return the units that a forward around `module` must wait for, since `module` has none of its own."""
        below = {number_of[id(param)] for param in module.parameters() if id(param) in number_of}
        if not below:
            return set()
        if has_forward(module) and len(below) <= _UNITS_A_HOOK:
            chosen[module] = max(below)
            return set()
        needed = {number_of[id(param)] for param in module.parameters(recurse=False) if id(param) in number_of}
        for child in module.children():
            needed |= choose(child)
        if needed and has_forward(module):
            chosen[module] = max(needed)
            return set()
        return needed

    choose(model)
    return chosen


_LIVE: weakref.WeakSet[WeightArrivals] = weakref.WeakSet()


@on_compile_start
def _detach_all() -> None:
    """Give what is compiled plain parameters and modules without hooks."""
    for arrivals in list(_LIVE):
        arrivals.detach()


@atexit.register
def _finish_all() -> None:
    """Wait for what is under way: a process that ends takes the other ranks' gathers with it."""
    for arrivals in list(_LIVE):
        arrivals.finish()
