"""JSON Schema of a model, for editors."""

from __future__ import annotations

from typing import Any

from ds_config.strict_model import StrictModel

__all__ = ["json_schema"]


def json_schema(model: type[StrictModel], *, title: str = "") -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of what a document for `model` may hold.

    Aliases are properties like any other; retired keys are marked `deprecated` with what became of them; `"auto"` is
    accepted for every scalar, as in documents. Write it to a file and name that file as `$schema` in the configuration's
    editor settings: keys complete, typos are underlined.
    """
    schema = model.model_json_schema(mode="validation")
    definitions = schema.get("$defs", {})
    for holder in [schema, *definitions.values()]:
        for name, value in holder.get("properties", {}).items():
            holder["properties"][name] = _or_auto(value)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = title or schema.get("title", model.__name__)
    return schema


def _or_auto(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type") not in ("integer", "number", "boolean"):
        if "anyOf" in value and {"const": "auto"} not in value["anyOf"]:
            return {**value, "anyOf": [*value["anyOf"], {"const": "auto"}]}
        return value
    outer: dict[str, Any] = {
        key: value[key] for key in ("default", "description", "title", "deprecated") if key in value
    }
    return {"anyOf": [{k: v for k, v in value.items() if k not in outer}, {"const": "auto"}], **outer}
