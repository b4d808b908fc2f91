"""The base of every configuration model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue

from ds_config.issues import shown
from ds_config.migrate import migrate
from ds_config.saying import speak
from ds_config.schema_fields import retirement_note
from ds_config.shape import aliases, coerce, of_field, refuses_bool, retired

__all__ = ["PREPARED", "StrictModel"]

PREPARED = "ds_config: keys are migrated and values coerced"
_log = logging.getLogger("ds_config")
speak("ds_config")


class StrictModel(BaseModel):
    """A frozen record that accepts exactly what it declares.

    Types are strict: no string is a number, no bool is an int or a float, 1.5 is no int. What JSON cannot write exactly is
    understood: 5e8 and 16.0 are ints, an int is a float, a list fills a tuple, a string names an enum member or a path.
    Unknown keys are errors, defaults are checked, fields may carry the vocabulary of `ds_config.schema_fields`.

    Building one from Python (`Zero(stage=2)`) follows the same rules and raises pydantic's ValidationError. For what a user
    wrote call `ds_config.load` or `ds_config.validate`: every problem at once, with its place.
    """

    KEYS_COMMAND: ClassVar[str] = ""  # the command that explains the keys it is given; of the outermost model

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # within values of any type: null would stand for the default
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy in which the values of `update` are checked as those of a new model are; pydantic's takes any name and value.

        Args:
            update: By name of a field, or another spelling of it.
            deep: Copy the values as well.

        Raises:
            pydantic.ValidationError: a name is unknown, or a value is not one of its field.
        """
        if not update:
            return super().model_copy(deep=deep)
        named = {name: getattr(self, name) for name in self.model_fields_set - _retired_names(type(self))}
        checked = type(self).model_validate({**named, **update})
        changed = {name for name in checked.model_fields_set if name in update or name not in named}
        return super().model_copy(update={name: getattr(checked, name) for name in changed}, deep=deep)

    @model_validator(mode="before")
    @classmethod
    def _understand(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context is PREPARED or not isinstance(data, Mapping):
            return data
        level = migrate(cls, data)
        if level.problems:
            raise ValueError("; ".join(f"{p.name} {p.message} {p.fix}" for p in level.problems))
        for name, reason in level.notes:
            _log.warning("%s.%s %s", cls.__name__, name, retirement_note(reason))
        for name, value in level.values.items():
            if name in cls.model_fields:
                choices = of_field(cls.model_fields[name])
                if isinstance(value, bool) and refuses_bool(choices):
                    raise ValueError(f"{name}: found {shown(value)}, which is no number")
                level.values[name] = coerce(choices, value)
        return level.values

    @model_serializer(mode="wrap")
    def _without_retired(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped = handler(self)
        return {key: value for key, value in dumped.items() if key not in _retired_names(type(self))}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        target = handler.resolve_ref_schema(schema)
        properties = target.get("properties", {})
        for name, field in cls.model_fields.items():
            reason = retired(field)
            if name in properties and reason is not None:
                properties[name] = {
                    **properties[name],
                    "deprecated": True,
                    "description": f"{name} {retirement_note(reason)}.",
                }
            for other in aliases(field):
                if name in properties:
                    properties[other] = {**properties[name], "description": f"Another spelling of {name}."}
        return schema


def _retired_names(model: type[BaseModel]) -> set[str]:
    return {name for name, field in model.model_fields.items() if retired(field)}
