"""Classes by name, and their instances by content, without running anything of theirs.

A class is named `module:qualified.name`. It is looked up in `sys.modules` and in the dictionaries of what is there: no import, and
no `__getattr__` of a module or a metaclass. An instance is made by the `__new__` of a builtin, and its attributes are put into its
dictionary or its slots: no constructor, no property, no `__setattr__`. A class with `__del__` is refused, since that runs when the
instance goes; so is one that says itself how it is pickled, because its author knows that its attributes are not enough. A class that
extends nothing but Python classes is stored by its attributes alone, if nothing else can be in its instances (`_is_plain`).
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import struct
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

__all__ = [
    "BASES",
    "ClassLookupError",
    "base_of",
    "class_name",
    "dataclass_fields",
    "enum_members",
    "hashes_plainly",
    "imported_class",
    "instance_state",
    "instance_with",
    "new_instance",
    "objection",
    "plain_flag",
    "set_attribute",
    "slot_contents",
    "tuple_fields",
]

BASES: Mapping[str, type] = {
    base.__name__: base
    for base in (dict, list, tuple, set, frozenset, str, int, float, bytes, argparse.Namespace, SimpleNamespace, object)
}
"""Builtins whose subclasses are stored by content and attributes; those of `object` have attributes only."""

_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_MAKERS = ("dataclasses", "enum", "argparse")
_HEAP_TYPE = 1 << 9  # of `type.__flags__`: made by a class statement, as a rule
_PLAIN_BYTES = type("_Plain", (), {}).__basicsize__  # an instance that has a dictionary and weak references
_POINTER_BYTES = struct.calcsize("P")
_MISSING = object()


class ClassLookupError(Exception):
    """No class of a name is there; the text says why, `module` is what to import, if that would help."""

    def __init__(self, why: str, module: str | None = None) -> None:
        super().__init__(why)
        self.module = module


def class_name(cls: type) -> str:
    """Return the name that `imported_class` finds a class by."""
    return f"{cls.__module__}:{cls.__qualname__}"


def imported_class(name: str) -> type:
    """Return the class of a name, from what is imported.

    Raises:
        ClassLookupError: there is none.
    """
    module_name, colon, qualified = name.partition(":")
    if not colon or not all(part.isidentifier() for part in qualified.split(".")):
        raise ClassLookupError(f"{name[:200]!r} is no name of a class")
    module = sys.modules.get(module_name)
    if module is None or not issubclass(type(module), ModuleType):
        raise ClassLookupError(f"its module {module_name} is not imported", module_name)
    names: Mapping[str, Any] = object.__getattribute__(module, "__dict__")
    value: Any = None
    for part in qualified.split("."):
        value = names.get(part)
        if not issubclass(type(value), type):
            raise ClassLookupError(f"the module {module_name}, which is imported, has no class {qualified}")
        names = _names(value)
    out: type = value
    return out


def _names(cls: type) -> Mapping[str, Any]:
    names: Mapping[str, Any] = type.__dict__["__dict__"].__get__(cls)
    return names


def _lookup(cls: type, name: str) -> Any:
    """Return an attribute of a class as it stands in the first class that has it; `_MISSING` if none has."""
    return next((_names(c)[name] for c in type.__dict__["__mro__"].__get__(cls) if name in _names(c)), _MISSING)


def _is_subclass(cls: type, base: type) -> bool:
    return base in type.__dict__["__mro__"].__get__(cls)


def objection(cls: type) -> str | None:
    """Return why instances of a class cannot be stored by their attributes; None if they can."""
    if _lookup(cls, "__del__") is not _MISSING:
        return "its class has __del__, which would run whatever a file says"
    for name in _PICKLING:
        method = _lookup(cls, name)
        if method is not _MISSING and not _is_standard(method):
            return f"its class has a {name} of its own"
    return None


def _is_standard(method: Any) -> bool:
    """Whether a method is that of a builtin, or of the module that made the class."""
    if not isinstance(method, FunctionType):
        return _is_builtin(method)
    module = method.__globals__.get("__name__")
    return module in _MAKERS or (module == "collections" and method.__name__ == "__getnewargs__")  # of a namedtuple


def _is_builtin(method: Any) -> bool:
    return type(method).__module__ == "builtins" and not isinstance(method, classmethod | staticmethod | property)


def hashes_plainly(cls: type) -> bool:
    """Whether instances are hashed and compared by builtins, or by what dataclasses and enums generate."""
    generated = _lookup(cls, "__dataclass_fields__") is not _MISSING
    for method in (_lookup(cls, "__hash__"), _lookup(cls, "__eq__")):
        if not isinstance(method, FunctionType):
            if not _is_builtin(method):
                return False
        elif method.__globals__.get("__name__") not in _MAKERS and not (
            generated and method.__code__.co_filename == "<string>"
        ):
            return False
    return True


# ---- what a class is


def dataclass_fields(cls: type) -> Mapping[str, dataclasses.Field[Any]] | None:
    """Return the fields of a dataclass by name; None of another class."""
    fields = _lookup(cls, "__dataclass_fields__")
    if type(fields) is not dict or not all(type(field) is dataclasses.Field for field in fields.values()):
        return None
    return {name: field for name, field in fields.items() if field._field_type is dataclasses._FIELD}  # type: ignore[attr-defined]


def enum_members(cls: type) -> Mapping[str, Any] | None:
    """Return the members of an Enum by name, aliases included; None of another class."""
    if not _is_subclass(cls, enum.Enum):
        return None
    members = _lookup(cls, "_member_map_")
    return members if type(members) is dict else None


def plain_flag(cls: type) -> bool:
    """Whether a class is a Flag whose combinations are made by Python's own code."""
    if not _is_subclass(cls, enum.Flag) or type(cls) is not enum.EnumType:
        return False
    functions = [getattr(m, "__func__", m) for m in (_lookup(cls, "_missing_"), _lookup(cls, "__new__"))]
    standard = all(isinstance(f, FunctionType) and f.__globals__.get("__name__") == "enum" for f in functions)
    maker = _lookup(cls, "_new_member_")
    return standard and not isinstance(getattr(maker, "__func__", maker), FunctionType)


