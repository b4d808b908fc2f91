"""The configuration as clients give it: upstream's laxness in, ds-engine's strictness out.

Upstream takes unknown top-level keys and "auto" left inside `zero_optimization`; clients rely on it (TRL adds dotted keys).
Each is dropped with one warning that names the key, the nearest known one and what was assumed. Everything else is checked
by `ds_engine.load_config`, which refuses what it does not know.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ds_comm import world_group
from ds_config import keys, nearest, read
from ds_config.errors import ConfigError
from ds_config.reading import Source
from ds_engine import Config, load_config, resolve_batch
from ds_engine.config import source_of

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError", "accepted", "dict_raise_error_on_duplicate_keys", "raw_config"]

_log = logging.getLogger("DeepSpeed")
_AUTO = "auto"

DeepSpeedConfigError = ConfigError
"""What a wrong configuration raises."""


def raw_config(config: Source | None, config_params: Source | None = None, args: Any = None) -> dict[str, Any]:
    """The configuration as the caller wrote it, from any of the places that `initialize` takes it from.

    A dict is returned as it is, the same object: clients keep it and read it through `engine.config`.

    Raises:
        ConfigError: none was given, or more than one ("config-source"); it cannot be read.
    """
    source = source_of(config, config_params, args)
    return source if isinstance(source, dict) else dict(read(source).data)


def accepted(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` without what upstream would not have looked at, each with one warning."""
    known = {str(key.path[0]) for key in keys(Config)}
    kept = {key: value for key, value in raw.items() if key in known}
    for key in raw:
        if key not in known:
            close = nearest(key.rpartition(".")[2], known)
            hint = f" (nearest known key: {close[0]!r})" if close else ""
            _log.warning("configuration key %r is unknown%s and was left out, as upstream does", key, hint)
    if isinstance(kept.get("zero_optimization"), Mapping):
        kept["zero_optimization"] = _without_auto(kept["zero_optimization"], ("zero_optimization",))
    return kept


def _without_auto(section: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        if value == _AUTO:
            _log.warning("%s is 'auto' and nobody filled it in: its default is used", ".".join((*path, key)))
        else:
            found[key] = _without_auto(value, (*path, key)) if isinstance(value, Mapping) else value
    return found


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


class DeepSpeedConfig:
    """A checked configuration with upstream's attribute names for what clients read; `model` is the whole of it.

    Args:
        config: A dict, a path, or base64.
        mpu, mesh_device: Not supported.
    """

    def __init__(self, config: Source, mpu: object = None, mesh_device: object = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise ConfigError(
                "DeepSpeedConfig was given groups of another library", code="compat-mpu", fix="Leave mpu= out."
            )
        self.raw = raw_config(config)
        self.model = load_config(accepted(self.raw))
        batch = resolve_batch(self.model.batch, world_group().size)
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation

    @property
    def zero_config(self) -> Any:
        """The `zero_optimization` section."""
        return self.model.zero_optimization

    @property
    def zero_optimization_stage(self) -> int:
        """Its stage."""
        return self.model.zero_optimization.stage

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)
