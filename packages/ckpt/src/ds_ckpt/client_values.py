"""The kinds of values in a client state that are no instances of the program's classes: one encoder and one decoder each.

Encoders go by the exact type. Decoders take exactly the fields that the encoder writes, and call nothing but the types named here.
"""

from __future__ import annotations

import argparse
import base64
import io
import math
import pathlib
import re
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor, nn

from ds_ckpt.imported_classes import instance_state, set_attribute
from ds_ckpt.jsontext import Json
from ds_ckpt.tagged_values import KIND, Decode, Encode, StateDecoder, StateEncoder

__all__ = ["DECODERS", "ENCODERS", "fields_of"]

_ZONE = re.compile(r"[A-Za-z0-9_+-]{1,64}(/[A-Za-z0-9_+-]{1,64}){0,4}")
_FACTORIES: Mapping[str, type] = {
    t.__name__: t for t in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}
_CONSTANTS: Mapping[str, Any] = {"Ellipsis": ..., "NotImplemented": NotImplemented}
_NUMPY_KINDS = "biufcSUmMV?"


def fields_of(tag: Json, *names: str, optional: str | None = None) -> list[Any]:
    """Return the fields of a tag by name, the optional one last (None if it is not there).

    Raises:
        TypeError: it has others.
    """
    if set(tag) - {optional} != {KIND, *names}:
        raise TypeError(f"the fields of {tag[KIND]} are {', '.join(names)}")
    out = [tag[name] for name in names]
    return out if optional is None else [*out, tag.get(optional)]


def _value(tag: Json, kind: type = object) -> Any:
    (value,) = fields_of(tag, "value")
    if kind is not object and type(value) is not kind:
        raise TypeError(f"the value of {tag[KIND]} is no {kind.__name__}")
    return value


