"""What the caller brings besides the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Protocol

import torch

from ds_engine.config import Config
from ds_zero import ShardedOptimizer

__all__ = ["Follower", "InitArgs", "OptimizerLike", "SchedulerLike", "say_overridden", "without_overridden"]

_log = getLogger(__name__)

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer] | None
SchedulerLike = Any


class Follower(Protocol):
    """What goes on with the updates of a run."""

    def step(self) -> None:
        """Follow an applied update. Called on all ranks."""

    def resume(self, steps: int) -> None:
        """Resume after a checkpoint was loaded that was written after `steps` updates."""


@dataclass(frozen=True, slots=True)
class InitArgs:
    """What the caller brings besides the model; everything else comes from the plan.

    Attributes:
        optimizer: An optimizer over the model's parameters, a function that makes one from parameters, or None.
        params: Parameters or groups that an optimizer of the configuration gets; the model's by default.
        scheduler: A scheduler, a function that makes one from the optimizer, or None.
        data: A map-style dataset, or None.
        collate_fn: As in torch's DataLoader.
        sharded: Class of the sharded optimizer: one that adds names to it.
        routes_later: Whether a model without converted layers may be given with random-LTD: `start_routing` then follows.
    """

    optimizer: OptimizerLike = None
    params: Iterable[Any] | None = None
    scheduler: SchedulerLike = None
    data: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    sharded: type[ShardedOptimizer] = ShardedOptimizer
    routes_later: bool = False


def without_overridden(config: Config, optimizer: OptimizerLike, *, warns: bool) -> Config:
    """Return the configuration without its optimizer where the caller brings one, with a warning."""
    if optimizer is None or config.optimizer is None:
        return config
    if warns:
        say_overridden(config.optimizer.type)
    return config.model_copy(update={"optimizer": None})


def say_overridden(kind: str) -> None:
    """Warn that the configuration's optimizer, of type `kind`, is not used."""
    _log.warning("the section optimizer (%s) is not used: another optimizer was passed to initialize()", kind)
