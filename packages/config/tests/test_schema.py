"""The JSON Schema that editors get."""

from __future__ import annotations

import json
from typing import Any

from ds_config import StrictModel, json_schema, keys


def test_every_key_is_a_property_and_nothing_else_is_allowed(train: type[StrictModel]) -> None:
    schema = json_schema(train, title="ds")
    assert json.loads(json.dumps(schema)) == schema
    assert schema["title"] == "ds"
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["additionalProperties"] is False
    top = {key.path[0] for key in keys(train) if len(key.path) == 1}
    assert set(schema["properties"]) == top
    zero = schema["$defs"]["Zero"]["properties"]
    assert zero["cpu_offload"]["deprecated"] is True
    assert zero["cpu_offload"]["description"] == "cpu_offload is deprecated: use offload_optimizer."
    assert zero["round_robin_gradients"]["description"] == "round_robin_gradients is not built here: leave it out."
    assert zero["stage3_prefetch_bucket_size"]["description"] == "Another spelling of prefetch_bucket_size."


def test_scalars_may_be_auto(train: type[StrictModel]) -> None:
    def takes_auto(value: dict[str, Any]) -> bool:
        return {"const": "auto"} in value.get("anyOf", [])

    schema = json_schema(train)
    assert takes_auto(schema["properties"]["gradient_clipping"])
    assert schema["properties"]["gradient_clipping"]["default"] == 1.0
    assert takes_auto(schema["properties"]["train_batch_size"])
    assert takes_auto(schema["$defs"]["Zero"]["properties"]["stage"])


def test_keys_of_recursive_models_end() -> None:
    assert {key.path for key in keys(Node)} == {("name",), ("children",)}


class Node(StrictModel):
    name: str = ""
    children: "list[Node]" = []  # noqa: RUF012, UP037