def _bytes(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


# ---- numbers


def _encode_int(_: StateEncoder, value: int, path: str) -> Json:
    return value if -(2**63) <= value < 2**64 else {KIND: "int", "value": hex(value)}


def _encode_float(_: StateEncoder, value: float, path: str) -> Json:
    return value if math.isfinite(value) else {KIND: "float", "value": str(value)}


def _decode_float(_: StateDecoder, tag: Json, path: str) -> float:
    text = _value(tag, str)
    if text not in ("inf", "-inf", "nan"):
        raise ValueError(f"{text!r} is a number, or none")
    return float(text)


def _encode_parts(kind: str, parts: Callable[[Any], list[Any]]) -> Encode:
    """Encode a value by parts that are values themselves."""
    return lambda e, value, path: {KIND: kind, "value": e.items(parts(value), path)}


def _decode_parts(make: Callable[..., Any], *kinds: tuple[type, ...]) -> Decode:
    """Decode a value from parts of exactly these types, one of each tuple; an empty tuple is any type.

    A subclass of an int may have an `__index__` that a constructor would call.
    """

    def decode(d: StateDecoder, tag: Json, path: str) -> Any:
        parts = d.items(_value(tag), path)
        if len(parts) != len(kinds) or any(
            kind and type(part) not in kind for part, kind in zip(parts, kinds, strict=True)
        ):
            raise TypeError(f"these are no parts of {tag[KIND]}")
        return make(*parts)

    return decode


# ---- containers


def _with_state(e: StateEncoder, tag: dict[str, Json], value: Any, path: str) -> Json:
    state = instance_state(value)
    return tag | ({"state": e.encode(state, path)} if state else {})


def _set(value: Any, name: Any, inner: Any) -> None:
    if type(name) is not str or not set_attribute(value, name, inner):
        raise TypeError(f"{str(name)[:80]!r} is no attribute")


def _encode_dict_type(kind: str) -> Encode:
    return lambda e, value, path: _with_state(e, {KIND: kind, "value": e.pairs(value, path)}, value, path)


def _decode_dict_type(make: Callable[[], Any]) -> Decode:
    def decode(d: StateDecoder, tag: Json, path: str) -> Any:
        value, state = fields_of(tag, "value", optional="state")
        out = make()
        for key, inner in d.pairs(value, path):
            dict.__setitem__(out, key, inner) if make is not OrderedDict else OrderedDict.__setitem__(out, key, inner)
        for name, inner in dict.items({} if state is None else d.decode(state, path)):
            _set(out, name, inner)
        return out

    return decode


def _encode_defaultdict(e: StateEncoder, value: Any, path: str) -> Json:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        e.refuse(path, f"is a defaultdict of {factory!r}, which is code; use a builtin such as list, or a dict")
    return {KIND: "defaultdict", "factory": name, "value": e.pairs(value, path)}


def _decode_defaultdict(d: StateDecoder, tag: Json, path: str) -> Any:
    name, value = fields_of(tag, "factory", "value")
    return defaultdict(None if name is None else _FACTORIES[name], d.pairs(value, path))


def _encode_tuple(kind: str) -> Encode:
    return lambda e, value, path: {KIND: kind, "value": e.items(value, path)}


def _encode_set(kind: str) -> Encode:
    def encode(e: StateEncoder, value: Any, path: str) -> Json:
        return {KIND: kind, "value": [e.key(item, f"the element {repr(item)[:80]} of {path}") for item in value]}

    return encode


def _decode_set(make: Callable[[Any], Any]) -> Decode:
    def decode(d: StateDecoder, tag: Json, path: str) -> Any:
        return make([d.key(item, f"an element of {path}") for item in _value(tag, list)])

    return decode


def _encode_deque(e: StateEncoder, value: deque[Any], path: str) -> Json:
    return {KIND: "deque", "maxlen": value.maxlen, "value": e.items(value, path)}


def _decode_deque(d: StateDecoder, tag: Json, path: str) -> Any:
    maxlen, value = fields_of(tag, "maxlen", "value")
    return deque(d.items(value, path), maxlen)


def _encode_namespace(
    e: StateEncoder, value: Any, path: str
) -> Json:  # the options of a program, as Megatron stores them
    return {KIND: type(value).__name__, "value": e.encode(vars(value), path)}


def _decode_namespace(make: Callable[[], Any]) -> Decode:
    def decode(d: StateDecoder, tag: Json, path: str) -> Any:
        out = make()
        for name, inner in dict.items(d.decode(_value(tag), path)):
            _set(out, name, inner)
        return out

    return decode


# ---- texts


def _encode_text(kind: str, text: Callable[[Any], str]) -> Encode:
    return lambda e, value, path: {KIND: kind, "value": text(value)}


def _decode_text(make: Callable[[str], Any]) -> Decode:
    return lambda d, tag, path: make(_value(tag, str))


def _encode_zone(e: StateEncoder, value: ZoneInfo, path: str) -> Json:
    if value.key is None or not _ZONE.fullmatch(value.key):
        e.refuse(path, "is a time zone without a name; use datetime.timezone, or ZoneInfo(name)")
    return {KIND: "zoneinfo", "value": value.key}


def _decode_zone(name: str) -> ZoneInfo:
    if not _ZONE.fullmatch(name):  # a name is looked for in folders
        raise ValueError(f"{name[:80]!r} is no name of a time zone")
    return ZoneInfo(name)


def _torch_constant(kind: type) -> Decode:
    def make(name: str) -> Any:
        value = vars(torch).get(name)
        if type(value) is not kind:
            raise TypeError(f"{name[:80]!r} is no {kind.__name__}")
        return value

    return _decode_text(make)


def _moment(kind: type) -> Callable[[Any], list[Any]]:
    day = ("year", "month", "day") if kind is not time else ()
    names = (*day, "hour", "minute", "second", "microsecond", "fold", "tzinfo")
    return lambda value: [getattr(value, name) for name in names]


def _from_moment(kind: Any) -> Callable[..., Any]:
    return lambda *parts: kind(*parts[:-2], parts[-1], fold=parts[-2])


# ---- arrays


def _encode_tensor(e: StateEncoder, value: Tensor, path: str) -> Json:
    if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_nested:
        return e.refuse(
            path, f"is a tensor of layout {value.layout} on {value.device}; store a dense one, or its parts"
        )
    data = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    double = data.dtype == torch.complex128  # which safetensors has not
    data = torch.view_as_real(data).contiguous() if double else data
    tag = {KIND: "tensor", "value": _text(save_bytes({"t": data}))}
    parameter = type(value) is nn.Parameter
    if not (parameter or double or value.requires_grad):
        return tag
    return {
        KIND: "tensor_with",
        "value": tag,
        "parameter": parameter,
        "requires_grad": value.requires_grad,
        "complex128": double,
    }


def _decode_tensor(_: StateDecoder, tag: Json, path: str) -> Tensor:
    (tensor,) = load_bytes(_bytes(_value(tag, str))).values()
    return tensor


def _decode_array(d: StateDecoder, tag: Json, path: str) -> Any:
    tensor = d.decode(_value(tag), path)
    if type(tensor) is not Tensor:
        raise TypeError("it holds no tensor")
    return tensor.numpy()


def _decode_size(_: StateDecoder, tag: Json, path: str) -> torch.Size:
    sizes = _value(tag, list)
    if any(type(size) is not int for size in sizes):
        raise TypeError("a size is a number")
    return torch.Size(sizes)


def _decode_tensor_with(d: StateDecoder, tag: Json, path: str) -> Tensor:
    value, parameter, requires_grad, double = fields_of(tag, "value", "parameter", "requires_grad", "complex128")
    if {type(flag) for flag in (parameter, requires_grad, double)} != {bool}:
        raise TypeError("flags of a tensor are true or false")
    data = d.decode(value, path)
    if type(data) is not Tensor:
        raise TypeError("it holds no tensor")
    data = torch.view_as_complex(data) if double else data
    return nn.Parameter(data, requires_grad) if parameter else data.requires_grad_(requires_grad)


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def _npy_loses(dtype: Any) -> bool:
    """Whether .npy has no word for a dtype: objects, those of other libraries, names beyond Latin-1."""
    try:
        descr = np.lib.format.dtype_to_descr(dtype)
        repr(descr).encode("latin1")
        return dtype.hasobject or dtype.kind not in _NUMPY_KINDS or np.lib.format.descr_to_dtype(descr) != dtype
    except (TypeError, ValueError):
        return True


def encode_numpy(e: StateEncoder, value: Any, path: str) -> Json:
    """Encode an array, or a scalar of NumPy."""
    scalar = isinstance(value, np.generic)
    if _npy_loses(value.dtype):
        return e.refuse(path, f"is an array of {value.dtype}, which is no plain number, text or date; store a list")
    # An array without dimensions; NumPy would take a record for a sequence.
    array = np.array(value, dtype=value.dtype) if scalar else value
    return {KIND: "scalar" if scalar else "ndarray", "value": _text(_npy(array))}


def _decode_numpy(tag: Json) -> Any:
    data = _bytes(_value(tag, str))
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, _, dtype = header(file)
    # Before memory is taken for what is not there.
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data) - file.tell() or min(shape, default=0) < 0:
        raise ValueError(f"{len(data)} bytes are no array {shape} of {dtype}")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def _decode_scalar(_: StateDecoder, tag: Json, path: str) -> Any:
    array = _decode_numpy(tag)
    if array.shape != ():
        raise ValueError(f"an array {array.shape} is no scalar")
    return array[()]


