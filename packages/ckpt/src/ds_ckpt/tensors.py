"""Local shards as bytes and back: the only file of this package that looks into a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ds_ckpt.plan import Item
from ds_comm.placement import TensorShard
from ds_config.errors import CheckpointError

__all__ = ["Local", "byte_view", "check_local", "dtype_name", "entry_bytes", "staging", "torch_dtype", "whole"]


class Local(Protocol):
    """What `ds_comm.LocalShard` is: one rank's elements of one logical tensor, 1-D, writable in place."""

    @property
    def shard(self) -> TensorShard: ...
    @property
    def data(self) -> Tensor: ...


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without the prefix."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name that `dtype_name` returned."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"this torch has no dtype {name}",
            code="ckpt-dtype",
            fix="Update torch, or convert the checkpoint elsewhere.",
        )
    return found


def check_local(shards: Iterable[Local]) -> list[Local]:
    """The shards as a list, each one's data matching what its `TensorShard` says.

    Raises:
        CheckpointError: "ckpt-shard": number of elements or dtype differ.
    """
    out = list(shards)
    for local in out:
        shard, data = local.shard, local.data
        if data.numel() != shard.numel or dtype_name(data.dtype) != shard.dtype or data.layout != torch.strided:
            raise CheckpointError(
                f"{shard.name!r}: the shard says {shard.numel} elements of {shard.dtype}, its data is "
                f"{dtype_name(data.dtype)}{list(data.shape)} ({data.layout})",
                code="ckpt-shard",
                fix="Pass the local elements as a dense 1-D tensor of the shard's dtype.",
            )
    return out


def byte_view(data: Tensor) -> memoryview:
    """The bytes of a tensor's elements: the tensor's own memory where it is contiguous and on the host, else a copy."""
    flat = data.detach().reshape(-1)
    host = flat.cpu() if flat.device.type != "cpu" else flat
    return host.contiguous().view(torch.uint8).numpy().data if host.numel() else memoryview(b"")


def entry_bytes(locals_: Sequence[Local], item: Item) -> memoryview:
    """The bytes of one entry of this rank's file."""
    piece = item.piece
    return byte_view(locals_[piece.shard].data.detach().reshape(-1)[piece.start : piece.start + piece.numel])


def staging(local: Local, stored_dtype: str) -> tuple[Tensor, bool]:
    """Host memory to read a shard into: (the shard's own data, False) where that works, else (a buffer, True)."""
    data = local.data.detach()
    if data.device.type == "cpu" and data.is_contiguous() and local.shard.dtype == stored_dtype:
        return data.reshape(-1), False
    return torch.empty(local.shard.numel, dtype=torch_dtype(stored_dtype)), True


class _Whole:
    def __init__(self, name: str, data: Tensor) -> None:
        self.shard = TensorShard.whole(name, tuple(data.shape), dtype_name(data.dtype))
        self.data = data.detach().reshape(-1)


def whole(tensors: dict[str, Tensor]) -> list[Local]:
    """Shards of tensors that this process holds completely: `ds_ckpt.save(path, ds_ckpt.whole(model.state_dict()), {})`.

    A load fills them in place, so every tensor must be contiguous.

    Raises:
        CheckpointError: "ckpt-shard": a tensor that is not contiguous.
    """
    for name, data in tensors.items():
        if not data.is_contiguous():
            raise CheckpointError(
                f"{name!r} is not contiguous; a load could not fill it in place",
                code="ckpt-shard",
                fix="Call .contiguous() and copy back after a load.",
            )
    return [_Whole(name, data) for name, data in tensors.items()]
