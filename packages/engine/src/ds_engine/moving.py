"""State of a sharded model leaves the device and comes back: identity, views and values stay, only bytes move.

Words: a tensor is *away* when its storage was emptied and its bytes lie in host memory. Nothing may read it meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_config.errors import UnsupportedError
from ds_zero import ShardedOptimizer, Sharding

__all__ = ["KINDS", "Away", "offload", "reload"]

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


def offload(
    sharding: Sharding, optimizer: ShardedOptimizer | None, kinds: Collection[str], *, pin_memory: bool
) -> list[Away]:
    """Move the state of the given kinds to the host, and give its device memory back.

    Args:
        pin_memory: Use page-locked memory, where the model is not on the host anyway.
    Raises:
        UnsupportedError: a kind is not known ("engine-offload").
    Storages that cannot be emptied (shared arenas) stay where they are. Cost: one copy of every byte.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise UnsupportedError(
            f"there is no state {', '.join(map(repr, unknown))} to move",
            code="engine-offload",
            fix=f"Choose from {', '.join(KINDS)}.",
        )
    seen: set[int] = set()
    gone: list[Away] = []
    for kind, tensors in _tensors(sharding, optimizer).items():
        for tensor in tensors if kind in kinds else ():
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in seen or not storage.resizable():
                continue
            seen.add(storage.data_ptr())
            gone.append(Away(kind, storage, _to_host(storage, tensor.device, pin_memory)))
    for away in gone:
        away.storage.resize_(0)
    return gone


def reload(gone: Iterable[Away]) -> None:
    """Bring back what `offload` moved."""
    for away in gone:
        away.storage.resize_(away.host.numel())
        _bytes(away.storage, away.storage.device).copy_(away.host)


def _tensors(sharding: Sharding, optimizer: ShardedOptimizer | None) -> Mapping[str, list[Tensor]]:
    units = sharding.units
    state = [] if optimizer is None else [v for one in optimizer.inner.state.values() for v in one.values()]
    return {
        "optimizer": [value for value in state if isinstance(value, Tensor) and value.dim()],
        "parameters": [unit.full for unit in units],
        "masters": [unit.shard for unit in units if not unit.aliased],
        "gradients": [t for unit in units for t in (unit.grad, unit.arena) if t is not None],
    }


def _to_host(storage: torch.UntypedStorage, device: torch.device, pin_memory: bool) -> Tensor:
    pinned = pin_memory and device.type not in ("cpu", "mps", "meta")
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
    return host.copy_(_bytes(storage, device))


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
