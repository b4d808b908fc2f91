"""Sections of the configuration as upstream's models show them: every key is kept, whether it does something here or not.

ds-engine reads a configuration with strict models of its own, which drop what has no effect and refuse what is not built.
Programs also build upstream's models by themselves, to look at a default or to keep what a user wrote. Those models are made
here from the strict ones: the same keys, types, defaults and older names, without the rules about what is built.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, create_model, field_validator, model_validator
from pydantic.fields import FieldInfo

from deepspeed._ours.monitor.upstream_logging import logger
from ds_config import Alias, Deprecated
from ds_config.schema_fields import Retired
from ds_monitor.config import CometConfig, CsvMonitorConfig, TensorBoardConfig, WandbConfig
from ds_zero import config as strict


class OffloadDeviceEnum(enum.StrEnum):
    """Where state may rest."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """What `offload_states` may move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(int, enum.Enum):
    """The ZeRO stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedConfigModel(BaseModel):
    """The base of upstream's models: unknown keys are errors, values may be assigned, a field may be called by name or alias.

    A field whose `json_schema_extra` says `{"deprecated": True, "new_param": "section.key"}` hands its value on, through
    `new_param_fn` if there is one. Values "auto" count as not given.

    Raises:
        AssertionError: an old and its new key are both given.
    """

    model_config = ConfigDict(
        extra="forbid",
        populate_by_name=True,
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        values = data if strict else {key: value for key, value in data.items() if value != "auto"}
        for name, field in type(self).model_fields.items():
            old = field.json_schema_extra
            if name in values and isinstance(old, Mapping) and old.get("deprecated") and old.get("new_param"):
                _hand_on(values, name, old)
        super().__init__(**values)


def _hand_on(data: dict[str, Any], name: str, old: Mapping[str, Any]) -> None:
    if not old.get("set_new_param", True):
        return
    *sections, key = str(old["new_param"]).split(".")
    target = data
    for section in sections:
        target[section] = dict(target.get(section) or {})
        target = target[section]
    if key in target:
        raise AssertionError(f"{name} and {old['new_param']}, which replaces it, are both given")
    target[key] = old.get("new_param_fn", lambda value: value)(data.pop(name))


def _shown(model: type[BaseModel], name: str, **changes: Any) -> type[DeepSpeedConfigModel]:
    fields: dict[str, Any] = {key: _field(field) for key, field in model.model_fields.items()}
    return create_model(name, __base__=DeepSpeedConfigModel, __doc__=model.__doc__, **fields | changes)


def _field(field: FieldInfo) -> tuple[Any, Any]:
    options: dict[str, Any] = {"description": field.description}
    if field.default_factory is not None:
        options["default_factory"] = field.default_factory
    else:
        options["default"] = field.default
    rest = [part for part in field.metadata if not isinstance(part, Alias | Retired)]
    for part in field.metadata:
        if isinstance(part, Alias):
            options["alias"] = part.name
        elif isinstance(part, Deprecated):
            options["json_schema_extra"] = _handed_on(part)
    kind: Any = field.annotation
    for part in rest:
        kind = Annotated[kind, part]
    return kind, Field(**options)


def _handed_on(part: Deprecated) -> dict[str, Any]:
    convert = {} if part.convert is None else {"new_param_fn": part.convert}
    return {"deprecated": True, "new_param": part.new, **convert}


# ---- zero_optimization

DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{family}.modeling_{family}.{block}SparseMoeBlock"
    for family, block in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """`zero_optimization.leaf_module`; one name may stand for a list of one."""

    classes: list[str] = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_CLASSES))
    names: list[str] = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_NAMES))
    name_suffixes: list[str] = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_NAME_SUFFIXES))

    @field_validator("*", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


DeepSpeedZeroOffloadParamConfig = _shown(
    strict.OffloadParamConfig, "DeepSpeedZeroOffloadParamConfig", device=(OffloadDeviceEnum, OffloadDeviceEnum.none)
)


class DeepSpeedZeroOffloadOptimizerConfig(
    _shown(strict.OffloadOptimizerConfig, "_OffloadOptimizer", device=(OffloadDeviceEnum, OffloadDeviceEnum.none))  # type: ignore[misc]
):
    """`zero_optimization.offload_optimizer`."""

    @property
    def pipeline(self) -> bool:
        """Whether reading or writing goes on beside the update."""
        return bool(self.pipeline_read or self.pipeline_write)


def _gathers() -> Any:
    extra: Any = {"deprecated": True, "new_param": "gather_16bit_weights_on_model_save"}
    return bool, Field(default=False, json_schema_extra=extra)


class DeepSpeedZeroConfig(
    _shown(  # type: ignore[misc]
        strict.ZeroConfig,
        "_Zero",
        leaf_module=(DeepSpeedZeroLeafModuleConfig, Field(default_factory=DeepSpeedZeroLeafModuleConfig)),
        offload_param=(DeepSpeedZeroOffloadParamConfig | None, None),
        offload_optimizer=(DeepSpeedZeroOffloadOptimizerConfig | None, None),
        stage3_gather_fp16_weights_on_model_save=_gathers(),
    )
):
    """`zero_optimization`. `overlap_comm` that is not given is true at stage 3."""

    @model_validator(mode="before")
    @classmethod
    def _overlaps(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("overlap_comm") is None:
            return {**data, "overlap_comm": int(data.get("stage", 0)) == 3}
        return data

    @model_validator(mode="after")
    def _elastic(self) -> Any:
        if self.elastic_checkpoint and self.stage == 3:
            logger.warning("elastic checkpointing is deprecated: every checkpoint resumes on any number of ranks")
        return self


def get_zero_config(param_dict: Mapping[str, Any]) -> Any:
    """Return the section `zero_optimization`; the oldest form, a boolean, is stage 1 or 0."""
    section = param_dict.get("zero_optimization", {})
    return DeepSpeedZeroConfig(**({"stage": int(section)} if isinstance(section, bool) else section))


# ---- formats


class DeepSpeedBF16Config(_shown(strict.BF16Config, "_BF16")):  # type: ignore[misc]
    """`bf16`."""


_WHOLE = {"loss_scale_window": (int, 1000), "min_loss_scale": (int, 1)}


class DeepSpeedFP16Config(_shown(strict.FP16Config, "_FP16", **_WHOLE)):  # type: ignore[misc]
    """`fp16`. What speaks of a dynamic loss scale is checked only where there is one."""

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _a_number(cls, value: Any) -> Any:
        try:
            finite = not isinstance(value, bool) and math.isfinite(float(value))
        except (TypeError, ValueError):
            finite = False
        if not finite:
            raise ValueError(f"found {value!r}, which must be a number, and a finite one")
        return value

    @field_validator("loss_scale_window", "min_loss_scale")
    @classmethod
    def _positive(cls, value: int, info: ValidationInfo) -> int:
        if value <= 0 and info.data.get("enabled") and info.data.get("loss_scale") == 0:
            raise ValueError(f"fp16.{info.field_name} is {value}; a dynamic loss scale needs one above 0")
        return value

    def initial_dynamic_scale(self) -> int:
        """Return the initial dynamic loss scale."""
        return int(2**self.initial_scale_power)


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return the section `bf16`, or `bfloat16`, of a configuration."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return the section `fp16` of a configuration."""
    return DeepSpeedFP16Config(**(param_dict.get("fp16") or {}))


# ---- monitors


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """The sections of the monitors."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    comet: CometConfig = CometConfig()
    wandb: WandbConfig = WandbConfig()
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()

    @property
    def enabled(self) -> bool:
        """Whether one of them is."""
        return any(section.enabled for section in (self.tensorboard, self.comet, self.wandb, self.csv_monitor))


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the monitor sections of a configuration."""
    return DeepSpeedMonitorConfig(**{key: param_dict.get(key, {}) for key in DeepSpeedMonitorConfig.model_fields})
