"""`deepspeed.elasticity`: the batch size that many numbers of ranks can share, by ds-engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from deepspeed._ours.base.raising import also
from ds_config import validate
from ds_config.errors import ConfigError, PlanError
from ds_engine.elastic_batch import elastic_batch, elastic_counts
from ds_engine.feature_table import ElasticityConfig

_AGREED = "DEEPSPEED_ELASTICITY_CONFIG"
_FIRST = (0, 3, 8)


class ElasticityError(ConfigError):
    """Elasticity cannot be had like this."""


class ElasticityConfigError(ElasticityError):
    """Its section is missing, incomplete or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):  # noqa: N818  upstream's name
    """No batch size of it suits this number of ranks."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a configuration asks for it."""
    return bool((ds_config.get("elasticity") or {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[Any, ...]:
    """Train batch size and the numbers of ranks that it suits; with a world size or `return_microbatch` the microbatch, too.

    Raises:
        ElasticityConfigError, ElasticityIncompatibleWorldSize: see there ("elasticity-section", "elasticity-world").
    """
    section = _section(ds_config, target_deepspeed_version)
    try:
        batch, counts = elastic_counts(section)
    except PlanError as error:
        raise ElasticityConfigError(error.message, code=error.code, fix=error.fix) from error
    if world_size <= 0 and not return_microbatch:
        return (batch, list(counts))
    try:
        request = elastic_batch(section, world_size or int(os.environ.get("WORLD_SIZE", "0")))
    except PlanError as error:
        raise ElasticityIncompatibleWorldSize(error.message, code=error.code, fix=error.fix) from error
    return (request.train, list(counts), request.micro)


def _section(ds_config: Mapping[str, Any], target: str) -> ElasticityConfig:
    section = ds_config.get("elasticity")
    if not isinstance(section, Mapping) or not section.get("enabled"):
        raise _wrong("the configuration has no elasticity section that is enabled", "Add one with enabled = true.")
    if tuple(int(part) for part in target.split("+")[0].split(".")[:3] if part.isdecimal()) < _FIRST:
        raise _wrong(f"version {target} knows no elasticity", "Ask for 0.3.8 or later.")
    missing = [name for name in ("max_train_batch_size", "micro_batch_sizes") if name not in section]
    if missing:
        raise _wrong(f"elasticity has no {' and no '.join(missing)}", "Give both.")
    if float(section.get("version", 0.2)) not in (0.1, 0.2):
        raise _wrong(f"elasticity.version = {section['version']}", "Write 0.1 or 0.2.")
    if float(section.get("version", 0.2)) == 0.1 and int(section.get("model_parallel_size", 1)) > 1:
        raise _wrong("elasticity.version = 0.1 has no model parallelism", "Write version = 0.2.")
    try:
        return validate(ElasticityConfig, dict(section))
    except ConfigError as error:
        raise also(ElasticityConfigError, AssertionError)(error.message, code=error.code, fix=error.fix) from error


def _wrong(what: str, fix: str) -> ConfigError:
    return ElasticityConfigError(what, code="elasticity-section", fix=fix)