_INT, _ANY, _MAYBE_ZONE = (int,), (), (timezone, ZoneInfo, type(None))

ENCODERS: Mapping[type, Encode] = {
    int: _encode_int,
    float: _encode_float,
    complex: _encode_parts("complex", lambda v: [v.real, v.imag]),
    OrderedDict: _encode_dict_type("OrderedDict"),
    Counter: _encode_dict_type("Counter"),
    defaultdict: _encode_defaultdict,
    tuple: _encode_tuple("tuple"),
    torch.Size: _encode_tuple("Size"),
    set: _encode_set("set"),
    frozenset: _encode_set("frozenset"),
    deque: _encode_deque,
    range: _encode_parts("range", lambda v: [v.start, v.stop, v.step]),
    slice: _encode_parts("slice", lambda v: [v.start, v.stop, v.step]),
    argparse.Namespace: _encode_namespace,
    SimpleNamespace: _encode_namespace,
    bytes: _encode_text("bytes", _text),
    bytearray: _encode_text("bytearray", _text),
    type(...): _encode_text("constant", repr),
    type(NotImplemented): _encode_text("constant", repr),
    date: _encode_parts("date", lambda v: [v.year, v.month, v.day]),
    time: _encode_parts("time", _moment(time)),
    datetime: _encode_parts("datetime", _moment(datetime)),
    timedelta: _encode_parts("timedelta", lambda v: [v.days, v.seconds, v.microseconds]),
    timezone: _encode_parts("timezone", lambda v: [*v.__getinitargs__(), None][:2]),
    ZoneInfo: _encode_zone,
    Decimal: _encode_text("Decimal", str),
    Fraction: _encode_parts("Fraction", lambda v: [v.numerator, v.denominator]),
    uuid.UUID: _encode_parts("UUID", lambda v: [v.hex, v.is_safe.value]),
    type(pathlib.Path()): _encode_text("path", str),
    pathlib.PurePosixPath: _encode_text("PurePosixPath", str),
    pathlib.PureWindowsPath: _encode_text("PureWindowsPath", str),
    Tensor: _encode_tensor,
    nn.Parameter: _encode_tensor,
    torch.dtype: _encode_text("dtype", lambda v: str(v).removeprefix("torch.")),
    torch.device: _encode_text("device", str),
    torch.layout: _encode_text("layout", lambda v: str(v).removeprefix("torch.")),
    torch.memory_format: _encode_text("memory_format", lambda v: str(v).removeprefix("torch.")),
    np.ndarray: encode_numpy,
}

