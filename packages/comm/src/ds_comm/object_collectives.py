"""Collectives of Python objects, by pickle: for metadata, not for data. Only between ranks of one job that trust each other.

Every rank learns the sizes first, then the bytes travel as one padded tensor: two small collectives each.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_comm.call import CollectiveCall
from ds_comm.collectives import all_gather_single, broadcast, gather, scatter
from ds_comm.groups import Group, GroupLike, as_group
from ds_comm.metadata import metadata_device
from ds_comm.p2p import recv, send

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]


def all_gather_object(object_list: list[Any], obj: Any, group: GroupLike = None, *, unit: str = "") -> None:
    """Gather rank r's `obj` into `object_list[r]` on all ranks.

    The list has one entry per rank.
    """
    group = as_group(group)
    CollectiveCall("all_gather_object", group, unit).check_count("object_list", object_list)
    packed = _pack(obj, group)
    sizes = _all_sizes(packed, group, unit)
    rows = packed.new_empty((group.size, max(sizes)))
    all_gather_single(rows, _padded(packed, max(sizes)), group, unit=unit)
    object_list[:] = [_unpack(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    group_dst: int | None = None,
    *,
    unit: str = "",
) -> None:
    """Gather rank r's `obj` into `object_gather_list[r]` on rank `dst` (default 0).

    Other ranks pass no list.
    """
    group = as_group(group)
    call = CollectiveCall("gather_object", group, unit)
    root = call.root(dst, group_dst, default=0)
    packed = _pack(obj, group)
    sizes = _all_sizes(packed, group, unit)
    rows = list(packed.new_empty((group.size, max(sizes)))) if group.rank == root else None
    gather(_padded(packed, max(sizes)), rows, group_dst=root, group=group, unit=unit)
    if rows is not None and object_gather_list is not None:
        object_gather_list[:] = [_unpack(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    *,
    unit: str = "",
) -> None:
    """Broadcast the list of rank `src` (default 0) into every rank's list of the same length."""
    group = as_group(group)
    call = CollectiveCall("broadcast_object_list", group, unit)
    root = call.root(src, group_src, default=0)
    packed = _pack(list(object_list) if group.rank == root else None, group, device)
    size = torch.tensor([packed.numel()], dtype=torch.int64, device=packed.device)
    broadcast(size, group_src=root, group=group, unit=unit)
    if group.rank != root:
        packed = packed.new_empty(int(size))
    broadcast(packed, group_src=root, group=group, unit=unit)
    received = _unpack(packed)
    call.check_count("object_list", object_list, len(received))
    object_list[:] = received


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    group_src: int | None = None,
    *,
    unit: str = "",
) -> None:
    """`scatter_object_output_list[0]` becomes element `rank` of the list that rank `src` (default 0) passes."""
    group = as_group(group)
    call = CollectiveCall("scatter_object_list", group, unit)
    root = call.root(src, group_src, default=0)
    parts: list[Tensor] | None = None
    sizes = torch.zeros(group.size, dtype=torch.int64, device=metadata_device(group))
    if group.rank == root:
        objects = list(scatter_object_input_list or ())
        call.check_count("scatter_object_input_list", objects)
        packed = [_pack(obj, group) for obj in objects]
        sizes.copy_(torch.tensor([part.numel() for part in packed], device="cpu"))
        parts = [_padded(part, int(sizes.max())) for part in packed]
    broadcast(sizes, group_src=root, group=group, unit=unit)
    received = torch.empty(int(sizes.max()), dtype=torch.uint8, device=sizes.device)
    scatter(received, parts, group_src=root, group=group, unit=unit)
    scatter_object_output_list[:1] = [_unpack(received[: int(sizes[group.rank])])]


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: GroupLike = None,
    group_dst: int | None = None,
    *,
    unit: str = "",
) -> None:
    """Send the objects to rank `dst`, which calls `recv_object_list`."""
    group = as_group(group)
    packed = _pack(list(object_list), group)
    size = torch.tensor([packed.numel()], dtype=torch.int64, device=packed.device)
    send(size, dst, group, group_dst=group_dst, unit=unit)
    send(packed, dst, group, group_dst=group_dst, unit=unit)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    group_src: int | None = None,
    *,
    unit: str = "",
) -> None:
    """Fill the list with what rank `src` sends; it has as many places as objects come."""
    group = as_group(group)
    size = torch.zeros(1, dtype=torch.int64, device=metadata_device(group))
    recv(size, src, group, group_src=group_src, unit=unit)
    packed = torch.empty(int(size), dtype=torch.uint8, device=size.device)
    recv(packed, src, group, group_src=group_src, unit=unit)
    received = _unpack(packed)
    CollectiveCall("recv_object_list", group, unit).check_count("object_list", object_list, len(received))
    object_list[:] = received


def _pack(obj: Any, group: Group, device: torch.device | None = None) -> Tensor:
    data = bytearray(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    return torch.frombuffer(data, dtype=torch.uint8).to(device if device is not None else metadata_device(group))


def _unpack(packed: Tensor) -> Any:
    return pickle.loads(packed.cpu().numpy().tobytes())


def _padded(packed: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(packed, (0, size - packed.numel()))


def _all_sizes(packed: Tensor, group: Group, unit: str) -> list[int]:
    sizes = torch.empty(group.size, dtype=torch.int64, device=packed.device)
    local_size = torch.tensor([packed.numel()], dtype=torch.int64, device=packed.device)
    all_gather_single(sizes, local_size, group, unit=unit)
    return [int(size) for size in sizes.tolist()]
