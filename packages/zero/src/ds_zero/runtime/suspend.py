"""State of a sharded model leaves its device and comes back: identity, views and values stay, only bytes move.

Words: a tensor is *away* when its storage was emptied and its bytes lie in host memory. Nothing may read it meanwhile: units
whose parameters or masters are away are `Full.AWAY`, and their parameters refuse to be used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from ds_config.errors import ShardedAccessError, UnsupportedError
from ds_ops.scratch import host_bytes
from ds_zero.runtime.sharded_parameter import AccessHandler, keep, release, restore, unkeep
from ds_zero.runtime.unit import Full, Unit

__all__ = ["KINDS", "Away", "bring_back", "take_away"]

KINDS = ("optimizer", "masters", "parameters", "gradients")
"""What can be moved: state of the optimizer, master shards, parameters in compute format, gradients not yet stepped."""


@dataclass(frozen=True, slots=True)
class Away:
    """One storage that was emptied, and its bytes.

    Attributes:
        kind: One of `KINDS`.
        storage: The emptied one; every view of it is still there.
        host: [nbytes], uint8.
    """

    kind: str
    storage: torch.UntypedStorage
    host: Tensor


class _Refusal(AccessHandler):
    """Answers for parameters that are away and are gathered by no hook."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def name_of(self, param: Parameter) -> str:
        return next(i.name for p, i in zip(self.unit.params, self.unit.spec.params, strict=True) if p is param)

    def on_access(self, param: Parameter, what: str) -> bool:
        raise ShardedAccessError(
            f"parameter {self.name_of(param)} was used by {what!r} while it is away from the device",
            code="zero-suspended",
            fix="Call resume() first.",
        )


def take_away(
    units: Sequence[Unit], state: Iterable[Tensor], kinds: Collection[str], *, pin_memory: bool
) -> list[Away]:
    """Move what `kinds` names to the host, and give its device memory back. Between steps.

    Args:
        state: Tensors of the optimizer's state.
        pin_memory: Into page-locked memory, where the model is not on the host anyway.
    Raises:
        UnsupportedError: a kind is not known ("zero-suspend-kind").
    Storages that cannot be emptied (memory that ranks share) stay where they are. Cost: one copy of every byte.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise UnsupportedError(
            f"there is no state {', '.join(map(repr, unknown))} to move",
            code="zero-suspend-kind",
            fix=f"Choose from {', '.join(KINDS)}.",
        )
    pointers: set[int] = set()
    gone: list[Away] = []
    for kind, tensors in _tensors(units, state).items():
        for tensor in tensors if kind in kinds else ():
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in pointers or not storage.resizable():
                continue
            pointers.add(storage.data_ptr())
            host = host_bytes(storage.nbytes(), tensor.device, pin=pin_memory, stays=False)
            gone.append(Away(kind, storage, host.copy_(_bytes(storage, tensor.device))))
    for away in gone:
        away.storage.resize_(0)
    if {"masters", "parameters"} & set(kinds):
        _close_off(units)
    return gone


def bring_back(units: Sequence[Unit], gone: Iterable[Away]) -> None:
    """Undo `take_away`."""
    for away in gone:
        away.storage.resize_(away.host.numel())
        _bytes(away.storage, away.storage.device).copy_(away.host)
    for unit in units:
        if unit.state is not Full.AWAY:
            continue
        unit.state = Full.RELEASED if unit.releases else Full.CURRENT
        for param in unit.params if not unit.releases else ():
            restore(param)
            unkeep(param)


def _close_off(units: Iterable[Unit]) -> None:
    """Make any use of the parameters of units whose bytes are on the host raise."""
    for unit in units:
        needed = [*unit.storage.resident_tensors, *([unit.shard] if unit.state_store.resident else [])]
        if unit.state is Full.AWAY or all(t.untyped_storage().nbytes() or not t.numel() for t in needed):
            continue
        unit.state = Full.AWAY
        refusal = _Refusal(unit)
        for param in unit.params if not unit.releases else ():
            keep(param, refusal)
            release(param)


def _tensors(units: Sequence[Unit], state: Iterable[Tensor]) -> Mapping[str, list[Tensor]]:
    return {
        "optimizer": [value for value in state if value.dim()],
        "parameters": [t for unit in units for t in (unit.full, unit.storage.sent) if t is not None],
        "masters": [unit.shard for unit in units if not unit.plan.aliased],
        "gradients": [t for unit in units for t in unit.gradients.tensors],
    }


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
