"""Upstream's scheduler classes: a schedule of ds-engine, attached to an optimizer."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from ds_engine import schedules
from ds_engine.schedules import SCHEDULES, Scheduler

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
]

VALID_LR_SCHEDULES = list(SCHEDULES)


class _ByKind(type):
    """A scheduler that follows a schedule of the kind is an instance, whoever made it: `initialize` makes plain ones."""

    def __instancecheck__(cls, instance: object) -> bool:
        kind = getattr(cls, "kind", None)
        return super().__instancecheck__(instance) or (
            isinstance(instance, Scheduler) and kind is not None and type(instance.schedule) is kind
        )


class _Attached(Scheduler, metaclass=_ByKind):
    """A schedule by its parameters, writing into the groups of `optimizer`.

    Args:
        optimizer: Any torch optimizer.
        last_batch_iteration: The t to begin after.
        params: The schedule's own, as in the configuration.
    """

    kind: type[schedules.Schedule]

    def __init__(self, optimizer: torch.optim.Optimizer, *, last_batch_iteration: int = -1, **params: Any) -> None:
        super().__init__(self.kind(**params), optimizer.param_groups)
        self.optimizer = optimizer
        if last_batch_iteration >= 0:
            self.step(last_batch_iteration)


class LRRangeTest(_Attached):
    """`ds_engine.schedules.LRRangeTest` on an optimizer."""

    kind = schedules.LRRangeTest


class OneCycle(_Attached):
    """`ds_engine.schedules.OneCycle` on an optimizer."""

    kind = schedules.OneCycle


class WarmupLR(_Attached):
    """`ds_engine.schedules.WarmupLR` on an optimizer."""

    kind = schedules.WarmupLR


class WarmupDecayLR(_Attached):
    """`ds_engine.schedules.WarmupDecayLR` on an optimizer."""

    kind = schedules.WarmupDecayLR


class WarmupCosineLR(_Attached):
    """`ds_engine.schedules.WarmupCosineLR` on an optimizer."""

    kind = schedules.WarmupCosineLR


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and one argument for each parameter of a schedule, all None unless given; returns the parser."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", type=str, default=None, help="LR schedule for training.")
    known: set[str] = set()
    for schedule in SCHEDULES.values():
        for name, field in schedule.model_fields.items():
            if name not in known:
                known.add(name)
                group.add_argument(f"--{name}", default=None, help=field.description)
    return parser
