"""What is looked for and how, from a configuration that asks: the section `autotuning`, "auto" values and lists of values. Pure.

DeepSpeed's rules: a key with one value stays; a key with a list is looked for in that list; the size of a microbatch and the ZeRO stage
are looked for where they are not given. `fast: false` looks at sizes of buckets and at overlap, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_config.errors import ConfigError
from ds_engine import load_config
from ds_engine.autotuning import AutotuningConfig
from ds_engine.trial_results import LayerFacts
from ds_engine.trial_spec import laid_over
from ds_tune.search import Metric, TrialBudget, Tuner
from ds_tune.space import ACCUMULATION, CHECKPOINTED, MICRO, OFFLOAD, STAGE, TRAIN, SearchLimits, default_space

__all__ = ["TuningRequest", "asked_by_section", "asked_of", "parse_setting"]

_LOOKED_AT = (MICRO, ACCUMULATION, TRAIN, STAGE, OFFLOAD, CHECKPOINTED)
BUCKET = "zero_optimization.reduce_bucket_size"
_BUCKETS = (50_000_000, 500_000_000, 1_000_000_000)
_FULL: Mapping[str, tuple[Any, ...]] = {
    BUCKET: _BUCKETS,
    "zero_optimization.overlap_comm": (True, False),
}


@dataclass(frozen=True, slots=True)
class TuningRequest:
    """What the user asked for.

    Attributes:
        config: Without lists and "auto" in what is looked for.
        values: Values of the keys that were given lists.
        fixed: Keys that stay as they are.
    """

    config: Mapping[str, Any]
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    limits: SearchLimits = field(default_factory=SearchLimits)
    budget: TrialBudget = field(default_factory=lambda: TrialBudget(8))
    tuner: Tuner = "model_based"
    metric: Metric = "throughput"
    sizes: int | None = None
    model_ranks: int = 1

    def space(self, world: int, layers: Sequence[LayerFacts] = ()) -> dict[str, tuple[Any, ...]]:
        """Return all values of all tuned keys.

        Raises:
            ConfigError: nothing is left to choose ("tune-nothing").
        """
        values_by_key = default_space(load_config(self.config), world, self.limits, layers)
        if self.sizes is not None and MICRO not in self.values:
            values_by_key[MICRO] = values_by_key[MICRO][-self.sizes :]
        values_by_key = {**{k: v for k, v in values_by_key.items() if k not in self.fixed}, **self.values}
        if not any(len(values) > 1 for values in values_by_key.values()):
            raise ConfigError(
                f"nothing is left to choose: {', '.join(sorted({*self.fixed, *values_by_key})) or 'every key'} has one value",
                code="tune-nothing",
                fix='Write "auto" or a list for a key, leave out --fix, or give --search KEY=VALUE,VALUE.',
            )
        return values_by_key


def asked_of(config: Mapping[str, Any]) -> TuningRequest:
    """Build the tuning request of a configuration: lists and "auto" in tuned keys; `ds tune` adds its options."""
    values: dict[str, tuple[Any, ...]] = {}
    changes: dict[str, Any] = {}
    for key in _LOOKED_AT:
        value = _at(config, key)
        if isinstance(value, list) and key != CHECKPOINTED:
            values[key], changes[key] = tuple(value), None
        elif value in ("auto", "all"):
            changes[key] = None
    plain = laid_over(config, changes)
    plain.pop("autotuning", None)
    return TuningRequest(plain, values)


def asked_by_section(config: Mapping[str, Any], section: AutotuningConfig) -> TuningRequest:
    """Build the tuning request of `--autotuning`: the section's limits and trials, and DeepSpeed's fixed keys."""
    plain = asked_of(config)
    fixed_keys = [key for key in (MICRO, STAGE) if isinstance(_at(plain.config, key), int)]
    values = dict(plain.values)
    if not section.fast:
        width = section.model_info.hidden_size
        full = dict(_FULL) if width is None else {**_FULL, BUCKET: (*_BUCKETS, width * width)}
        values |= {key: value for key, value in full.items() if _at(config, key) is None}
    limits = SearchLimits(
        train=(section.min_train_batch_size, section.max_train_batch_size),
        micro=(section.min_train_micro_batch_size_per_gpu, section.max_train_micro_batch_size_per_gpu),
    )
    budget = TrialBudget(
        max(1, section.tuner_num_trials),
        section.end_profile_step - section.start_profile_step + 1,
        section.tuner_early_stopping,
    )
    # DeepSpeed looks at what is written in the section only; layers are checkpointed where the model says so.
    fixed = frozenset([*fixed_keys, CHECKPOINTED])
    return TuningRequest(
        plain.config, values, fixed, limits, budget, section.tuner_type, section.metric, section.num_tuning_micro_batch_sizes, section.mp_size
    )  # fmt: skip


def _at(config: Mapping[str, Any], dotted: str) -> Any:
    at: Any = config
    for name in dotted.split("."):
        at = at.get(name) if isinstance(at, Mapping) else None
    return at


def parse_setting(text: str) -> tuple[str, tuple[Any, ...]]:
    """Parse `key=1,2` into a key and its values; each value is read as JSON, or else as text.

    Raises:
        ConfigError: there is no `=`, no key or no value ("tune-space").
    """
    key, sign, rest = text.partition("=")
    if not sign or not key or not rest:
        raise ConfigError(f"{text!r} is no key with values", code="tune-space", fix="Write KEY=VALUE,VALUE.")
    try:
        values = json.loads(f"[{rest}]")
    except ValueError:
        values = rest.split(",")
    return key, tuple(values)
