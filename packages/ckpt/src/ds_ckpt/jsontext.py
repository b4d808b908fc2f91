"""JSON in and out, strictly: what is read is bounded and has no duplicate keys; what is written reads back the same.

JSON has no NaN and no infinities; a checkpoint's meta may (a best loss that starts at infinity). They travel as
`{"$float": "inf"}`, `"-inf"` or `"nan"`. Tuples come back as lists. Keys must be strings: JSON would turn `1` into `"1"`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ds_config.errors import CheckpointError

__all__ = ["Json", "dump", "from_json", "parse", "to_json"]

Json = Any  # None, bool, int, float, str, lists and string-keyed dicts of these
_FLOAT = "$float"
_MAX_DEPTH = 256


def dump(value: Json) -> str:
    """Compact text of a value that `to_json` returned."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def to_json(value: object, where: str = "meta", depth: int = 0) -> Json:
    """Copy `value` into JSON types only.

    Raises:
        CheckpointError: a value that JSON cannot hold ("ckpt-meta-type"), with its place in `value`.
    """
    if depth > _MAX_DEPTH:
        raise _not_json(where, f"nesting deeper than {_MAX_DEPTH}")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise _not_json(where, f"the integer {value:.3e}, which does not fit 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, Mapping):
        out: dict[str, Json] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise _not_json(where, f"the key {key!r} of type {type(key).__name__}; keys must be strings")
            if key == _FLOAT:
                raise _not_json(where, f"the key {_FLOAT!r}, which is reserved for floats that are not finite")
            out[key] = to_json(item, f"{where}.{key}", depth + 1)
        return out
    if isinstance(value, list | tuple):
        return [to_json(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise _not_json(where, f"a {type(value).__module__}.{type(value).__qualname__}")


def from_json(value: Json) -> Json:
    """Undo `to_json`: non-finite floats come back as floats."""
    if isinstance(value, dict):
        if set(value) == {_FLOAT}:
            if value[_FLOAT] not in ("inf", "-inf", "nan"):
                raise CheckpointError(f"{value!r} is not a float", code="ckpt-manifest-invalid", fix="")
            return float(value[_FLOAT])
        return {key: from_json(item) for key, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value


def parse(text: bytes, where: str) -> Json:
    """Parse JSON, and refuse duplicate keys, NaN, and integers beyond 64 bits.

    Raises:
        CheckpointError: "ckpt-manifest-invalid", naming `where`.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_int64)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not the JSON this format uses: {str(error)[:200]}",
            code="ckpt-manifest-invalid",
            fix="The file is damaged or was not written by this program; use another checkpoint.",
        ) from error


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("duplicate key")
    return out


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _int64(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _not_json(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where} holds {what}, which a checkpoint does not store",
        code="ckpt-meta-type",
        fix="Use None, bool, int, float, str, lists and dicts with string keys; pass tensors as shards.",
    )
