"""What modules keep beside their tensors by torch's `get_extra_state` (scales of fp8, counters), as a checkpoint's meta holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ds_ckpt.client_state import decode, encode
from ds_ckpt.jsontext import Json
from ds_comm import Mesh, all_gather_json
from ds_engine.all_or_nothing import all_or_nothing

__all__ = ["encode_extra_states", "set_extra_states"]


def encode_extra_states(module: nn.Module, mesh: Mesh) -> dict[str, Json]:
    """Return them by the name of their module: of each its first rank's, of all stages. Collective where modules have any.

    Raises:
        UnsupportedError: a module's state is what cannot be stored ("ckpt-client-state"); PlanError on the other ranks.
    """
    owners, staged = dict(_owners(module)), mesh["pipe"].size > 1
    if not owners and not staged:
        return {}
    ours: dict[str, Json] = all_or_nothing(
        mesh["world"], lambda: {n: encode(m.get_extra_state(), f"{n}._extra_state") for n, m in owners.items()}
    )
    every = all_gather_json(ours, mesh["world"], unit="extra state") if staged else [ours]
    return {name: state for states in reversed(every) for name, state in states.items()}


def set_extra_states(module: nn.Module, stored: Mapping[str, Json]) -> None:
    """Give modules what was stored of them; one of which nothing is stored keeps what it has."""
    for name, owner in _owners(module):
        if name in stored:
            owner.set_extra_state(decode(stored[name], f"{name}._extra_state"))


def _owners(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return (row for row in module.named_modules() if type(row[1]).get_extra_state is not nn.Module.get_extra_state)