def tuple_fields(cls: type) -> tuple[str, ...] | None:
    """Return the field names of a namedtuple; None of another class."""
    names = _lookup(cls, "_fields")
    if not _is_subclass(cls, tuple) or type(names) is not tuple or not all(type(name) is str for name in names):
        return None
    return names


def base_of(cls: type) -> str | None:
    """Return the name of the first builtin in `BASES` that a class extends in Python; None if there is none.

    Between the two there may be no other type that is written in C: it would have contents of its own.
    """
    for ancestor in type.__dict__["__mro__"].__get__(cls):
        if ancestor is object:
            return "object" if _is_plain(cls) else None
        for name, base in BASES.items():
            if ancestor is base:
                return name
        flags = type.__dict__["__flags__"].__get__(ancestor)
        if not flags & _HEAP_TYPE or ancestor is OrderedDict or ancestor is defaultdict:
            return None
    return None


def _is_plain(cls: type) -> bool:
    """Whether attributes are all that is in an instance of a class whose ancestors are Python classes.

    A type that is written in C may look like one: it has more bytes than its slots take, or another `__new__`. A class with a `__new__`, a
    way of pickling or a `state_dict` of its own has said what makes its instances.
    """
    if cls is object or _lookup(cls, "state_dict") is not _MISSING:
        return False
    if any(_lookup(cls, name) is not object.__dict__.get(name, _MISSING) for name in ("__new__", *_PICKLING)):
        return False
    slots = sum(
        type(member) is MemberDescriptorType
        for ancestor in type.__dict__["__mro__"].__get__(cls)
        for member in _names(ancestor).values()
    )
    size = type.__dict__["__basicsize__"].__get__(cls)
    return not type.__dict__["__itemsize__"].__get__(cls) and size <= _PLAIN_BYTES + slots * _POINTER_BYTES


# ---- instances


def new_instance(cls: type, base: type = object) -> Any:
    """Make an instance of `cls` by the `__new__` of a builtin; it is empty, and attributes are not there yet.

    Raises:
        TypeError: a builtin between the two has more to say.
    """
    maker: Any = object if base is argparse.Namespace else base
    return maker.__new__(cls)


def instance_with(cls: type, base: Any, content: Any) -> Any:
    """Make an instance of a subclass of `base` that holds `content`, a value of that builtin."""
    if base in (dict, set):
        value = new_instance(cls, base)
        base.update(value, content)
        return value
    if base is list:
        value = new_instance(cls, base)
        list.extend(value, content)
        return value
    return (
        new_instance(cls, base) if base in (argparse.Namespace, SimpleNamespace, object) else base.__new__(cls, content)
    )


def _dictionary(value: Any) -> dict[str, Any] | None:
    slot = _lookup(type(value), "__dict__")
    if not isinstance(slot, GetSetDescriptorType | MemberDescriptorType):
        return None
    out: dict[str, Any] = slot.__get__(value)
    return out


def instance_state(value: Any) -> dict[str, Any]:
    """Return the attributes in the instance's own dictionary; empty if it has none."""
    return dict(_dictionary(value) or {})


def slot_contents(value: Any) -> dict[str, Any]:
    """Return what lies in the slots that Python classes gave an instance."""
    slots: dict[str, Any] = {}
    for cls in type.__dict__["__mro__"].__get__(type(value)):
        for name, member in _names(cls).items():
            if type(member) is MemberDescriptorType and name != "__dict__" and name not in slots:
                with suppress(AttributeError):  # nothing is in it
                    slots[name] = member.__get__(value)
    return slots


def set_attribute(value: Any, name: str, content: Any) -> bool:
    """Put `content` into a slot or the dictionary of an instance. Returns False where it has neither."""
    member = _lookup(type(value), name)
    if type(member) is MemberDescriptorType and name != "__dict__":
        member.__set__(value, content)
        return True
    names = _dictionary(value)
    if names is None or name == "__dict__":
        return False
    names[name] = content
    return True
