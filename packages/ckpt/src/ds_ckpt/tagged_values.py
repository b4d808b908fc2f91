"""How values with types are walked to JSON and back: places, depth, cycles, and what tags must look like.

Which kinds there are is in `client_values` and `client_classes`; `client_state` explains the whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ds_ckpt.jsontext import Json
from ds_config.errors import CheckpointError

__all__ = ["KIND", "MAX_DEPTH", "Decode", "Encode", "StateDecoder", "StateEncoder", "place_of"]

KIND = "~"
MAX_DEPTH = 80  # of values; each is up to three levels of JSON, of which a meta takes 256
_RESERVED = (KIND, "$float")


def place_of(path: str, key: Any) -> str:
    """Return the place of a dict's entry in an error: `client_state["a"]`."""
    return f"{path}[{json.dumps(key, ensure_ascii=False) if type(key) is str else repr(key)[:80]}]"


class StateEncoder:
    """One walk over a state.

    Attributes:
        problems: Place and reason of what cannot be stored.
        hashed: How many keys or elements of sets the walk is inside of.
    """

    def __init__(self, encoders: Mapping[type, Encode], other: Encode) -> None:
        self._encoders, self._other = encoders, other
        self._open: dict[int, str] = {}
        self.problems: list[tuple[str, str]] = []
        self.hashed = 0

    def refuse(self, path: str, why: str) -> None:
        """Note that a value cannot be stored."""
        self.problems.append((path, why))

    def encode(self, value: Any, path: str) -> Json:
        """Encode a value of any type; what cannot be is noted, and None stands for it."""
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if id(value) in self._open:
            return self.refuse(path, f"is the object that it lies in, {self._open[id(value)]}: break the circle")
        if len(self._open) > MAX_DEPTH:
            return self.refuse(path, f"lies deeper than {MAX_DEPTH} levels")
        self._open[id(value)] = path
        try:
            if kind is dict:
                return self._dict(value, path)
            if kind is list:
                return self.items(value, path)
            return self._encoders.get(kind, self._other)(self, value, path)
        finally:
            del self._open[id(value)]

    def _dict(self, value: dict[Any, Any], path: str) -> Json:
        if all(type(key) is str and key not in _RESERVED for key in value):
            return {
                key: inner if _is_plain(inner) else self.encode(inner, place_of(path, key))
                for key, inner in value.items()
            }
        return {KIND: "dict", "value": self.pairs(value, path)}

    def pairs(self, value: dict[Any, Any], path: str) -> Json:
        """Encode the entries of a dict whose keys may be anything."""
        return [
            [self.key(key, f"the key {repr(key)[:80]} of {path}"), self.encode(inner, place_of(path, key))]
            for key, inner in dict.items(value)
        ]

    def items(self, value: Any, path: str) -> Json:
        """Encode the elements of a sequence."""
        return [item if _is_plain(item) else self.encode(item, f"{path}[{i}]") for i, item in enumerate(value)]

    def key(self, value: Any, path: str) -> Json:
        """Encode a value that is hashed when it comes back."""
        self.hashed += 1
        try:
            return self.encode(value, path)
        finally:
            self.hashed -= 1


class StateDecoder:
    """One walk over what `StateEncoder` returned.

    Attributes:
        hashed: How many keys or elements of sets the walk is inside of.
    """

    def __init__(self, decoders: Mapping[str, Decode]) -> None:
        self._decoders = decoders
        self.hashed = 0

    def decode(self, value: Json, path: str) -> Any:
        """Decode a value. Raises CheckpointError where it is not what an encoder writes."""
        try:
            if isinstance(value, list):
                return self.items(value, path)
            if not isinstance(value, dict):
                return value
            if KIND not in value:
                return {
                    key: self.decode(inner, place_of(path, key)) if type(inner) in (list, dict) else inner
                    for key, inner in value.items()
                }
            kind = value[KIND]
            if type(kind) is str and kind not in self._decoders:
                raise CheckpointError(
                    f"{path} is stored as {kind[:80]!r}, a kind of value that this version does not know",
                    code="ckpt-version",
                    fix="Update ds-ckpt: a newer version wrote it. If none did, the checkpoint was changed by hand or damaged.",
                )
            return self._decoders[kind](self, value, path)
        except CheckpointError:
            raise
        except Exception as error:  # whatever a decoder says of what no encoder wrote
            raise CheckpointError(
                f"{path} is {str(value)[:200]}, which nothing wrote: {type(error).__name__}: {str(error)[:200]}",
                code="ckpt-client-state",
                fix="Use another checkpoint; this one was changed by hand or damaged.",
            ) from error

    def pairs(self, value: Json, path: str) -> list[tuple[Any, Any]]:
        """Decode the entries of a dict."""
        return [
            (self.key(key, f"a key of {path}"), self.decode(inner, place_of(path, key))) for key, inner in _list(value)
        ]

    def items(self, value: Json, path: str) -> list[Any]:
        """Decode the elements of a sequence."""
        return [
            self.decode(item, f"{path}[{i}]") if type(item) in (list, dict) else item
            for i, item in enumerate(_list(value))
        ]

    def key(self, value: Json, path: str) -> Any:
        """Decode a value that is hashed next."""
        self.hashed += 1
        try:
            return self.decode(value, path)
        finally:
            self.hashed -= 1


def _is_plain(value: Any) -> bool:
    """Whether a value stands for itself in JSON; most do, and need no place."""
    kind = type(value)
    if kind is int:
        return -(2**63) <= value < 2**64
    return kind is str or kind is bool or value is None or (kind is float and math.isfinite(value))


def _list(value: Json) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{str(value)[:80]} is no list")
    return value


Encode: TypeAlias = Callable[[StateEncoder, Any, str], Json]
Decode: TypeAlias = Callable[[StateDecoder, Any, str], Any]
