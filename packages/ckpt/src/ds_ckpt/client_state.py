"""A client state as JSON and back: values that a program stores beside its run, with their types, and without pickle.

`encode` turns a value into JSON, `decode` turns that back. JSON's own values stand for themselves. Any other value is a *tag*, an
object `{"~": kind, ...}` with exactly the fields of its kind:

    float int complex                    `nan` and infinities; integers beyond 64 bits; pairs
    dict OrderedDict Counter defaultdict pairs of key and value; a default factory is one of a few builtins, or None
    tuple set frozenset deque range slice bytes bytearray constant (`...`, NotImplemented)
    date time datetime timedelta timezone zoneinfo Decimal Fraction UUID path PurePosixPath PureWindowsPath
    Namespace SimpleNamespace            of argparse and types
    tensor tensor_with dtype device Size layout memory_format        of torch, tensors as safetensors on the host
    ndarray scalar                       of NumPy, as .npy without pickle; `array` is how arrays were stored before
    enum flag namedtuple dataclass derived                           a class of the program's, by name, and content

**Classes.** An instance is stored as `module:qualified.name` of its class and its fields. It comes back only where the class is
imported already and still is what it was: see `imported_classes`, which says how neither an import nor a method of it runs. A class of
`__main__` is found by each run of the same script. A `derived` value is one of a subclass of a builtin (an `EasyDict`): content, and
attributes; of `object` (an `AverageMeter`) there are attributes only. Fields of a dataclass may have come or gone since the save: a new
one takes its default (a value, or a builtin container that is its factory); a new one without, and a stored one that the class has no
more, is an error that names it. Attributes beside the fields come back, too. Members of an enum go by name. As a key or an element of a set, an instance is hashed, so its class
must not have its own `__hash__` or `__eq__`.

**Refusals.** Encoding lists all values that cannot be stored, with their places, before anything is written; a value in itself is one
of them. Decoding refuses any tag that `encode` does not write ("ckpt-client-state"), kinds of a newer version ("ckpt-version") and
classes that are not there or differ ("ckpt-client-class").

**Limits.** A tensor comes back on the host, contiguous, with its own memory, without attributes; an object that a state holds twice
comes back as two.

An engine's meta says `"format": 2` where a client state has tags, so that a reader that knows none refuses the checkpoint and does not hand them
out; without tags it says 1, as ever. Tags in a checkpoint of format 1 are those of the facade, and are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_ckpt.client_classes import decode_instance, encode_instance
from ds_ckpt.client_values import DECODERS, ENCODERS
from ds_ckpt.jsontext import Json
from ds_ckpt.tagged_values import KIND, StateDecoder, StateEncoder
from ds_config.errors import UnsupportedError

__all__ = ["decode", "encode", "format_of", "has_tags"]

_CLASSES = ("enum", "flag", "namedtuple", "dataclass", "derived")


def encode(value: Any, path: str = "client_state") -> Json:
    """Encode a value as JSON.

    Raises:
        UnsupportedError: values that cannot be stored; the message lists them with their places ("ckpt-client-state").
    """
    encoder = StateEncoder(ENCODERS, encode_instance)
    out = encoder.encode(value, path)
    if encoder.problems:
        lines = [f"\n  {place} {why}" for place, why in encoder.problems[:8]]
        more = f"\n  and {len(encoder.problems) - 8} more" if len(encoder.problems) > 8 else ""
        raise UnsupportedError(
            f"a checkpoint without pickle cannot hold this client state; nothing was written:{''.join(lines)}{more}",
            code="ckpt-client-state",
            fix="Store what the object is made of (numbers, text, lists, dicts, tensors, its state_dict()), or a dataclass of them.",
        )
    return out


def decode(value: Json, path: str = "client_state") -> Any:
    """Decode what `encode` returned.

    Raises:
        CheckpointError: nothing wrote this ("ckpt-client-state"), a newer version did ("ckpt-version"), or a class is not
            imported or is another ("ckpt-client-class").
    """
    return StateDecoder({**DECODERS, **dict.fromkeys(_CLASSES, decode_instance)}).decode(value, path)


def has_tags(value: Json) -> bool:
    """Whether what `encode` returned has tags."""
    if isinstance(value, Mapping):
        return KIND in value or any(map(has_tags, value.values()))
    return isinstance(value, list) and any(map(has_tags, value))


def format_of(client: Json) -> int:
    """Return the lowest format of an engine's meta that can say an encoded client state."""
    return 2 if has_tags(client) else 1
