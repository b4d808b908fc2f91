"""Learning-rate schedules: pure functions of the step, and the small object that writes them into an optimizer.

Words: *t* counts scheduler steps from 0 and is -1 before the first, so update number n (from 0) runs with the values of
t = n - 1; the *base lr* is the lr that a parameter group had when the schedule was attached. A skipped update does not
advance t. Nothing here depends on the number of processes.

Formulas and keys are those of the DeepSpeed schema; deviations: progress within a cycle is computed in integers, so a
staircase never misses a stair by rounding, and an unknown `warmup_type` is an error.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from ds_config import StrictModel
from ds_config.errors import ConfigError
from ds_data.variable import VariableBatchSizeLR

__all__ = [
    "SCHEDULES",
    "LRRangeTest",
    "LRScheduler",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "advance",
    "momentum_of",
    "set_momentum",
    "set_rates",
]

_log = logging.getLogger("ds_engine")
PerGroup = float | tuple[float, ...]
Steps = Annotated[int, Field(gt=0)]
TotalSteps = Annotated[int, Field(ge=0)]
Warmup = Annotated[int, Field(ge=0)]
WarmupType = Literal["log", "linear"]


class Schedule(StrictModel):
    """A schedule is its parameters; `lr` and `momentum` are pure."""

    last_batch_iteration: int = Field(default=-1, ge=-1, description="The t to start with.")

    def lr(self, t: int, base_lr: float, group: int = 0) -> float:
        """Return the learning rate of parameter group number `group` at scheduler step t."""
        raise ConfigError(f"{type(self).__name__} defines no learning rate", code="schedule-type", fix="Override lr().")

    def momentum(self, t: int, group: int = 0) -> tuple[float, float] | None:
        """Return the betas of parameter group number `group` at scheduler step t; None if not scheduled."""
        del t, group
        return None

    def first_momentum(self, group: int = 0) -> tuple[float, float] | None:
        """Return the betas of the first update, before any scheduler step; None if not scheduled."""
        return self.momentum(-1, group)

    def check_steps(self) -> None:
        """Check that an optimizer can follow the schedule.

        Raises:
            ConfigError: it has no steps, which is what clients fill in where nothing is trained ("schedule-params").
        """
        if getattr(self, "total_num_steps", None) == 0:
            raise ConfigError(
                "scheduler.params.total_num_steps is 0, and there is an optimizer to follow it",
                code="schedule-params",
                fix="Set it to the number of optimizer steps of the run.",
            )

    def groups(self) -> dict[str, int]:
        """Return the keys with one value per parameter group, and the number of values of each."""
        return {key: len(value) for key, value in self if isinstance(value, tuple)}


class LRRangeTest(Schedule):
    """Grow the rate until training diverges: Smith, arXiv:1506.01186 section 3.3. lr = min (1 + rate I)."""

    lr_range_test_min_lr: PerGroup = Field(default=1e-3, description="Rate at the start; one value, or one per group.")
    lr_range_test_step_size: Steps = Field(default=2000, description="Steps in one interval.")
    lr_range_test_step_rate: float = Field(default=1.0, description="Growth per interval, as a multiple of the start.")
    lr_range_test_staircase: bool = Field(default=False, description="Grow once per interval instead of every step.")

    def lr(self, t: int, base_lr: float, group: int = 0) -> float:
        size = self.lr_range_test_step_size
        interval = float((t + 1) // size) if self.lr_range_test_staircase else (t + 1) / size
        return _of(self.lr_range_test_min_lr, group) * (1 + self.lr_range_test_step_rate * interval)


class OneCycle(Schedule):
    """One cycle up and down, then decay: Smith, arXiv:1803.09820. Momentum (beta1) moves the other way; beta2 is 0.99."""

    cycle_min_lr: PerGroup = Field(description="Lowest rate of the cycle; one value, or one per group.")
    cycle_max_lr: PerGroup = Field(description="Highest rate of the cycle; one value, or one per group.")
    decay_lr_rate: float = Field(default=0.0, description="Decay after the cycle: lr = min / (1 + rate k).")
    cycle_first_step_size: Steps = Field(default=2000, description="Steps of the rising half.")
    cycle_second_step_size: int | None = Field(
        None, ge=0, description="Steps of the falling half; the first half's if null."
    )
    cycle_first_stair_count: int = Field(default=0, description="Stairs in the rising half; 0 or less is continuous.")
    cycle_second_stair_count: int | None = Field(None, description="Stairs in the falling half; the first's if null.")
    decay_step_size: int = Field(default=0, ge=0, description="Steps of one decay interval; 0 does not decay.")
    cycle_momentum: bool = Field(default=True, description="Whether the betas follow the cycle.")
    cycle_min_mom: PerGroup = Field(default=0.8, description="beta1 at the highest rate; one value, or one per group.")
    cycle_max_mom: PerGroup = Field(default=0.9, description="beta1 at the lowest rate; one value, or one per group.")
    decay_mom_rate: float = Field(default=0.0, description="Growth of beta1 after the cycle: max (1 + rate k).")

    def lr(self, t: int, base_lr: float, group: int = 0) -> float:
        low, high = _of(self.cycle_min_lr, group), _of(self.cycle_max_lr, group)
        if t < self._total:
            return low + (high - low) * self._rise(t)
        return low / (1 + self.decay_lr_rate * self._decays(t))

    def momentum(self, t: int, group: int = 0) -> tuple[float, float] | None:
        if not self.cycle_momentum:
            return None
        low, high = _of(self.cycle_min_mom, group), _of(self.cycle_max_mom, group)
        if t < self._total:
            return high - (high - low) * self._rise(t), 0.99
        return high * (1 + self.decay_mom_rate * self._decays(t)), 0.99

    def first_momentum(self, group: int = 0) -> tuple[float, float] | None:
        """Return the lowest betas: DeepSpeed makes the first update with these, while the rate is lowest, too."""
        return (_of(self.cycle_min_mom, group), 0.99) if self.cycle_momentum else None

    @property
    def _second(self) -> int:
        second = self.cycle_second_step_size
        return self.cycle_first_step_size if second is None else second

    @property
    def _total(self) -> int:
        return self.cycle_first_step_size + self._second

    def _rise(self, t: int) -> float:
        """Return the position in the cycle: 0 at its low end, 1 at its top."""
        first, second, at = self.cycle_first_step_size, self._second, (t + 1) % self._total
        stairs = self.cycle_first_stair_count
        if at <= first:
            return _stairs(at, first, stairs)
        down = stairs if self.cycle_second_stair_count is None else self.cycle_second_stair_count
        return _stairs(self._total - at, second, down)

    def _decays(self, t: int) -> float:
        return (t - self._total + 1) / self.decay_step_size if self.decay_step_size else 0.0


class WarmupLR(Schedule):
    """Rise from min to max over the first steps, then stay."""

    warmup_min_lr: PerGroup = Field(default=0.0, description="Rate at the start; one value, or one per group.")
    warmup_max_lr: PerGroup | None = Field(
        default=None, description="Rate after the warmup; the optimizer's own if null."
    )
    warmup_num_steps: Warmup = Field(default=1000, description="Steps of the warmup; 0 and 1 count as 2.")
    warmup_type: WarmupType = Field(default="log", description="Shape of the rise: log(t+1)/log(N), or t/N.")

    def lr(self, t: int, base_lr: float, group: int = 0) -> float:
        low = _of(self.warmup_min_lr, group)
        high = base_lr if self.warmup_max_lr is None else _of(self.warmup_max_lr, group)
        return low + (high - low) * self._share(t)

    def _share(self, t: int) -> float:
        return _warmup(t, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """Rise as `WarmupLR`, then fall in a straight line to min at `total_num_steps`."""

    total_num_steps: TotalSteps = Field(
        description="Steps until the rate is back at its minimum; 0 only where nothing is trained."
    )
    warmup_max_lr: PerGroup | None = Field(
        default=0.001, description="Rate after the warmup; the optimizer's own if null."
    )

    def _share(self, t: int) -> float:
        n, total = max(2, self.warmup_num_steps), self.total_num_steps
        return super()._share(t) if t < n else max(0.0, (total - t) / max(1, total - n))


class WarmupCosineLR(Schedule):
    """Rise, then follow half a cosine down (Loshchilov and Hutter, arXiv:1608.03983). A ratio of the optimizer's lr."""

    total_num_steps: TotalSteps = Field(
        description="Steps until the rate is at its minimum; 0 only where nothing is trained."
    )
    warmup_min_ratio: float = Field(default=0.0, description="Share of the optimizer's lr at the start.")
    warmup_num_steps: Warmup = Field(default=1000, description="Steps of the warmup; 0 and 1 count as 2.")
    cos_min_ratio: float = Field(default=1e-4, description="Share of the optimizer's lr at the end.")
    warmup_type: WarmupType = Field(default="log", description="Shape of the rise: log(t+1)/log(N), or t/N.")

    def lr(self, t: int, base_lr: float, group: int = 0) -> float:
        return base_lr * self.ratio(t)

    def ratio(self, t: int) -> float:
        """Share of the optimizer's lr at scheduler step t."""
        n, total = max(2, self.warmup_num_steps), self.total_num_steps
        if t < 0:
            return 0.0
        if t < n:
            low = self.warmup_min_ratio
            return low + (1 - low) * _warmup(t, n, self.warmup_type)
        low, done = self.cos_min_ratio, min(1.0, (t - n + 1) / max(1, total - n))
        return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2


