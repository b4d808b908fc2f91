"""The configuration as clients give it: upstream's laxness in, ds-engine's strictness out.

Upstream takes unknown top-level keys, unknown keys of sections that it reads one key at a time, and "auto" left inside
`zero_optimization`; clients rely on it (TRL adds dotted keys).
Each is dropped with one warning that names the key, the nearest known one and what was assumed. Everything else is checked
by `ds_engine.load_config`, which refuses what it does not know.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from deepspeed._ours.raising import raising
from deepspeed._ours.sections import get_bfloat16_config, get_float16_config, get_monitor_config, get_zero_config
from ds_comm import world_group
from ds_config import keys, nearest, read
from ds_config.errors import ConfigError
from ds_config.reading import Source
from ds_engine import Config, Plan, load_config, resolve_batch
from ds_engine.batch import Batch, BatchRequest
from ds_engine.config import source_of
from ds_engine.rules import asked_batch

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "accepted",
    "dict_raise_error_on_duplicate_keys",
    "get_gradient_allreduce_op",
    "get_gradient_clipping",
    "get_log_level",
    "raw_config",
]

_log = logging.getLogger("DeepSpeed")
_AUTO = "auto"

LAYOUT = "DS_CHECKPOINT_LAYOUT"
"""The variable that says `checkpoint.layout` for configurations that do not."""

DeepSpeedConfigError = ConfigError
"""What a wrong configuration raises."""


def raw_config(config: Source | None, config_params: Source | None = None, args: Any = None) -> dict[str, Any]:
    """The configuration as the caller wrote it, from any of the places that `initialize` takes it from.

    A dict is returned as it is, the same object: clients keep it and read it through `engine.config`.

    Raises:
        ConfigError: none was given, or more than one ("config-source"); it cannot be read.
    """
    source = source_of(config, config_params, args)
    return source if isinstance(source, dict) else dict(read(_path(source)).data)


def _path(source: Any) -> Source:
    # Any path-like, py.path among them.
    return os.fspath(source) if hasattr(source, "__fspath__") else source


def accepted(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` without what upstream would not have looked at, each with one warning; 0 and 1 are truth values where those belong."""
    kept = _known_of(_with_truth(raw, ()), "")
    for section in [name for name in kept if name in _LAX]:
        if isinstance(kept[section], Mapping):
            kept[section] = _known_of(kept[section], section)
    if isinstance(kept.get("zero_optimization"), Mapping):
        kept["zero_optimization"] = _without_auto(kept["zero_optimization"], ("zero_optimization",))
    if isinstance(kept.get("tensor_parallel"), Mapping) and "tp_overlap_comm" in kept["tensor_parallel"]:
        kept["tensor_parallel"] = {k: v for k, v in kept["tensor_parallel"].items() if k != "tp_overlap_comm"}
        if raw["tensor_parallel"]["tp_overlap_comm"]:
            _log.warning(
                "tensor_parallel.tp_overlap_comm has no effect: layers that read one input sum its gradient once"
            )
    layout = os.environ.get(LAYOUT)
    if layout:
        kept["checkpoint"] = {"layout": layout, **_section(kept, "checkpoint")}
    if isinstance(kept.get("log_level"), str):
        kept["log_level"] = kept["log_level"].lower()
    if "gradient_allreduce_op" in kept:
        kept["gradient_allreduce_op"] = get_gradient_allreduce_op(kept)
    return kept


# Sections that upstream reads one key at a time, without a look at the others.
_LAX = frozenset({
    "activation_checkpointing", "aio", "checkpoint", "curriculum_learning", "data_types", "elasticity", "flops_profiler",
    "optimizer", "pipeline", "progressive_layer_drop", "scheduler", "sparse_attention", "torch_autocast",
})  # fmt: skip


