"""Sections of curricula. Models only; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from ds_config import StrictModel
from ds_config.errors import ConfigError
from ds_data.schedules import Schedule, make_schedule

__all__ = ["CurriculumConfig"]


class CurriculumConfig(StrictModel):
    """`curriculum_learning`: short sequences first. The forward gets `curriculum_seqlen`, and cuts what it is given to it.

    Li, Zhang and He, arXiv:2108.06084.
    """

    enabled: bool = Field(default=False, description="Pass `curriculum_seqlen` to the model's forward.")
    curriculum_type: str = Field(default="seqlen", description="What grows: the length of sequences.")
    min_difficulty: int = Field(default=1, ge=1, description="Length at the beginning, in tokens.")
    max_difficulty: int = Field(default=1, ge=1, description="Length at the end.")
    schedule_type: Literal["fixed_discrete", "fixed_linear", "fixed_root"] = Field(
        default="fixed_linear", description="How it grows; see `ds_data.schedules`."
    )
    schedule_config: Mapping[str, Any] = Field(
        default_factory=dict,
        description="`difficulty` and `max_step`, or `total_curriculum_step`, `difficulty_step` and `root_degree`.",
    )

    def schedule(self) -> Schedule:
        """Length at each step; the first is 1. Raises ConfigError ("data-schedule")."""
        if self.curriculum_type != "seqlen":
            raise ConfigError(
                f"curriculum_type {self.curriculum_type!r}: only the length of sequences (seqlen) is told to a forward",
                code="data-schedule",
                fix="Use seqlen; what else makes a sample hard is for a sampler, see ds_data.schedules.",
            )
        return make_schedule(self.schedule_type, self.min_difficulty, self.max_difficulty, self.schedule_config)
