"""A model's state dict in DeepSpeed's files: tensors by the names of parameters, and what modules keep beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ds_ckpt.convert.client_entries import client_entries
from ds_ckpt.jsontext import Json

__all__ = ["extra_entries", "in_parts", "nested_parts", "split_state"]

_EXTRA = "_extra_state"  # torch's name for what `get_extra_state` of a module returned


def split_state(module: Mapping[str, Any] | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors by name, and extra states by the name of their module.

    Models of Megatron-DeepSpeed have a dict of dicts, one for each part, whose keys make up the names.
    """
    tensors, extra = {}, {}
    for name, value in _flat(module or {}, ""):
        if name.rpartition(".")[2] == _EXTRA:
            extra[name.removesuffix(_EXTRA).removesuffix(".")] = value
        elif isinstance(value, Tensor):
            tensors[name] = value
    return tensors, extra


def extra_entries(extra: Json) -> dict[str, Any]:
    """Return the extra states of a meta by their names in a state dict."""
    return {f"{name}.{_EXTRA}" if name else _EXTRA: value for name, value in client_entries(extra).items()}


def nested_parts(state: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """List what a model's state dict has dicts of, by the start of the names in them."""
    parts: list[str] = []
    for key, value in state.items():
        if isinstance(value, Mapping) and key.rpartition(".")[2] != _EXTRA:
            parts += [f"{prefix}{key}", *nested_parts(value, f"{prefix}{key}.")]
    return tuple(parts)


def in_parts(state: Mapping[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """Put what a state dict has under plain names into dicts of these parts."""
    out: dict[str, Any] = {}
    known = set(parts)
    for name, value in {**{f"{part}.": None for part in parts}, **state}.items():
        at, start = out, 0
        for dot in (index for index, letter in enumerate(name) if letter == "." and name[:index] in known):
            at, start = at.setdefault(name[start:dot], {}), dot + 1
        if name[start:]:
            at[name[start:]] = value
    return out


def _flat(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and key.rpartition(".")[2] != _EXTRA:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value
