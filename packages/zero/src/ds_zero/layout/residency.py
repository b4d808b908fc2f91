"""What a rank keeps between uses. A ZeRO stage is a value of `Residency`, and nothing else.

Words: *model states* are parameters, gradients and optimizer state; each is either kept whole on every rank or cut into
one shard a rank. Reference: Rajbhandari et al. 2020, "ZeRO", section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["STAGES", "Residency", "UnitBytes"]


@dataclass(frozen=True, slots=True)
class Residency:
    """Which model states are cut into shards.

    Attributes:
        shard_optim: The optimizer updates (and keeps state for) this rank's shard only.
        shard_grads: A rank keeps the gradient of its shard only, from every backward on; otherwise it keeps all of them until
            the microbatch after which they are reduced.
        shard_params: Between uses a rank keeps its shard of the parameters only.
    """

    shard_optim: bool
    shard_grads: bool
    shard_params: bool

    def __post_init__(self) -> None:
        if (self.shard_params and not self.shard_grads) or (self.shard_grads and not self.shard_optim):
            raise ValueError(f"parameters shard only with gradients, gradients only with optimizer state; got {self}")


STAGES: Mapping[int, Residency] = {
    0: Residency(shard_optim=False, shard_grads=False, shard_params=False),
    1: Residency(shard_optim=True, shard_grads=False, shard_params=False),
    2: Residency(shard_optim=True, shard_grads=True, shard_params=False),
    3: Residency(shard_optim=True, shard_grads=True, shard_params=True),
}
"""The four ZeRO stages."""


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """One unit on one rank.

    Attributes:
        full: Kept bytes of the parameters in the format forward uses.
        shard: Kept bytes of the master shard; 0 where it is a part of full.
        grads: Bytes of this rank's share of the gradients from backward to update: of memory of its own, which is kept, or of the
            gradients that it is made of, which is not.
        optim: Kept bytes of the optimizer's per-element state.
        gathered: Passing bytes while the unit is in use.
        arena: Passing bytes while its gradients travel.
        host, file: Bytes of the above that are kept there instead of on the device.
    """

    full: int = 0
    shard: int = 0
    grads: int = 0
    optim: int = 0
    gathered: int = 0
    arena: int = 0
    host: int = 0
    file: int = 0

    @property
    def kept(self) -> int:
        return self.full + self.shard + self.grads + self.optim
