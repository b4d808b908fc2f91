"""How hard samples may be at each step. Pure.

A *difficulty* is a whole number in the unit of its metric: tokens of a sequence, a percentile, a rarity. With t the step:

    fixed_discrete  the first of `difficulty` whose `max_step` is not below t; the last has none
    fixed_root      floor((t / total)**(1 / degree) * (max - min) + min), down to a multiple of `difficulty_step`, at least the first such
                    multiple that is not below min, at most max
    fixed_linear    that with degree 1
    custom          a function of the caller's: t -> difficulty
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_config.errors import ConfigError

__all__ = ["Discrete", "Root", "Schedule", "make_schedule"]

Schedule = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Discrete:
    """Steps of a stair.

    Attributes:
        difficulties: One a stair.
        last_steps: Up to which step each holds; one fewer, since the last has no end.
    """

    difficulties: tuple[int, ...]
    last_steps: tuple[int, ...]

    def __call__(self, step: int) -> int:
        reached = sum(step > last for last in self.last_steps)
        return self.difficulties[reached]


@dataclass(frozen=True, slots=True)
class Root:
    """A root of the step, in multiples of `multiple`.

    Attributes:
        low, high: Difficulty at step 0, and the most there is. It is reached at `total` if it is a multiple, else a little later.
        total: Steps until `high`.
        multiple: What it is rounded down to, even below `low`, as DeepSpeed has it for random-LTD.
        degree: Of the root; 1 is a line.
        least: What it is raised to.
    """

    low: int
    high: int
    total: int
    multiple: int = 1
    degree: float = 1
    least: int = 0

    def __call__(self, step: int) -> int:
        value = math.floor((step / self.total) ** (1.0 / self.degree) * (self.high - self.low) + self.low)
        return min(max(value - value % self.multiple, self.least), self.high)


def make_schedule(
    kind: str, low: int, high: int, options: Mapping[str, Any], custom: Schedule | None = None
) -> Schedule:
    """Build the schedule of `schedule_type`, `min_difficulty`, `max_difficulty`, `schedule_config`.

    Raises:
        ConfigError: a key is missing, unknown or has no valid value ("data-schedule").
    """
    if kind == "custom":
        if custom is None:
            raise _bad(kind, options, "no function was given", "Give one: set_custom_curriculum_learning_schedule.")
        return custom
    needed = {
        "fixed_discrete": {"difficulty", "max_step"},
        "fixed_linear": {"total_curriculum_step", "difficulty_step"},
        "fixed_root": {"total_curriculum_step", "difficulty_step", "root_degree"},
    }.get(kind)
    if needed is None:
        raise _bad(
            kind, options, "there is no such schedule", "Use fixed_discrete, fixed_linear, fixed_root or custom."
        )
    # DeepSpeed's examples leave a root degree in linear schedules.
    if needed - options.keys() or options.keys() - needed - {"root_degree"}:
        raise _bad(kind, options, f"it takes {', '.join(sorted(needed))}", "Give these keys.")
    if kind == "fixed_discrete":
        hard, steps = tuple(options["difficulty"]), tuple(options["max_step"])
        if len(hard) != len(steps) + 1 or list(steps) != sorted(steps):
            raise _bad(kind, options, "max_step needs one value fewer than difficulty, in order", "Give both.")
        return Discrete(hard, steps)
    total, multiple = int(options["total_curriculum_step"]), int(options["difficulty_step"])
    degree = float(options["root_degree"]) if kind == "fixed_root" else 1.0
    if total < 1 or multiple < 1 or degree <= 0 or low > high:
        raise _bad(kind, options, f"with {low} to {high} it does not count up", "Give positive steps, and min <= max.")
    return Root(low, high, total, multiple, degree, least=-(-low // multiple) * multiple)


def _bad(kind: str, options: Mapping[str, Any], problem: str, fix: str) -> ConfigError:
    return ConfigError(
        f"schedule_type {kind} with schedule_config {dict(options)}: {problem}", code="data-schedule", fix=fix
    )
