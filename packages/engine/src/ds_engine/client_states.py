"""The client state of a run's checkpoint: one for all ranks, checked before anything is written or changed.

How values become JSON is in `ds_ckpt.client_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_ckpt.client_state import decode, encode
from ds_ckpt.jsontext import Json, from_json
from ds_comm import Group, broadcast_json
from ds_config.errors import CheckpointError, DsError, UnsupportedError
from ds_engine.all_or_nothing import all_or_nothing

__all__ = ["FORMATS", "decode_client_state", "encode_client_state"]

FORMATS = (1, 2)
"""Formats of an engine's meta. In 2 the client state has tags, which readers of 1 would hand out as they are."""


def encode_client_state(state: Mapping[str, Any], group: Group) -> dict[str, Json]:
    """Return rank 0's client state as JSON, on every rank; the others' are not looked at. Collective.

    Raises:
        UnsupportedError: on every rank: it holds what cannot be stored ("ckpt-client-state").
    """
    outcome: list[Any] = [None, None]
    failure: Exception | None = None
    if group.rank == 0:
        try:
            outcome[1] = encode(dict(state))
        except Exception as error:  # of a value that does not want to be looked at, too; sent to all ranks
            failure = error
            about = (error.message, error.code, error.fix) if isinstance(error, DsError) else None
            outcome[0] = about or (
                f"client_state could not be read: {type(error).__name__}: {error}",
                "ckpt-client-state",
                "Store numbers, text, lists, dicts and tensors.",
            )
    outcome = broadcast_json(outcome, group, unit="client state")
    if outcome[0] is not None:
        message, code, fix = outcome[0]
        raise UnsupportedError(message, code=code, fix=fix) from failure
    client: dict[str, Json] = outcome[1]
    return client


def decode_client_state(meta: Mapping[str, Json], path: str, group: Group) -> dict[str, Any]:
    """Return the client state in a meta as it lies in the manifest of `path`. Collective.

    Raises:
        CheckpointError: a newer version wrote the meta ("ckpt-version"), or see `ds_ckpt.client_state.decode`.
        PlanError: another rank could not decode it ("engine-other-rank").
    """
    version = meta.get("format")
    if type(version) is int and version > max(FORMATS):
        raise CheckpointError(
            f"{path} was written by a newer version of ds-engine: its format is {version}, this one reads up to {max(FORMATS)}",
            code="ckpt-version",
            fix="Update ds-engine.",
        )
    client: dict[str, Any] = all_or_nothing(group, lambda: decode(from_json(meta.get("client") or {})))
    return client