SCHEDULES: Mapping[str, type[Schedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def _warmup(t: int, steps: int, shape: WarmupType) -> float:
    steps = max(2, steps)
    if t < 0:
        return 0.0
    if t >= steps:
        return 1.0
    return math.log(t + 1) / math.log(steps) if shape == "log" else t / steps


def _stairs(at: int, size: int, count: int) -> float:
    return at / size if count <= 0 else (count * at // size) / count


def _of(value: PerGroup, group: int) -> float:
    return value[group] if isinstance(value, tuple) else value


class HasGroups(Protocol):
    """An optimizer, as a schedule sees it."""

    @property
    def param_groups(self) -> Sequence[MutableMapping[str, Any]]: ...


class LRScheduler:
    """Writes a schedule's values into the parameter groups of an optimizer, in place.

    Args:
        schedule: What to follow.
        optimizer: Whose `param_groups` are written; torch's `load_state_dict` puts others in their place. Each keeps its base lr under
            `initial_lr`, as torch's schedulers do, so that a resumed optimizer still knows it.
    Raises:
        ConfigError: a per-group value has another length than there are groups ("schedule-groups"), or the schedule has no
            steps ("schedule-params").
    """

    def __init__(self, schedule: Schedule, optimizer: HasGroups) -> None:
        schedule.check_steps()
        groups = optimizer.param_groups
        for key, count in schedule.groups().items():
            if count != len(groups):
                raise ConfigError(
                    f"scheduler.params.{key} has {count} values, the optimizer has {len(groups)} parameter groups",
                    code="schedule-groups",
                    fix="Give one value, or one per parameter group.",
                )
        self.schedule, self.optimizer, self.last_batch_iteration = schedule, optimizer, schedule.last_batch_iteration
        for group in groups:
            group.setdefault("initial_lr", float(group["lr"]))
        if schedule.momentum(0) is not None and not self._has_betas():
            _log.warning("%s schedules betas (cycle_momentum), which the optimizer has not", type(schedule).__name__)
        self._write()

    @property
    def _groups(self) -> Sequence[MutableMapping[str, Any]]:
        return self.optimizer.param_groups

    def _has_betas(self) -> bool:
        return any(_follows(group) for group in self._groups)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next t, or to the one given."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the current t."""
        return [self._lr(i) for i in range(len(self._groups))]

    def get_last_lr(self) -> list[float]:
        """Return the learning rates last written; the same as `get_lr()`."""
        return self.get_lr()

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each parameter group at the current t; None where they are not scheduled.

        Before the first step these are the schedule's own, which one cycle does not use for its first update (`first_momentum`).
        """
        betas = [self.schedule.momentum(self.last_batch_iteration, i) for i in range(len(self._groups))]
        return None if None in betas or not self._has_betas() else betas  # type: ignore[return-value]

    def state_dict(self) -> dict[str, int]:
        """Return the complete state to resume from: t."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to the t of `state`, and write its values."""
        self.step(int(state["last_batch_iteration"]))

    def _lr(self, i: int) -> float:
        group = self._groups[i]
        return self.schedule.lr(self.last_batch_iteration, group.setdefault("initial_lr", float(group["lr"])), i)

    def _write(self) -> None:
        set_rates(self._groups, self.get_lr())
        for i, group in enumerate(self._groups):
            t = self.last_batch_iteration
            betas = self.schedule.first_momentum(i) if t < 0 else self.schedule.momentum(t, i)
            if betas is not None and _follows(group):
                group["betas"] = betas


def _follows(group: Mapping[str, Any]) -> bool:
    """Whether the betas of a group are scheduled: not those of the AdamW inside of Muon, whose own momentum stays, as in DeepSpeed."""
    return "betas" in group and "use_muon" not in group


def set_rates(groups: Sequence[MutableMapping[str, Any]], rates: float | Sequence[float]) -> None:
    """Write one learning rate into every group, or one into each.

    Raises:
        ConfigError: another number of rates than groups ("schedule-groups").
    """
    each = [rates] * len(groups) if isinstance(rates, int | float) else list(rates)
    if len(each) != len(groups):
        raise ConfigError(
            f"{len(each)} learning rates for {len(groups)} parameter groups",
            code="schedule-groups",
            fix="Give one value, or one per parameter group.",
        )
    for group, rate in zip(groups, each, strict=True):
        if hasattr(group["lr"], "fill_"):  # a tensor lr is read by a compiled optimizer: keep the object
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def momentum_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the momentum of each parameter group: its betas, or its momentum where it has no betas, or 0."""
    return [group.get("betas", group.get("momentum", 0.0)) for group in groups]


def set_momentum(groups: Iterable[MutableMapping[str, Any]], momentum: Any) -> None:
    """Set `betas` (a pair) or `momentum` (a number) of every parameter group that has it."""
    key = "betas" if isinstance(momentum, tuple | list) else "momentum"
    for group in groups:
        if key in group:
            group[key] = tuple(momentum) if key == "betas" else momentum


def advance(scheduler: Any, arguments: Mapping[str, Any], *, applied: bool, samples: int) -> None:
    """Move a schedule on after a step; where rates follow the size of batches, also after one that was left out.

    Args:
        samples: The batch of the step, for a scheduler whose `step` wants a number where there are no arguments, as Megatron's does.
    """
    if scheduler is None:
        return
    if applied:
        scheduler.step(*([samples] if not arguments and _wants_number(scheduler.step) else ()), **arguments)
    elif isinstance(scheduler, VariableBatchSizeLR):
        scheduler.skip()


def _wants_number(step: Callable[..., Any]) -> bool:
    # Not of a metric, as torch's ReduceLROnPlateau wants it, which the size of a batch is not.
    needed = [
        row.name
        for row in inspect.signature(step).parameters.values()
        if row.kind is row.POSITIONAL_OR_KEYWORD and row.default is row.empty
    ]
    return len(needed) == 1 and needed != ["metrics"]
