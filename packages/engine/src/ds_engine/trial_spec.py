"""What a tuner tells an engine: an `TrialSpec`, in a file that the variable DS_TRIAL names; what it changes is laid over the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ds_config.errors import ConfigError

__all__ = ["DS_TRIAL", "TrialSpec", "laid_over", "order_here"]

DS_TRIAL = "DS_TRIAL"  # path of this process's order


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """What one trial is to do.

    Attributes:
        changes: Values by dotted key, laid over the configuration that the script gives; null takes a key away.
        start_step, end_step: Measure from the first to the last of these steps, counted from 1; the steps before warm up.
        out: File for `TrialResult`; empty: none.
        metric_path: File for DeepSpeed's metrics; empty: none.
        model_info_path: File for DeepSpeed's facts of the model, after the first step; empty: none.
        detail: Also tell the model's shapes, what forward keeps for backward, and the speed of the links.
        memory_bytes: Most that the data of a rank may take (RLIMIT_DATA); 0: what there is.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    start_step: int = 3
    end_step: int = 5
    out: str = ""
    metric_path: str = ""
    model_info_path: str = ""
    detail: bool = False
    memory_bytes: int = 0


def order_here(environ: Mapping[str, str] | None = None) -> TrialSpec | None:
    """Load the trial specification of this process; None outside a trial.

    Raises:
        ConfigError: the file that the variable names is no specification ("trial-spec").
    """
    path = (os.environ if environ is None else environ).get(DS_TRIAL, "")
    if not path:
        return None
    try:
        return TypeAdapter(TrialSpec).validate_json(Path(path).read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"{DS_TRIAL} = {path}: {error}", code="trial-spec", fix=f"Unset {DS_TRIAL}; `ds tune` sets it."
        ) from error


def laid_over(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `config` with values at dotted keys; None removes a key, and missing sections are created."""
    result: dict[str, Any] = dict(config)
    for dotted, value in changes.items():
        *sections, last = dotted.split(".")
        at = result
        if value is None and not _has(result, sections):
            continue
        for name in sections:
            at[name] = dict(at[name]) if isinstance(at.get(name), Mapping) else {}
            at = at[name]
        if value is None:
            at.pop(last, None)
        else:
            at[last] = value
    return result


def _has(config: Mapping[str, Any], sections: list[str]) -> bool:
    at: Any = config
    for name in sections:
        at = at.get(name) if isinstance(at, Mapping) else None
    return isinstance(at, Mapping)
