"""The configuration as clients give it, and `DeepSpeedConfig`. What is left of upstream's laxness: `deepspeed._ours.config.accepted_keys`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deepspeed._ours.base.forwarding import attributes_of
from deepspeed._ours.base.raising import raising, refused
from deepspeed._ours.config.accepted_keys import accepted, section_of
from deepspeed._ours.config.section_models import (
    get_bfloat16_config,
    get_float16_config,
    get_monitor_config,
    get_zero_config,
)
from deepspeed._ours.parallel.autoep_config import parse_autoep_config
from ds_comm import world_group
from ds_config import read
from ds_config.config_file import Source
from ds_engine import Config, Plan, load_config, resolve_batch
from ds_engine.batch import BatchRequest, BatchSizes
from ds_engine.config import source_of
from ds_engine.config_rules import asked_batch


def raw_config(config: Source | None, config_params: Source | None = None, args: Any = None) -> dict[str, Any]:
    """Return the configuration as the caller wrote it, from any of the places that `initialize` accepts.

    A dict is returned unchanged, the same object: clients hold it and read it through `engine.config`.

    Raises:
        ConfigError: none was given, or more than one ("config-source"); the source cannot be read.
    """
    source = source_of(config, config_params, args)
    return source if isinstance(source, dict) else dict(read(_path(source)).data)


def _path(source: Any) -> Source:
    # Any path-like, py.path among them.
    return os.fspath(source) if hasattr(source, "__fspath__") else source


# ---- one key at a time


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """Return the largest norm of the gradient; 0 does not clip."""
    return float(param_dict.get("gradient_clipping", Config.model_fields["gradient_clipping"].default))


def get_log_level(param_dict: Mapping[str, Any]) -> str | None:
    """`log_level` in capitals; None where it is not given.

    Raises:
        ConfigError: no level has this name ("compat-argument").
    """
    name = param_dict.get("log_level")
    if name is None:
        return None
    level = str(name).upper()
    if level not in logging.getLevelNamesMapping():
        raise refused("log-level", name)
    return level


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from pairs, or raise an error that names the duplicate keys.

    For `json.load(..., object_pairs_hook=...)`.

    Raises:
        ValueError: a key is given twice.
    """
    pairs = list(ordered_pairs)
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise refused("duplicate-keys", ", ".join(twice))
    return mapping


# ---- the whole

_TOLD: Mapping[str, Callable[[DeepSpeedConfig], Any]] = {
    **attributes_of("configuration"),
    "zero_config": lambda c: get_zero_config(c._param_dict),
    "zero_enabled": lambda c: c.model.zero_optimization.stage > 0,
    "float16_config": lambda c: get_float16_config(c._param_dict),
    "bfloat16_config": lambda c: get_bfloat16_config(c._param_dict),
    "expert_parallel_config": lambda c: parse_autoep_config(section_of(c._param_dict, "expert_parallel")),
    "log_level": lambda c: get_log_level(c._param_dict),
    "monitor_config": lambda c: get_monitor_config(c._param_dict),
    "amp_enabled": lambda c: False,
    "optimizer_name": lambda c: None if c.model.optimizer is None else c.model.optimizer.type.lower(),
    "optimizer_params": lambda c: section_of(c._param_dict, "optimizer").get("params"),
    "scheduler_name": lambda c: None if c.model.scheduler is None else c.model.scheduler.type,
    "scheduler_params": lambda c: section_of(c._param_dict, "scheduler").get("params"),
    "eigenvalue_enabled": lambda c: bool(section_of(c._param_dict, "eigenvalue").get("enabled", False)),
    "eigenvalue_verbose": lambda c: bool(section_of(c._param_dict, "eigenvalue").get("verbose", False)),
    "pld_enabled": lambda c: bool(section_of(c._param_dict, "progressive_layer_drop").get("enabled", False)),
    "pld_params": lambda c: dict(section_of(c._param_dict, "progressive_layer_drop")) or False,
    "param_dtype": lambda c: section_of(c._param_dict, "data_types").get("param_dtype"),
    "buffer_dtype": lambda c: section_of(c._param_dict, "data_types").get("buffer_dtype"),
}
"""Attributes that upstream names otherwise than the keys of the configuration."""


class DeepSpeedConfig:
    """A checked configuration with upstream's attribute names for what clients read; `model` is the whole of it.

    Args:
        config: A dict, a path, or base64.
        mpu, mesh_device: Not supported.
        plan: What a running engine made of it.
    Raises:
        ConfigError, PlanError: both are AssertionErrors, too.
    """

    model: Config
    _param_dict: dict[str, Any]
    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int

    @raising(AssertionError)
    def __init__(
        self, config: Source, mpu: object = None, mesh_device: object = None, *, plan: Plan | None = None
    ) -> None:
        if mpu is not None or mesh_device is not None:
            raise refused("mpu")
        self._param_dict = raw_config(config)
        parse_autoep_config(
            section_of(self._param_dict, "expert_parallel")
        )  # whose error shows the value as Python does
        self.model = load_config(accepted(self._param_dict)) if plan is None else plan.config
        self.world_size = world_group().size
        # Ranks that share a batch's samples, by sequence, tensor or stage, are known to a plan only.
        ranks = self.world_size
        self._take(resolve_batch(asked_batch(self.model, ranks), ranks) if plan is None else plan.batch)

    def _take(self, batch: BatchSizes) -> None:
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation

    @raising(AssertionError)
    def _configure_train_batch_size(self) -> None:
        """Work out those of the three batch keys that are None.

        Raises:
            PlanError: they do not fit together; an AssertionError, too.
        """
        request = BatchRequest(
            self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        )
        self._take(resolve_batch(request, self.world_size))

    @property
    def raw(self) -> dict[str, Any]:
        """The configuration as it was given."""
        return self._param_dict

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "_param_dict"):
            raise AttributeError(name)
        tells = _TOLD.get(name)
        return getattr(self.model, name) if tells is None else tells(self)
