"""From an optimizer section to a torch optimizer: one table, one lookup in torch, one check of the arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ds_config import nearest
from ds_config.errors import ConfigError, UnsupportedError
from ds_engine.sections import (
    AdagradSection,
    AdamSection,
    AdamWSection,
    OptimizerSection,
    SchedulerSection,
    TorchOptimizerSection,
    TorchSchedulerSection,
)

__all__ = ["NOT_BUILT", "check_optimizer", "check_scheduler", "make_optimizer", "make_torch_scheduler"]

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]

NOT_BUILT: Mapping[str, str] = {
    "lamb": "AdamW; large batches train with a lower lr",
    "onebitadam": "AdamW with zero_optimization.stage 1 or 2",
    "zerooneadam": "AdamW with zero_optimization.stage 1 or 2",
    "onebitlamb": "AdamW with zero_optimization.stage 1 or 2",
    "lion": "AdamW, or pass an optimizer of your own to initialize()",
    "muon": "AdamW, or pass torch.optim.Muon to initialize() at stage 0",
    "muadam": "an optimizer of the package mup, passed to initialize()",
    "muadamw": "an optimizer of the package mup, passed to initialize()",
    "musgd": "an optimizer of the package mup, passed to initialize()",
}
"""Optimizer types of the schema that do not exist here, and what to use."""


def _adam(section: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    p = section.params
    decoupled = p.adam_w_mode or isinstance(section, AdamWSection)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind, {"lr": p.lr, "betas": p.betas, "eps": p.eps, "weight_decay": p.weight_decay, "amsgrad": p.amsgrad}


def _adagrad(section: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    p = section.params
    return torch.optim.Adagrad, {"lr": p.lr, "eps": p.eps, "weight_decay": p.weight_decay}


def _torch(section: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    check_optimizer(section)
    return getattr(torch.optim, section.type), {key: _tupled(value) for key, value in section.params.items()}


_TABLE: Mapping[type, Callable[[Any], tuple[type[torch.optim.Optimizer], dict[str, Any]]]] = {
    AdamSection: _adam,
    AdamWSection: _adam,
    AdagradSection: _adagrad,
    TorchOptimizerSection: _torch,
}


def make_optimizer(section: OptimizerSection, params: Params) -> torch.optim.Optimizer:
    """The optimizer that `section` describes, over `params` (parameters, or groups with values of their own).

    Raises:
        ConfigError: the type or a parameter is unknown ("optimizer-type", "optimizer-params").
        UnsupportedError: the type is known and not built here ("optimizer-unbuilt").
    """
    kind, arguments = _TABLE[type(section)](section)
    return kind(params, **arguments)


def make_torch_scheduler(section: TorchSchedulerSection, optimizer: torch.optim.Optimizer) -> Any:
    """The class of torch.optim.lr_scheduler that `section` names, on `optimizer`.

    Raises:
        ConfigError: the type or a parameter is unknown ("schedule-type", "schedule-params").
    """
    check_scheduler(section)
    return getattr(torch.optim.lr_scheduler, section.type)(optimizer, **section.params)


def check_optimizer(section: OptimizerSection) -> None:
    """Whether `section` names an optimizer that can be made, and only its parameters; builds nothing. Raises as above."""
    if not isinstance(section, TorchOptimizerSection):
        return
    if section.type.lower() in NOT_BUILT:
        raise UnsupportedError(
            f"optimizer.type {section.type!r} is not built here",
            code="optimizer-unbuilt",
            fix=f"Use {NOT_BUILT[section.type.lower()]}.",
        )
    known = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if section.type not in known:
        raise _unknown("optimizer", section.type, [*known, *NOT_BUILT], "torch.optim")
    _check_arguments("optimizer", section.type, section.params, known[section.type])


def check_scheduler(section: SchedulerSection) -> None:
    """The same for a scheduler section."""
    if not isinstance(section, TorchSchedulerSection):
        return
    base = torch.optim.lr_scheduler.LRScheduler
    known = {
        name: kind
        for name, kind in vars(torch.optim.lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base
    }
    if section.type not in known:
        raise _unknown("scheduler", section.type, known, "torch.optim.lr_scheduler")
    _check_arguments("scheduler", section.type, section.params, known[section.type])


def _unknown(what: str, name: str, known: Iterable[str], where: str) -> ConfigError:
    close = nearest(name, known)
    return ConfigError(
        f"{what}.type {name!r} is neither built in nor a class of {where}",
        code="optimizer-type" if what == "optimizer" else "schedule-type",
        fix=f"Did you mean {close[0]!r}?" if close else f"Give a class name of {where}.",
    )


def _check_arguments(what: str, name: str, given: Mapping[str, Any], kind: type) -> None:
    names = list(inspect.signature(kind.__init__).parameters)[2:]  # type: ignore[misc]
    unknown = sorted(set(given) - set(names))
    if unknown:
        close = nearest(unknown[0], names)
        raise ConfigError(
            f"{what}.params of {name} has no {', '.join(map(repr, unknown))}; it has {', '.join(names)}",
            code="optimizer-params" if what == "optimizer" else "schedule-params",
            fix=f"Did you mean {close[0]!r}?" if close else "Remove what it does not have.",
        )


def _tupled(value: Any) -> Any:
    # JSON has no tuples; torch's optimizers want betas and etas as tuples.
    return tuple(value) if isinstance(value, list) else value
