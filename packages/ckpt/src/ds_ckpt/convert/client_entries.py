"""A client state between a meta, where it is JSON with tags, and DeepSpeed's pickles, where it is Python's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_ckpt.client_state import decode, encode, has_tags
from ds_ckpt.convert.pickled_objects import without_objects
from ds_ckpt.jsontext import Json, to_json
from ds_ckpt.tagged_values import KIND
from ds_config.errors import CheckpointError, DsError

__all__ = ["client_entries", "client_json"]

# Kinds whose values torch's weights-only unpickler loads, here and in other programs; and from `ndarray` on those that are data here only,
# which programs of DeepSpeed expect as they were: states of random generators (GPT-NeoX), arguments (Megatron).
_SAFE = frozenset(
    [
        "int",
        "float",
        "complex",
        "dict",
        "OrderedDict",
        "Counter",
        "tuple",
        "Size",
        "set",
        "bytes",
        "bytearray",
        "tensor",
        "dtype",
        "device",
        "layout",
        "ndarray",
        "scalar",
        "Namespace",
        "SimpleNamespace",
        "enum",
    ]
)


def client_entries(client: Json) -> dict[str, Any]:
    """Return the values of a meta's client state; an entry that would need another class of a program to be loaded stays JSON."""
    return {key: _value(value) if _kinds(value) <= _SAFE else value for key, value in dict(client or {}).items()}


def _value(entry: Json) -> Any:
    try:
        return decode(entry)
    except CheckpointError:  # a member of an enum that this process has not
        return entry


def client_json(state: Mapping[Any, Any], left_out: list[str]) -> dict[str, Json]:
    """Return the entries of a client state as JSON with tags, and add those that cannot be stored to `left_out`."""
    client: dict[str, Json] = {}
    for key, value in without_objects(state, "client", left_out).items():
        try:
            client[str(key)] = to_json(value) if has_tags(value) else encode(value, f"client.{key}")
        except DsError as error:
            left_out.append(f"client.{key}: {error.message}")
    return client


def _kinds(value: Json) -> set[str]:
    """Collect the kinds of all tags in a value."""
    if isinstance(value, Mapping):
        inner = set().union(*map(_kinds, value.values()))
        return inner | ({str(value[KIND])} if KIND in value else set())
    return set().union(*map(_kinds, value)) if isinstance(value, list) else set()
