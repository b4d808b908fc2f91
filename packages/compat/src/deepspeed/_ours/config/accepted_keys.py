"""Upstream's laxness in, ds-engine's strictness out: what of a configuration is left out before `ds_engine.load_config` reads it.

Upstream takes unknown top-level keys, unknown keys of sections that it reads one key at a time, "auto" left inside
`zero_optimization`, and keys that do nothing beside others; programs rely on it. Each is left out with one warning that says what
would be right. A key that does nothing at all, as templates carry them, is told at info level: libraries read the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, get_args

from deepspeed._ours.base.raising import refused
from deepspeed._ours.zero.comm_dtypes import get_default_autocast_lower_precision_modules
from ds_config import classify, dotted, keys, nearest
from ds_engine import Config
from ds_engine.config_sections import MuonParams

_log = logging.getLogger("DeepSpeed")
Raw = Mapping[str, Any]

_NULL_IS_NONE = frozenset(
    {"aio", "bf16", "dataloader_drop_last", "dump_state", "prescale_gradients", "use_data_before_expert_parallelism"}
)
"""Keys that upstream takes null for, as if they were not there."""

_TAG_MODES = ("IGNORE", "WARN", "FAIL")

LAYOUT = "DS_CHECKPOINT_LAYOUT"
"""The variable that says `checkpoint.layout` for configurations that do not."""


def accepted(raw: Raw) -> dict[str, Any]:
    """Return `raw` without the keys that upstream ignores; 0 and 1 become truth values where the key is a flag, quoted values plain ones."""
    document = _known_of(_with_values(raw, ()), "")
    document = {key: value for key, value in document.items() if value is not None or key not in _NULL_IS_NONE}
    for section in [name for name in document if name in _LAX]:
        if isinstance(document[section], Mapping):
            document[section] = _known_of(document[section], section)
            if section == "activation_checkpointing":  # upstream's flags of it take null
                document[section] = {key: value for key, value in document[section].items() if value is not None}
    for section in ("optimizer", "scheduler"):
        if not isinstance(document.get(section), Mapping):
            continue
        if document[section].get("type") is None:
            del document[section]  # to upstream a section without a type is none
        elif document[section].get("params", {}) is None:
            document[section] = _without(document[section], ("params",))
    shape = _at(document, _WARMUP)
    if shape not in (None, "auto", "log", "linear"):
        _log.warning("%s = %r is unknown (log, linear): the rate rises as with log", ".".join(_WARMUP), shape)
        document = _without(document, _WARMUP)
    optimizer = section_of(document, "optimizer")
    if str(optimizer.get("type")).lower() == "muon" and isinstance(optimizer.get("params"), Mapping):
        document["optimizer"] = {**optimizer, "params": _known_of(optimizer["params"], _MUON)}
    if isinstance(document.get("zero_optimization"), Mapping):
        document["zero_optimization"] = _without_auto(document["zero_optimization"], ("zero_optimization",))
    for path, vain, reason in _VAIN:
        value = _at(document, path)
        if value is not None and vain(document):
            document = _without(document, path)
            if value not in (False, {}) or path in (_UNUSED, _TORCH_STATES):
                _log.warning("%s does nothing here and was left out: %s", ".".join(path), reason)
    autocast = section_of(document, "torch_autocast")
    if autocast.get("enabled") is True and autocast.get("lower_precision_safe_modules") is None:
        classes = get_default_autocast_lower_precision_modules()
        document["torch_autocast"] = {**autocast, "lower_precision_safe_modules": classes}
    _check_tag_validation(section_of(document, "checkpoint"))
    for report in classify(Config, document):
        if report.kind == "no effect" and all(isinstance(part, str) for part in report.path):
            document = _without(document, tuple(map(str, report.path)))
            _log.info("%s has no effect: %s", dotted(report.path), report.why)
    layout = os.environ.get(LAYOUT)
    if layout:
        document["checkpoint"] = {"layout": layout, **section_of(document, "checkpoint")}
    if isinstance(document.get("log_level"), str):
        document["log_level"] = document["log_level"].lower()
    if "gradient_allreduce_op" in document:
        document["gradient_allreduce_op"] = get_gradient_allreduce_op(document)
    return document


def _check_tag_validation(section: Raw) -> None:
    """Check the mode that `save_checkpoint` compares tags by. ds-ckpt has one mode, so that its own check never sees this value.

    Raises:
        ConfigError: a mode that upstream does not know ("config-value").
    """
    mode = section.get("tag_validation", "Warn")
    if str(mode).upper() not in _TAG_MODES:
        raise refused("tag-validation", mode)


def section_of(raw: Raw, name: str) -> Raw:
    """Return a section of `raw`; an empty mapping where it is missing or not a mapping."""
    section = raw.get(name)
    return section if isinstance(section, Mapping) else {}


# Sections that upstream reads one key at a time, without a look at the others.
_LAX = frozenset({
    "activation_checkpointing", "aio", "checkpoint", "curriculum_learning", "data_types", "elasticity", "flops_profiler",
    "optimizer", "pipeline", "progressive_layer_drop", "scheduler", "sparse_attention", "torch_autocast",
})  # fmt: skip


def _zero(raw: Raw, key: str, default: Any = None) -> Any:
    return section_of(raw, "zero_optimization").get(key, default)


def _below_3(raw: Raw) -> bool:
    return _zero(raw, "stage", 0) in (0, 1, 2)


def _without_stage(raw: Raw) -> bool:
    return _zero(raw, "stage", 0) == 0


def _off(*names: str) -> Callable[[Raw], bool]:
    return lambda raw: not any(section_of(raw, name).get("enabled", False) for name in names)


_Z = "zero_optimization"
_MUON = "optimizer.params"  # of the one optimizer whose parameters upstream reads one at a time
_WARMUP = ("scheduler", "params", "warmup_type")
_TORCH_STATES = ("optimizer", "params", "fp32_optimizer_states")
_UNUSED = (_Z, "ignore_unused_parameters")


def _looks_for_unused(raw: Raw) -> bool:
    # Upstream looks for them where it measures the norm on the host.
    device = section_of(section_of(raw, _Z), "offload_optimizer").get("device", "none")
    return _zero(raw, "stage", 0) in (1, 2) and (device == "cpu" or _zero(raw, "cpu_offload") is True)


def _profiled(raw: Raw) -> int:
    step = section_of(raw, "flops_profiler").get("profile_step")
    return step if isinstance(step, int) else 1


_FORMAT = "the gradients of all parameters travel in the format that communication_data_type says"
_CUT = "PipelineModule(num_stages=, partition_method=, seed_layers=) says how the model is cut"
_VAIN: tuple[tuple[tuple[str, ...], Callable[[Raw], bool], str], ...] = (
    ((_Z, "offload_param"), _below_3, "parameters are offloaded at stage 3"),
    ((_Z, "zero_hpz_partition_size"), _below_3, "secondary shards are of stage 3"),
    ((_Z, "mics_hierarchical_params_gather"), _below_3, "parameters are gathered in two steps at stage 3"),
    ((_Z, "zero_quantized_weights"), _below_3, "weights travel at stage 3"),
    ((_Z, "zero_quantized_nontrainable_weights"), _below_3, "weights travel at stage 3"),
    ((_Z, "zero_quantized_gradients"), _without_stage, "gradients are quantized at stages 1 to 3"),
    (
        (_Z, "zeropp_loco_param"),
        lambda raw: not _zero(raw, "zero_quantized_gradients"),
        "it corrects quantized gradients (zero_quantized_gradients)",
    ),
    (("sparse_gradients",), lambda raw: not _without_stage(raw), "rows are sent at stage 0"),
    (
        ("prescale_gradients",),
        lambda raw: raw.get("gradient_predivide_factor", 1.0) != 1.0,
        "gradient_predivide_factor says by what gradients are divided before they are added up",
    ),
    (("fp16", "auto_cast"), _off("fp16"), "fp16 is not enabled"),
    (("fp16", "fp16_master_weights_and_grads"), _off("fp16"), "fp16 is not enabled"),
    (("bf16", "bf16_master_weights_and_grads"), _off("bf16", "bfloat16"), "bf16 is not enabled"),
    (("bfloat16", "bf16_master_weights_and_grads"), _off("bf16", "bfloat16"), "bf16 is not enabled"),
    (("torch_autocast", "dtype"), _off("torch_autocast"), "torch_autocast is not enabled"),
    (("torch_autocast", "lower_precision_safe_modules"), _off("torch_autocast"), "torch_autocast is not enabled"),
    (("seq_parallel_communication_data_type",), lambda raw: True, _FORMAT),
    (
        _TORCH_STATES,
        lambda raw: bool(raw["optimizer"]["params"].get("torch_adam")),
        "torch's Adam keeps its state in the format of what it updates",
    ),
    (("pipeline", "stages"), lambda raw: section_of(raw, "pipeline")["stages"] != "auto", _CUT),
    (("pipeline", "partition"), lambda raw: section_of(raw, "pipeline")["partition"] != "best", _CUT),
    (("pipeline", "seed_layers"), lambda raw: True, _CUT),
    (
        ("activation_checkpointing", "contiguous_memory_optimization"),
        lambda raw: section_of(raw, "activation_checkpointing").get("number_checkpoints") is None,
        "buffers need number_checkpoints, or deepspeed.checkpointing.configure(contiguous_checkpointing=True, num_checkpoints=)",
    ),
    (("flops_profiler",), lambda raw: _profiled(raw) < 0, "profile_step is negative, and no step is profiled"),
    (("flops_profiler", "profile_step"), lambda raw: _profiled(raw) == 0, "the first step is profiled"),
    (
        _UNUSED,
        lambda raw: _zero(raw, "ignore_unused_parameters") is False and not _looks_for_unused(raw),
        "DeepSpeed looks for parameters without a gradient at stages 1 and 2 with the optimizer on the host only",
    ),
)
"""Keys that do nothing beside others: where, when, and what would be right."""


def _at(raw: Raw, path: tuple[str, ...]) -> Any:
    value: Any = raw
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _without(raw: Raw, path: tuple[str, ...]) -> dict[str, Any]:
    if len(path) == 1:
        return {key: value for key, value in raw.items() if key != path[0]}
    return {**raw, path[0]: _without(raw[path[0]], path[1:])}


def _known_of(section: Raw, name: str) -> dict[str, Any]:
    """Return `section` without its unknown keys, each of which is logged as a warning.

    `name` is empty for the whole configuration.
    """
    known = _keys_of(name)
    for key in section:
        if key not in known:
            close = nearest(str(key).rpartition(".")[2], known)
            hint = f" (nearest known key: {close[0]!r})" if close else ""
            there = f"{name}.{key}" if name else key
            _log.warning(
                "configuration key %r is unknown%s and was left out: DeepSpeed 0.19.8 does not read it, either",
                there,
                hint,
            )
    return {key: value for key, value in section.items() if key in known}


@cache
def _keys_of(section: str) -> frozenset[str]:
    if not section:
        return frozenset(str(key.path[0]) for key in keys(Config))
    if section == _MUON:
        return frozenset(MuonParams.model_fields)
    return frozenset(str(key.path[1]) for key in keys(Config) if len(key.path) > 1 and key.path[0] == section)


# Sections that upstream holds as pydantic models, which take "true" and "500" for what they say.
_TYPED = frozenset({
    "bf16", "bfloat16", "comet", "comms_logger", "compile", "csv_monitor", "fp16", "hybrid_engine", "tensorboard", "wandb", _Z,
})  # fmt: skip
_NONE = frozenset({type(None)})
_TRUTHS = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}


@cache
def _types() -> dict[tuple[str | int, ...], frozenset[type]]:
    """Return of every key the types that its value may have; of fixed choices the types of these."""
    types = {}
    for key in keys(Config):
        annotation = key.model.model_fields[key.field].annotation
        parts = get_args(annotation) or (annotation,)
        types[key.path] = frozenset(part if isinstance(part, type) else type(part) for part in parts)
    return types


def _with_values(section: Raw, path: tuple[str, ...]) -> dict[str, Any]:
    converted: dict[str, Any] = {}
    for key, value in section.items():
        there = (*path, key)
        if isinstance(value, Mapping):
            converted[key] = _with_values(value, there)
        elif type(value) is int and value in (0, 1) and _types().get(there, _NONE) - _NONE == {bool}:
            converted[key] = bool(value)
        elif isinstance(value, str) and there[0] in _TYPED:
            converted[key] = _unquoted(value, _types().get(there, frozenset()))
        else:
            converted[key] = value
    return converted


def _unquoted(text: str, types: frozenset[type]) -> Any:
    """Return what `text` says as one of `types`; `text` where it says none of them."""
    if str in types:
        return text
    if bool in types and text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    for kind in (kind for kind in (int, float) if kind in types):
        with suppress(ValueError):
            return kind(text)
    return text


def _without_auto(section: Raw, path: tuple[str, ...]) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for key, value in section.items():
        if value == "auto":
            _log.warning("%s is 'auto' and nobody filled it in: its default is used", ".".join((*path, key)))
        else:
            filled[key] = _without_auto(value, (*path, key)) if isinstance(value, Mapping) else value
    return filled


_NOT_WITH_SUM: tuple[tuple[str, Callable[[Raw], bool]], ...] = (
    ("ZeRO stage 3", lambda raw: _zero(raw, "stage") == 3),
    ("ZenFlow", lambda raw: _zero(raw, "zenflow") is not None),
    ("DeepCompile", lambda raw: section_of(raw, "compile").get("deepcompile") is True),
)
"""What sums of gradients do not go with where programs come from, and how to see it."""


def get_gradient_allreduce_op(param_dict: Raw) -> str:
    """Return the gradient's reduce operation, "mean" or "sum".

    Raises:
        ConfigError: any other value, or a sum with a feature that divides gradients in its own way ("compat-argument").
    """
    reduce_op = str(param_dict.get("gradient_allreduce_op", "mean")).lower()
    clash = next((name for name, there in _NOT_WITH_SUM if reduce_op == "sum" and there(param_dict)), None)
    if reduce_op not in ("mean", "sum"):
        raise refused("reduce-operation", reduce_op)
    if clash is not None:
        raise refused("reduce-sum", clash)
    return reduce_op
