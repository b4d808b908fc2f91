"""What ranks tell each other beside tensors: counts as int64, everything else as JSON. No pickles: what comes from another rank
is data and never code.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_comm.collectives import all_gather_single, all_to_all_single, broadcast
from ds_comm.groups import Group, GroupLike, as_group
from ds_config import errors
from ds_config.errors import CommError, DsError

__all__ = [
    "all_gather_json",
    "all_to_all_counts",
    "broadcast_json",
    "digest_of",
    "find_differences",
    "metadata_device",
    "on_group",
    "raise_together",
]

_LIMIT_BYTES = 1 << 30  # of one rank's text, unpacked: more is a mistake or an attack


def all_to_all_counts(counts: Tensor, group: GroupLike = None, *, unit: str = "") -> Tensor:
    """Exchange how many rows each rank sends to each other rank: row r goes to, and comes from, rank r.

    Args:
        counts: [N] or [N, k], int64, on any device that the group communicates.
    Returns:
        Of the same shape and device, new.
    Raises:
        CommError: not int64 or not a row per rank ("comm-size").
    Cost: 8 (N-1) k bytes; about 5 us on shm where all ranks are ready.
    """
    group = as_group(group)
    if counts.dtype != torch.int64 or counts.dim() == 0 or counts.shape[0] != group.size:
        raise CommError(
            f"all_to_all_counts[{unit}] of group {group.name!r}: {counts.dtype} of shape {tuple(counts.shape)}",
            code="comm-size",
            fix=f"Pass int64 of shape [{group.size}] or [{group.size}, k].",
        )
    out = torch.empty_like(counts, memory_format=torch.contiguous_format)
    all_to_all_single(out, counts.contiguous(), group=group, unit=unit)
    return out


def all_gather_json(value: Any, group: GroupLike = None, *, unit: str = "") -> list[Any]:
    """Gather every rank's `value`, in rank order, after a round trip through JSON.

    Tuples become lists, and keys of mappings become strings.

    Raises:
        TypeError: JSON cannot encode the value.
    Cost: two all-gathers; the second pads to the longest text, compressed.
    """
    group = as_group(group)
    data = _pack(value)
    if group.size == 1:
        return [_unpack(data)]
    device = metadata_device(group)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    sizes = size.new_empty(group.size)
    all_gather_single(sizes, size, group, unit=unit)
    lengths = sizes.tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: data.numel()] = data
    rows = torch.empty((group.size, max(lengths)), dtype=torch.uint8, device=device)
    all_gather_single(rows, padded.to(device), group, unit=unit)
    return [_unpack(row[:n]) for row, n in zip(rows.cpu(), lengths, strict=True)]


def digest_of(values: Mapping[str, str], nbytes: int = 8) -> int:
    """Return a digest of `values`, the same in every process and in any order of keys; below 2 ** (8 * nbytes - 1)."""
    text = json.dumps(values, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=nbytes).digest(), "big") >> 1


def find_differences(
    values: Mapping[str, str], group: GroupLike = None, *, unit: str = ""
) -> dict[str, list[str | None]]:
    """Compare `values` over ranks: of each key that differs, the value of every rank in rank order; None where a rank has no such key.

    Cost: an all-gather of 8 bytes a rank; where digests differ, `all_gather_json` of the values.
    """
    group = as_group(group)
    if group.size == 1:
        return {}
    digest = torch.tensor([digest_of(values)], dtype=torch.int64, device=metadata_device(group))
    digests = digest.new_empty(group.size)
    all_gather_single(digests, digest, group, unit=unit)
    if len(set(digests.tolist())) == 1:
        return {}
    by_rank: list[dict[str, str]] = all_gather_json(dict(values), group, unit=unit)
    keys = dict.fromkeys(key for one in by_rank for key in one)
    columns = {key: [one.get(key) for one in by_rank] for key in keys}
    return {key: column for key, column in columns.items() if len(set(column)) > 1}


def broadcast_json(value: Any, group: GroupLike = None, *, group_src: int = 0, unit: str = "") -> Any:
    """Rank `group_src`'s `value`, on every rank, as JSON keeps it. What the others pass is ignored.

    Cost: two broadcasts.
    """
    group = as_group(group)
    data = _pack(value) if group.rank == group_src else torch.empty(0, dtype=torch.uint8, device="cpu")
    if group.size > 1:
        device = metadata_device(group)
        size = torch.tensor([data.numel()], dtype=torch.int64, device=device)
        broadcast(size, group_src=group_src, group=group, unit=unit)
        data = data.to(device) if group.rank == group_src else size.new_empty(int(size), dtype=torch.uint8)
        broadcast(data, group_src=group_src, group=group, unit=unit)
    return _unpack(data)


def raise_together(error: Exception | None, group: GroupLike = None, *, unit: str = "") -> None:
    """Raise on every rank of `group` if any rank failed in what all of them do between two collectives. Collective.

    Without it the others would wait in their next collective for a rank that has left, and end at a deadline without the reason.

    Args:
        error: What this rank's attempt raised; None where the attempt succeeded.
    Raises:
        Exception: `error` where there is one; elsewhere the class, code and fix of the first rank that failed, with that rank's message.
    Cost: two all-gathers of a few bytes; nothing in a group of one.
    """
    group = as_group(group)
    described = None if error is None else _describe(error)
    everyones = all_gather_json(described, group, unit=unit) if group.size > 1 else [described]
    if error is not None:
        raise error
    for rank, other in zip(group.ranks, everyones, strict=True):
        if other is not None:
            kind, message, code, fix = other
            raise getattr(errors, kind)(f"rank {rank} failed: {message}", code=code, fix=fix)


def _describe(error: Exception) -> tuple[str, str, str, str]:
    """Return class, message, code and fix, by which another rank raises the same error; a foreign class becomes a CommError."""
    if isinstance(error, DsError):
        known = next((c.__name__ for c in type(error).__mro__ if c.__name__ in errors.__all__), "DsError")
        return known, error.message, error.code, error.fix
    return "CommError", f"{type(error).__name__}: {error}", "comm-peer-failed", "Read the traceback of that rank."


def metadata_device(group: Group) -> torch.device:
    """Return the device for small tensors of a group: the CPU where the group's backend serves the CPU.

    Backends of devices transfer device tensors only.
    """
    kinds = {} if group.order is None else group.order.transports
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(next(iter(kinds)), torch.accelerator.current_device_index())


def on_group(tensor: Tensor, group: Group) -> Tensor:
    """Return `tensor` where the group takes it: a copy on the device where it is in host memory and the backend takes none of that (NCCL alone)."""
    place = metadata_device(group)
    return tensor.to(place) if tensor.device.type == "cpu" and place != torch.device("cpu") else tensor


def _pack(value: Any) -> Tensor:
    text = json.dumps(value, separators=(",", ":"))
    return torch.frombuffer(bytearray(zlib.compress(text.encode(), 1)), dtype=torch.uint8)


def _unpack(data: Tensor) -> Any:
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(data.cpu().numpy().tobytes(), _LIMIT_BYTES)
    if not unpacker.eof:
        raise CommError(
            f"another rank sent metadata that is cut short or above {_LIMIT_BYTES >> 20} MiB",
            code="comm-metadata",
            fix="Send tensors for what is large; see whether all ranks run one version.",
        )
    return json.loads(text)
