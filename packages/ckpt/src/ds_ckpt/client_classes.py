"""Instances of a program's classes in a client state: members of enums, dataclasses, namedtuples, subclasses of builtins, plain objects."""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Iterable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from ds_ckpt.client_values import encode_numpy, fields_of
from ds_ckpt.imported_classes import (
    BASES,
    ClassLookupError,
    base_of,
    class_name,
    dataclass_fields,
    enum_members,
    hashes_plainly,
    imported_class,
    instance_state,
    instance_with,
    new_instance,
    objection,
    plain_flag,
    set_attribute,
    slot_contents,
    tuple_fields,
)
from ds_ckpt.jsontext import Json
from ds_ckpt.tagged_values import KIND, StateDecoder, StateEncoder
from ds_config.errors import CheckpointError

__all__ = ["decode_instance", "encode_instance"]

_FACTORIES = (dict, list, set, tuple, frozenset, str, int, float, bool, bytes)
_CODE = (type, FunctionType, MethodType, BuiltinFunctionType, partial)
_CONTENT = {argparse.Namespace: None, SimpleNamespace: None, object: None}


def _shown(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# ---- to JSON


def encode_instance(e: StateEncoder, value: Any, path: str) -> Json:
    """Encode an instance of a class that no encoder stands for."""
    cls = type(value)
    if isinstance(value, np.generic) and cls.__module__.partition(".")[0] == "numpy":
        return encode_numpy(e, value, path)
    if isinstance(value, _CODE):
        return e.refuse(path, f"is code ({getattr(value, '__qualname__', _shown(cls))}); store its name")
    if not _has_form(cls):
        return e.refuse(path, f"is a {_shown(cls)}{_advice(value)}")
    try:
        reason = None if imported_class(class_name(cls)) is cls else "another class has that name"
    except ClassLookupError as error:
        reason = str(error)
    if reason:
        return e.refuse(
            path, f"is a {_shown(cls)}, which nobody could find again: {reason}; define it at the top of a module"
        )
    if e.hashed and not hashes_plainly(cls):
        return e.refuse(path, f"is a {_shown(cls)}, whose own __hash__ or __eq__ a load would run; use another key")
    if enum_members(cls) is not None:
        return _encode_member(e, value, path)
    reason = objection(cls)
    if reason:
        return e.refuse(path, f"is a {_shown(cls)}: {reason}")
    head = {"class": class_name(cls)}
    if dataclass_fields(cls) is not None:
        return _encode_dataclass(e, value, path, head)
    names = tuple_fields(cls)
    if names is not None:
        items = {n: e.encode(item, f"{path}.{n}") for n, item in zip(names, tuple.__iter__(value), strict=True)}
        return {KIND: "namedtuple", **head, "value": items, **_state(e, value, path)}
    return _encode_derived(e, value, path, head)


def _has_form(cls: type) -> bool:
    return enum_members(cls) is not None or dataclass_fields(cls) is not None or base_of(cls) is not None


def _advice(value: Any) -> str:
    if isinstance(value, Tensor):
        return "; store .detach() of it as a plain tensor (full_tensor() of a DTensor)"
    if isinstance(value, np.ndarray) or hasattr(value, "__array__"):
        return "; store numpy.asarray() of it"
    for name in ("state_dict", "to_dict", "_asdict"):
        if hasattr(value, name):
            return f"; store its {name}()"
    if isinstance(value, Mapping):
        return "; store dict() of it"
    reason = objection(type(value))
    return f", which has no form here: {reason}" if reason else ", which has no form here"


def _state(e: StateEncoder, value: Any, path: str) -> dict[str, Json]:
    state = instance_state(value) | slot_contents(value)
    return {"state": _attributes(e, state, path)} if state else {}


def _attributes(e: StateEncoder, state: Mapping[str, Any], path: str) -> Json:
    return [[name, e.encode(inner, f"{path}.{name}")] for name, inner in state.items()]


def _encode_member(e: StateEncoder, value: Any, path: str) -> Json:
    cls, state = type(value), instance_state(value)
    name, members = state.get("_name_"), enum_members(cls) or {}
    if name is not None and members.get(name) is value:
        return {KIND: "enum", "class": class_name(cls), "value": name}
    if not plain_flag(cls):
        return e.refuse(path, f"is a {_shown(cls)} that is none of its members")
    return {KIND: "flag", "class": class_name(cls), "value": e.encode(state["_value_"], path)}


def _encode_dataclass(e: StateEncoder, value: Any, path: str, head: dict[str, str]) -> Json:
    try:
        new_instance(type(value))
    except TypeError:
        return e.refuse(
            path, f"is a {_shown(type(value))}, a dataclass that is a builtin, too; store a dict of its fields"
        )
    fields = dataclass_fields(type(value)) or {}
    contents = instance_state(value) | slot_contents(value)
    stored = {name: contents.pop(name) for name in fields if name in contents}
    return {
        KIND: "dataclass",
        **head,
        "value": _attributes(e, stored, path),
        "unset": [name for name in fields if name not in stored],
        "state": _attributes(e, contents, path),
    }


def _encode_derived(e: StateEncoder, value: Any, path: str, head: dict[str, str]) -> Json:
    name = base_of(type(value)) or ""
    base = BASES[name]
    try:
        new_instance(type(value), base)
    except TypeError:
        return e.refuse(path, f"is a {_shown(type(value))}, of which {name} is only a part; store {name}() of it")
    return {KIND: "derived", **head, "base": name, "value": _content(e, value, base, path), **_state(e, value, path)}


def _content(e: StateEncoder, value: Any, base: type, path: str) -> Json:
    if base in _CONTENT:
        return None
    if base is dict:
        return e.encode(dict(dict.items(value)), path)
    if base in (list, tuple, set, frozenset):
        return e.encode(base(base.__iter__(value)), path)
    if base is bytes:
        return e.encode(bytes.__getitem__(value, slice(None)), path)
    plain = {str: str.__str__, int: int.__int__, float: float.__float__}[base]
    return e.encode(plain(value), path)


# ---- and back


def decode_instance(d: StateDecoder, tag: Json, path: str) -> Any:
    """Decode an instance of a class that is imported.

    Raises:
        CheckpointError: the class is not imported, or is another one ("ckpt-client-class").
    """
    name, kind = tag["class"], tag[KIND]
    if type(name) is not str:
        raise TypeError("its class has no name")
    try:
        cls = imported_class(name)
    except ClassLookupError as error:
        fix = (
            f"Put `import {error.module}` before the load."
            if error.module
            else "Define the class as it was when this was saved."
        )
        raise _class_error(path, kind, name, str(error), fix) from error
    if d.hashed and not hashes_plainly(cls):
        raise _class_error(
            path, kind, name, "it is a key or an element of a set, and its own __hash__ or __eq__ would run"
        )
    if kind in ("enum", "flag"):
        return _decode_member(cls, tag, path)
    reason = objection(cls)
    if reason:
        raise _class_error(path, kind, name, reason)
    return {"dataclass": _decode_dataclass, "namedtuple": _decode_namedtuple, "derived": _decode_derived}[kind](
        d, cls, tag, path
    )


def _class_error(
    path: str, kind: str, name: str, why: str, fix: str = "Define the class as it was when this was saved."
) -> CheckpointError:
    shown = name[:200].replace(":", ".", 1)
    what = {"enum": "a member of", "flag": "a member of", "derived": "an instance of"}.get(kind, f"a {kind},")
    return CheckpointError(f"{path} is {what} {shown}: {why}", code="ckpt-client-class", fix=fix)


def _decode_member(cls: type, tag: Json, path: str) -> Any:
    name, value = fields_of(tag, "class", "value")
    members = enum_members(cls)
    if members is None:
        raise _class_error(path, tag[KIND], name, "that is no enum")
    if tag[KIND] == "enum":
        if type(value) is not str:
            raise TypeError("a member has a name")
        if value not in members:
            raise _class_error(path, "enum", name, f"it has no member {value[:80]!r}, but {', '.join(members)[:200]}")
        return members[value]
    if not plain_flag(cls):
        raise _class_error(path, "flag", name, "that is no Flag, or one that makes its members itself")
    if type(value) is not int:
        raise TypeError("the value of a flag is a number")
    try:
        return enum.EnumType.__call__(cls, value)
    except ValueError as error:
        raise _class_error(path, "flag", name, str(error)) from error


def _set_all(d: StateDecoder, value: Any, attributes: Iterable[Any], path: str) -> None:
    for name, inner in attributes:
        if type(name) is not str or not set_attribute(value, name, d.decode(inner, f"{path}.{name}")):
            raise TypeError(f"{str(name)[:80]!r} is no attribute that it can have")


def _decode_dataclass(d: StateDecoder, cls: type, tag: Json, path: str) -> Any:
    name, stored, unset, state = fields_of(tag, "class", "value", "unset", "state")
    fields = dataclass_fields(cls)
    if fields is None:
        raise _class_error(path, "dataclass", name, "that is no dataclass")
    saved = {key for key, _ in stored} | set(unset)
    fresh = [field for key, field in fields.items() if key not in saved]
    gone = sorted(str(key) for key, _ in stored if key not in fields)
    lacking = sorted(field.name for field in fresh if not _has_default(field))
    clash = sorted(str(key) for key, _ in state if key in fields)
    if gone or lacking or clash:
        changes = [
            f"stored fields that it has no more: {', '.join(gone)}" if gone else "",
            f"new fields without a default: {', '.join(lacking)}" if lacking else "",
            f"fields that were plain attributes: {', '.join(clash)}" if clash else "",
        ]
        raise _class_error(
            path,
            "dataclass",
            name,
            "its fields have changed since the save; " + "; ".join(filter(None, changes)),
            "Give new fields defaults and keep the old ones, or load with the class as it was.",
        )
    out = new_instance(cls)
    for field in fresh:
        set_attribute(out, field.name, _default(field))
    _set_all(d, out, stored, path)
    _set_all(d, out, state, path)
    return out


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or any(field.default_factory is factory for factory in _FACTORIES)


def _default(field: dataclasses.Field[Any]) -> Any:
    factory: Any = field.default_factory  # one of a few builtins
    return factory() if field.default is dataclasses.MISSING else field.default


def _decode_namedtuple(d: StateDecoder, cls: type, tag: Json, path: str) -> Any:
    name, items, state = fields_of(tag, "class", "value", optional="state")
    names = tuple_fields(cls)
    if names is None:
        raise _class_error(path, "namedtuple", name, "that is no namedtuple")
    if set(items) != set(names):
        before, now = ", ".join(sorted(map(str, items)))[:200], ", ".join(names)[:200]
        raise _class_error(path, "namedtuple", name, f"its fields were {before} at the save, and are {now}")
    out = instance_with(cls, tuple, [d.decode(items[n], f"{path}.{n}") for n in names])
    _set_all(d, out, state or (), path)
    return out


def _decode_derived(d: StateDecoder, cls: type, tag: Json, path: str) -> Any:
    name, base_name, value, state = fields_of(tag, "class", "base", "value", optional="state")
    base = BASES[base_name]
    if base_of(cls) != base_name or dataclass_fields(cls) is not None or tuple_fields(cls) is not None:
        why = "attributes are not all of it any more" if base is object else f"it extends {base_name} no more"
        raise _class_error(path, "derived", name, why)
    content = d.decode(value, path)
    if type(content) is not (type(None) if base in _CONTENT else base):
        raise TypeError(f"the content is no {base_name}")
    out = instance_with(cls, base, content)
    _set_all(d, out, state or (), path)
    return out