DECODERS: Mapping[str, Decode] = {
    "int": _decode_text(partial(int, base=16)),
    "float": _decode_float,
    "complex": _decode_parts(complex, (float,), (float,)),
    "dict": _decode_dict_type(dict),
    "OrderedDict": _decode_dict_type(OrderedDict),
    "Counter": _decode_dict_type(Counter),
    "defaultdict": _decode_defaultdict,
    "tuple": lambda d, tag, path: tuple(d.items(_value(tag), path)),
    "Size": _decode_size,
    "set": _decode_set(set),
    "frozenset": _decode_set(frozenset),
    "deque": _decode_deque,
    "range": _decode_parts(range, _INT, _INT, _INT),
    "slice": _decode_parts(slice, _ANY, _ANY, _ANY),
    "Namespace": _decode_namespace(argparse.Namespace),
    "SimpleNamespace": _decode_namespace(SimpleNamespace),
    "bytes": _decode_text(_bytes),
    "bytearray": _decode_text(lambda text: bytearray(_bytes(text))),
    "constant": _decode_text(_CONSTANTS.__getitem__),
    "date": _decode_parts(date, _INT, _INT, _INT),
    "time": _decode_parts(_from_moment(time), *[_INT] * 5, _MAYBE_ZONE),
    "datetime": _decode_parts(_from_moment(datetime), *[_INT] * 8, _MAYBE_ZONE),
    "timedelta": _decode_parts(timedelta, _INT, _INT, _INT),
    "timezone": _decode_parts(
        lambda offset, name: timezone(*((offset,) if name is None else (offset, name))), (timedelta,), (str, type(None))
    ),
    "zoneinfo": _decode_text(_decode_zone),
    "Decimal": _decode_text(Decimal),
    "Fraction": _decode_parts(Fraction, _INT, _INT),
    "UUID": _decode_parts(
        lambda digits, safe: uuid.UUID(digits, is_safe=uuid.SafeUUID(safe)), (str,), (int, type(None))
    ),
    "path": _decode_text(pathlib.Path),
    "PurePosixPath": _decode_text(pathlib.PurePosixPath),
    "PureWindowsPath": _decode_text(pathlib.PureWindowsPath),
    "tensor": _decode_tensor,
    "tensor_with": _decode_tensor_with,
    "array": _decode_array,
    "dtype": _torch_constant(torch.dtype),
    "device": _decode_text(torch.device),
    "layout": _torch_constant(torch.layout),
    "memory_format": _torch_constant(torch.memory_format),
    "ndarray": lambda d, tag, path: _decode_numpy(tag),
    "scalar": _decode_scalar,
}