def _known_of(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`section` without the keys that nothing knows, each with a warning; `name` is empty for the whole configuration."""
    known = _keys_of(name)
    for key in section:
        if key not in known:
            close = nearest(key.rpartition(".")[2], known)
            hint = f" (nearest known key: {close[0]!r})" if close else ""
            there = f"{name}.{key}" if name else key
            _log.warning("configuration key %r is unknown%s and was left out, as upstream does", there, hint)
    return {key: value for key, value in section.items() if key in known}


@cache
def _keys_of(section: str) -> frozenset[str]:
    if not section:
        return frozenset(str(key.path[0]) for key in keys(Config))
    return frozenset(str(key.path[1]) for key in keys(Config) if len(key.path) > 1 and key.path[0] == section)


@cache
def _truths() -> frozenset[tuple[str | int, ...]]:
    return frozenset(key.path for key in keys(Config) if key.model.model_fields[key.field].annotation is bool)


def _with_truth(section: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        there = (*path, key)
        if isinstance(value, Mapping):
            found[key] = _with_truth(value, there)
        else:
            found[key] = bool(value) if type(value) is int and value in (0, 1) and there in _truths() else value
    return found


def _without_auto(section: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        if value == _AUTO:
            _log.warning("%s is 'auto' and nobody filled it in: its default is used", ".".join((*path, key)))
        else:
            found[key] = _without_auto(value, (*path, key)) if isinstance(value, Mapping) else value
    return found


# ---- one key at a time


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """Largest norm of the gradient; 0 does not clip."""
    return float(param_dict.get("gradient_clipping", Config.model_fields["gradient_clipping"].default))


_NOT_WITH_SUM: tuple[tuple[str, Callable[[Mapping[str, Any]], bool]], ...] = (
    ("ZeRO stage 3", lambda raw: _section(raw, "zero_optimization").get("stage") == 3),
    ("ZenFlow", lambda raw: _section(raw, "zero_optimization").get("zenflow") is not None),
    ("DeepCompile", lambda raw: _section(raw, "compile").get("deepcompile") is True),
)
"""What sums of gradients do not go with where programs come from, and how to see it."""


def get_gradient_allreduce_op(param_dict: Mapping[str, Any]) -> str:
    """ "mean" or "sum".

    Raises:
        ConfigError: anything else, or a sum with what divides gradients in its own way ("compat-argument").
    """
    found = str(param_dict.get("gradient_allreduce_op", "mean")).lower()
    clash = next((name for name, there in _NOT_WITH_SUM if found == "sum" and there(param_dict)), None)
    if found not in ("mean", "sum"):
        raise ConfigError(
            f"Invalid gradient_allreduce_op {found!r}", code="compat-argument", fix='Write "mean" or "sum".'
        )
    if clash is not None:
        raise ConfigError(
            f"gradient_allreduce_op = sum is not supported with {clash}", code="compat-argument", fix='Use "mean".'
        )
    return found


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = raw.get(name)
    return found if isinstance(found, Mapping) else {}


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
        raise ConfigError(
            f"log_level {name!r}", code="compat-argument", fix="Use debug, info, warning, error or critical."
        )
    return level


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.load(..., object_pairs_hook=...)`: a dict, or an error that names the keys given twice.

    Raises:
        ValueError: a key is given twice.
    """
    pairs = list(ordered_pairs)
    found = dict(pairs)
    if len(found) != len(pairs):
        given = [key for key, _ in pairs]
        twice = sorted({key for key in given if given.count(key) > 1})
        raise ConfigError(
            f"keys given twice in one object: {', '.join(twice)}", code="config-duplicate-key", fix="Keep one of each."
        )
    return found


# ---- the whole

_TOLD: Mapping[str, Callable[[DeepSpeedConfig], Any]] = {
    "zero_config": lambda c: get_zero_config(c._param_dict),
    "zero_optimization_stage": lambda c: c.model.zero_optimization.stage,
    "zero_enabled": lambda c: c.model.zero_optimization.stage > 0,
    "mics_shard_size": lambda c: c.model.zero_optimization.mics_shard_size,
    "float16_config": lambda c: get_float16_config(c._param_dict),
    "bfloat16_config": lambda c: get_bfloat16_config(c._param_dict),
    "log_level": lambda c: get_log_level(c._param_dict),
    "monitor_config": lambda c: get_monitor_config(c._param_dict),
    "fp16_enabled": lambda c: c.model.fp16.enabled,
    "bfloat16_enabled": lambda c: c.model.bf16.enabled,
    "amp_enabled": lambda c: False,
    "torch_autocast_enabled": lambda c: c.model.torch_autocast.enabled,
    "optimizer_name": lambda c: None if c.model.optimizer is None else c.model.optimizer.type.lower(),
    "optimizer_params": lambda c: _section(c._param_dict, "optimizer").get("params"),
    "scheduler_name": lambda c: None if c.model.scheduler is None else c.model.scheduler.type,
    "scheduler_params": lambda c: _section(c._param_dict, "scheduler").get("params"),
    "sparse_gradients_enabled": lambda c: c.model.sparse_gradients,
    "activation_checkpointing_config": lambda c: c.model.activation_checkpointing,
    "flops_profiler_config": lambda c: c.model.flops_profiler,
    "comms_config": lambda c: c.model.comms_logger,
    "checkpoint_config": lambda c: c.model.checkpoint,
    "elasticity_enabled": lambda c: c.model.elasticity.enabled,
    "eigenvalue_enabled": lambda c: bool(_section(c._param_dict, "eigenvalue").get("enabled", False)),
    "eigenvalue_verbose": lambda c: bool(_section(c._param_dict, "eigenvalue").get("verbose", False)),
    "pld_enabled": lambda c: bool(_section(c._param_dict, "progressive_layer_drop").get("enabled", False)),
    "pld_params": lambda c: dict(_section(c._param_dict, "progressive_layer_drop")) or False,
    "grad_accum_dtype": lambda c: c.model.data_types.grad_accum_dtype,
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
            raise ConfigError(
                "DeepSpeedConfig was given groups of another library", code="compat-mpu", fix="Leave mpu= out."
            )
        self._param_dict = raw_config(config)
        self.model = load_config(accepted(self._param_dict)) if plan is None else plan.config
        self.world_size = world_group().size
        # Ranks that share a batch's samples, by sequence, tensor or stage, are known to a plan only.
        ranks = self.world_size
        self._take(resolve_batch(asked_batch(self.model, ranks), ranks) if plan is None else plan.batch)

    def _take(self, batch: Batch) -> None:
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation

    @raising(AssertionError)
    def _configure_train_batch_size(self) -> None:
        """Work out those of the three batch keys that are None.

        Raises:
            PlanError: they do not fit together; an AssertionError, too.
        """
        asked = BatchRequest(
            self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        )
        self._take(resolve_batch(asked, self.world_size))

    @property
    def raw(self) -> dict[str, Any]:
        """The configuration as it was given."""
        return self._param_dict

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "_param_dict"):
            raise AttributeError(name)
        tells = _TOLD.get(name)
        return getattr(self.model, name) if tells is None else tells(self)
