"""Objects of other programs in a pickle, without their code: each is a record of how it was to be made, which nothing follows.

What is plain data after all comes back as that: a Namespace, NumPy's arrays and numbers, members of an enum whose class is imported.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np

from ds_ckpt.imported_classes import ClassLookupError, enum_members, imported_class

__all__ = ["PickledObject", "restored", "stand_in", "without_objects"]

_NUMPY = ("numpy._core.multiarray.", "numpy.core.multiarray.")


class PickledObject:
    """A stand-in for an instance of a class of another program: its fields, without its code.

    Attributes:
        stands_for: The full name of the class.
        made_of: Arguments of the call that was to make it.
        content: What was to be given to its `__setstate__`, where that is no dict of fields.
    """

    __slots__ = ("__dict__", "content", "made_of")
    made_of: tuple[Any, ...]
    content: Any
    stands_for = ""

    def __new__(cls, *args: object) -> PickledObject:
        new = object.__new__(cls)
        new.made_of, new.content = args, None
        return new

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        fields = state[0] if isinstance(state, tuple) and len(state) == 2 else state  # the other are slots
        if isinstance(fields, dict):
            self.__dict__.update(fields)
        else:
            self.content = state


def stand_in(name: str) -> type[PickledObject]:
    """Make the class of stand-ins for instances of the class, or for results of the function, of this full name."""
    return type("PickledObject", (PickledObject,), {"__slots__": (), "stands_for": name})


def restored(value: Any) -> Any:
    """Return `value` with plain data in the place of the stand-ins for it."""
    if isinstance(value, PickledObject):
        return _plain(value)
    if type(value) in (list, tuple):
        return type(value)(map(restored, value))
    if isinstance(value, dict):
        for key, item in value.items():  # not `update`, which adds to a Counter
            value[key] = restored(item)
    return value


def without_objects(value: Any, path: str, left_out: list[str]) -> Any:
    """Return `value` without the entries and attributes that are, or have, stand-ins still, and add these to `left_out`."""
    if isinstance(value, Namespace):
        return Namespace(**without_objects(vars(value), path, left_out))
    if not isinstance(value, dict):
        return value
    kept = copy.copy(value)
    for key, item in value.items():
        stranger = _stranger(item)
        if stranger is None:
            kept[key] = without_objects(item, f"{path}.{key}", left_out)
        else:
            del kept[key]
            left_out.append(f"{path}.{key}: an object of {stranger.stands_for}, which is not imported")
    return kept


def _stranger(value: Any) -> PickledObject | None:
    if isinstance(value, list | tuple):
        return next((found for found in map(_stranger, value) if found is not None), None)
    return value if isinstance(value, PickledObject) else None


def _plain(value: PickledObject) -> Any:
    name, made_of = value.stands_for, value.made_of
    if name == "argparse.Namespace":
        return Namespace(**restored(vars(value)))
    if name.startswith(_NUMPY):
        try:
            return _array(value) if name.endswith("._reconstruct") else _dtype(made_of[0]).type(_buffer(*made_of)[0])
        except (IndexError, TypeError, ValueError, AttributeError):
            return value
    module, _, leaf = name.rpartition(".")
    try:
        members: Mapping[str, Any] = enum_members(imported_class(f"{module}:{leaf}")) or {}
    except ClassLookupError:
        return value
    same = (
        m
        for m in members.values()
        if len(made_of) == 1 and (type(m._value_), m._value_) == (type(made_of[0]), made_of[0])
    )
    return next(same, value)


def _array(value: PickledObject) -> Any:
    _, shape, dtype, fortran, data = value.content
    return _buffer(dtype, data).reshape(shape, order="F" if fortran else "C")


def _buffer(dtype: PickledObject, data: bytes) -> Any:
    return np.frombuffer(bytearray(data), _dtype(dtype))


def _dtype(value: PickledObject) -> Any:
    if value.stands_for != "numpy.dtype":
        raise TypeError(value.stands_for)
    kind = str(value.made_of[0])
    return np.dtype(kind if value.content is None else f"{value.content[1]}{kind}".replace("|", ""))
