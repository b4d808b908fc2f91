"""Upstream's scheduler classes: a schedule of ds-engine, attached to an optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from deepspeed._ours.monitor.upstream_logging import logger
from ds_engine import lr_schedules
from ds_engine.lr_schedules import SCHEDULES, LRScheduler

WARMUP_LOG_RATE = "log"


class _ByKind(type):
    """A scheduler that follows a schedule of the kind is an instance, whoever made it: `initialize` makes plain ones."""

    def __instancecheck__(cls, instance: object) -> bool:
        kind = getattr(cls, "kind", None)
        return super().__instancecheck__(instance) or (
            isinstance(instance, LRScheduler) and kind is not None and type(instance.schedule) is kind
        )


class _Attached(LRScheduler, metaclass=_ByKind):
    """A schedule by its parameters, writing into the groups of `optimizer`.

    Args:
        optimizer: Any torch optimizer.
        values: The first of upstream's parameters, in its order.
        last_batch_iteration: The t to begin after.
        params: The schedule's own, as in the configuration; they are attributes, too. An unknown `warmup_type` is "log".
    """

    kind: type[lr_schedules.Schedule]
    order: tuple[str, ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer, *values: Any, **params: Any) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"{type(self).__name__} of a {type(optimizer).__name__}, which is no torch.optim.Optimizer")
        names = (*self.order, "last_batch_iteration")
        if len(values) > len(names) or not params.keys().isdisjoint(names[: len(values)]):
            raise TypeError(f"{type(self).__name__} takes (optimizer, {', '.join(names)}), each once")
        params |= zip(names, values, strict=False)
        last_batch_iteration = params.pop("last_batch_iteration", -1)
        if (shape := params.get("warmup_type", WARMUP_LOG_RATE)) not in ("log", "linear"):
            logger.warning("warmup_type %r is unknown (log, linear): the rate rises as with log", shape)
            params["warmup_type"] = WARMUP_LOG_RATE
        super().__init__(self.kind(**params), optimizer)
        if last_batch_iteration >= 0:
            self.step(last_batch_iteration)

    def __getattr__(self, name: str) -> Any:
        schedule = self.__dict__.get("schedule")
        if schedule is None or name not in type(schedule).model_fields:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(schedule, name)

    def step(self, last_batch_iteration: int | None = None, batch_iteration: int | None = None) -> None:
        """Go to the next t, or to the one given, by either of upstream's names."""
        super().step(batch_iteration if last_batch_iteration is None else last_batch_iteration)

    def _each(self, value: float | tuple[float, ...]) -> list[float]:
        return list(value) if isinstance(value, tuple) else [value] * len(self.optimizer.param_groups)


class LRRangeTest(_Attached):
    """`ds_engine.lr_schedules.LRRangeTest` on an optimizer."""

    kind = lr_schedules.LRRangeTest
    order = (
        "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase",
    )  # fmt: skip


class OneCycle(_Attached):
    """`ds_engine.lr_schedules.OneCycle` on an optimizer."""

    kind = lr_schedules.OneCycle
    order = (
        "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size", "cycle_first_stair_count",
        "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate",
    )  # fmt: skip

    @property
    def min_lrs(self) -> list[float]:
        """Lowest rate of each parameter group."""
        return self._each(self.cycle_min_lr)

    @property
    def max_lrs(self) -> list[float]:
        """Highest rate of each parameter group."""
        return self._each(self.cycle_max_lr)

    @property
    def total_size(self) -> float:
        """Steps of a cycle."""
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        return float(first + (first if second is None else second))

    @property
    def step_ratio(self) -> float:
        """Share of the cycle in which the rate rises."""
        return float(self.cycle_first_step_size / self.total_size)


class WarmupLR(_Attached):
    """`ds_engine.lr_schedules.WarmupLR` on an optimizer."""

    kind: type[lr_schedules.Schedule] = lr_schedules.WarmupLR
    order: tuple[str, ...] = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")

    @property
    def min_lrs(self) -> list[float]:
        """Rate of each parameter group at the start."""
        return self._each(self.warmup_min_lr)

    @property
    def max_lrs(self) -> list[float]:
        """Rate of each parameter group after the warmup."""
        high = self.warmup_max_lr
        return [group["initial_lr"] for group in self.optimizer.param_groups] if high is None else self._each(high)

    @property
    def delta_lrs(self) -> list[float]:
        """How much the rate of each parameter group rises."""
        return [high - low for high, low in zip(self.max_lrs, self.min_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """`ds_engine.lr_schedules.WarmupDecayLR` on an optimizer."""

    kind = lr_schedules.WarmupDecayLR
    order = ("total_num_steps", *WarmupLR.order)


class WarmupCosineLR(_Attached):
    """`ds_engine.lr_schedules.WarmupCosineLR` on an optimizer."""

    kind = lr_schedules.WarmupCosineLR
    order = ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type")

    def get_lr_ratio(self) -> float:
        """Share of the optimizer's own rate at the current step."""
        return float(self.schedule.ratio(self.last_batch_iteration))  # type: ignore[attr-defined]


_ARGUMENTS: Mapping[str, Any] = {
    "lr_range_test_min_lr": 0.001, "lr_range_test_step_rate": 1.0, "lr_range_test_step_size": 1000, "lr_range_test_staircase": False,
    "cycle_first_step_size": 1000, "cycle_first_stair_count": -1, "cycle_second_stair_count": -1, "decay_step_size": 1000,
    "cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "decay_lr_rate": 0.0,
    "cycle_momentum": False, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0,
    "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": WARMUP_LOG_RATE,
    "warmup_min_ratio": 0.01, "cos_min_ratio": 0.01,
}  # fmt: skip
"""Upstream's defaults, which are not those of its classes; a script may have arguments of any other name."""


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and upstream's arguments for the parameters of schedules; returns the parser."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", type=str, default=None, help="LR schedule for training.")
    # Upstream's default of this one, -1, is a size that its schedule refuses.
    group.add_argument("--cycle_second_step_size", type=int, default=None, help=_help("cycle_second_step_size"))
    for name, default in _ARGUMENTS.items():
        reads: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default)}
        group.add_argument(f"--{name}", default=default, help=_help(name), **reads)
    return parser


def _help(name: str) -> str:
    fields = {key: field for schedule in SCHEDULES.values() for key, field in schedule.model_fields.items()}
    return str(fields[name].description)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the arguments of `add_tuning_arguments` from this program's; also return the remaining arguments."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Put the parameters that were given as arguments into `params`."""
    for schedule in SCHEDULES.values():
        _override(schedule.model_fields, args, params)


def _override(names: Iterable[str], args: argparse.Namespace, params: dict[str, Any]) -> None:
    # Upstream does not read the switch, whose default is not the schedule's.
    given = {name: getattr(args, name, None) for name in names if name != "cycle_momentum"}
    params.update({name: value for name, value in given.items() if value is not None})


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Build the `scheduler` section from arguments, or return None and the reason for its absence."""
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    params: dict[str, Any] = {}
    _override(SCHEDULES[name].model_fields, args, params)
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the first learning rate of a `scheduler` section, or None and the reason for its absence."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name, params = config["type"], config["params"]
    if name not in SCHEDULES:
        return None, f"{name} is not a valid LR schedule"
    if name == "WarmupCosineLR":
        return None, f"{name} scales the optimizer's own learning rate, its params have none"
    keys = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}
    return params[keys.get(name, "warmup_max_lr")], ""
