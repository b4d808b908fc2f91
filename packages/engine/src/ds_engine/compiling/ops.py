"""Operations that graphs call, and what they are to a compiler.

Each is a call of a verb of `verbs.py`. Parameters are inputs of a graph; `need` writes into their memory and `spare`
takes it away, and that is what the operations say of themselves, so no compiler moves a use of a parameter out from between them.
Gradients that are handed over belong to ds-zero from then on: memory of theirs must not be used again by the graph (`_inductor.py`).
`park` and `unpark` move what no graph has, the optimizer's state; they claim to write inputs, whose uses then stay on their side of them.

`key` is the number of a session in this process: operations in compiled code can hold numbers, not objects.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_accel import get_accelerator, streams
from ds_engine.compiling.config import CompileConfig
from ds_engine.compiling.verbs import Graphs

__all__ = ["OPS", "Target", "register_target"]


@dataclass(slots=True, weakref_slot=True)
class Target:
    """What the operations of one session act on.

    Attributes:
        graphs: Verbs of the model.
        section: Where to wait, and whether saved results go into page-locked memory.
    """

    graphs: Graphs
    section: CompileConfig


_targets: weakref.WeakValueDictionary[int, Target] = weakref.WeakValueDictionary()
_keys = itertools.count()


def register_target(target: Target) -> int:
    """Register a target and return the key of its session, valid as long as the target lives."""
    key = next(_keys)
    _targets[key] = target
    return key


def _verb(name: str) -> Callable[[list[Tensor], int, int], None]:
    """Return the operation that calls a verb of `Graphs` with a unit; its tensors say which memory it changes, and are not looked at."""

    def run(tensors: list[Tensor], key: int, unit: int) -> None:
        del tensors
        getattr(_targets[key].graphs, name)(unit)

    return run


def _need(params: list[Tensor], key: int, unit: int) -> None:
    del params
    target = _targets[key]
    if target.section.sync_before_allgather:
        get_accelerator().synchronize()
    target.graphs.need(unit)
    if target.section.sync_after_allgather:
        get_accelerator().synchronize()


def _arrived(grads: list[Tensor], params: list[Tensor], key: int, units: list[int], members: list[int]) -> None:
    del params  # whose units may be released now: what reads them stands before
    target = _targets[key]
    if target.section.sync_before_reduce:
        get_accelerator().synchronize()
    for unit in dict.fromkeys(units):
        positions = [at for at, of in enumerate(units) if of == unit]
        target.graphs.arrived(unit, [members[at] for at in positions], [_plain(grads[at]) for at in positions])
    if target.section.sync_after_reduce:
        target.graphs.drain()
        get_accelerator().synchronize()


def _plain(grad: Tensor) -> Tensor:
    return grad if grad.is_contiguous() else grad.contiguous()


def _free(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def _store(tensor: Tensor, key: int) -> Tensor:
    """Copy an activation to the host; where that is queued, only `_fetch` on the same stream may read the copy."""
    if not _targets[key].section.offload_activation_pin_memory or not streams.is_device_memory(tensor):
        return torch.empty_like(tensor, device="cpu").copy_(tensor)
    host = streams.page_locked(tensor.shape, tensor.dtype)
    streams.copy_into(host, tensor)
    return host


def _fetch(host: Tensor, device: torch.device) -> Tensor:
    """Copy an activation back, valid on the current stream, on which `_store` queued its copy."""
    if device.type == "cpu" and not streams.backend().needs_copy(host, device):
        return host.clone()
    return streams.copy_to(host, device, fresh=True)


def _fake_store(tensor: Tensor, key: int) -> Tensor:
    del key
    return torch.empty_like(tensor, device="cpu")


def _fake_fetch(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(host, device=device)


def _nothing(*args: object) -> None:
    del args


_OF_UNIT = "(Tensor(a!)[] tensors, int key, int unit) -> ()"
_DEFINED: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "expect": (_OF_UNIT, _verb("expect"), _nothing),
    "need": (_OF_UNIT, _need, _nothing),
    "spare": (_OF_UNIT, _verb("spare"), _nothing),
    "load": (_OF_UNIT, _verb("load"), _nothing),
    "park": (_OF_UNIT, _verb("put_state"), _nothing),
    "unpark": (_OF_UNIT, _verb("get_state"), _nothing),
    "arrived": (
        "(Tensor(a!)[] grads, Tensor(b!)[] params, int key, int[] units, int[] members) -> ()",
        _arrived,
        _nothing,
    ),
    "free": ("(Tensor(a!)[] tensors) -> ()", _free, _nothing),
    "store": ("(Tensor tensor, int key) -> Tensor", _store, _fake_store),
    "fetch": ("(Tensor host, Device device) -> Tensor", _fetch, _fake_fetch),
}


_NAME = "ds_compile_4"
"""Counts how the operations are lowered: torch's cache of compiled graphs outlives a process and knows operations by name."""


def _define() -> torch.library.Library:
    # No autograd kernel: these stand in graphs whose gradients are already made, and must not count as writes to autograd.
    library = torch.library.Library(_NAME, "DEF")
    for name, (schema, run, fake) in _DEFINED.items():
        library.define(name + schema)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAME}::{name}", fake, lib=library)
    return library


_LIBRARY = _define()
OPS = getattr(torch.ops, _NAME)
"""Where the operations are found by name."""
