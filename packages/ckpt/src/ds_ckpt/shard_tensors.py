"""Local shards as bytes and back: the only file of this package that looks into a tensor."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_accel import get_accelerator, streams
from ds_ckpt.crc import copy_crc32, crc32
from ds_ckpt.dtypes import ITEMSIZE
from ds_ckpt.jsontext import Json
from ds_ckpt.save_plan import Item
from ds_ckpt.writer import Copy, PendingBytes, SlabPool
from ds_comm.placement import Box, Interval, TensorShard
from ds_config.errors import CheckpointError

__all__ = [
    "Local",
    "byte_view",
    "check_local",
    "copier",
    "dtype_name",
    "fill_state",
    "full_meta",
    "full_shards",
    "lock_slabs",
    "staged_groups",
    "staging",
    "torch_dtype",
]


class Local(Protocol):
    """What `ds_comm.LocalShard` is: one rank's elements of one logical tensor, 1-D, writable in place."""

    @property
    def shard(self) -> TensorShard: ...
    @property
    def data(self) -> Tensor: ...


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name that `dtype_name` returned."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"this torch has no dtype {name}",
            code="ckpt-dtype",
            fix="Update torch, or convert the checkpoint elsewhere.",
        )
    return dtype


def check_local(shards: Iterable[Local]) -> list[Local]:
    """Return the shards as a list, after checking that the data of each matches its `TensorShard`.

    Raises:
        CheckpointError: "ckpt-shard": something else than shards, or number of elements or dtype differ.
    """
    out = list(shards)
    for local in out:
        shard, data = getattr(local, "shard", None), getattr(local, "data", None)
        if not isinstance(shard, TensorShard) or not isinstance(data, Tensor):
            raise CheckpointError(
                f"found a {type(local).__name__} in a {type(shards).__name__} of shards",
                code="ckpt-shard",
                fix="Pass what the optimizer that ds_zero.shard returned has as `shards()`; of tensors by name, such as a state dict, full_shards(state_dict).",
            )
        if data.numel() != shard.numel or dtype_name(data.dtype) != shard.dtype or data.layout != torch.strided:
            raise CheckpointError(
                f"{shard.name!r}: the shard says {shard.numel} elements of {shard.dtype}, its data is "
                f"{dtype_name(data.dtype)}{list(data.shape)} ({data.layout})",
                code="ckpt-shard",
                fix="Pass the local elements as a dense 1-D tensor of the shard's dtype.",
            )
    return out


def byte_view(data: Tensor) -> memoryview:
    """View the bytes of a tensor's elements: its own memory where contiguous and on the host, else a copy."""
    return _flat_bytes(data.cpu()).numpy().data if data.numel() else memoryview(b"")


def _flat_bytes(data: Tensor) -> Tensor:
    flat = data.detach().reshape(-1).contiguous()
    # One element counts as contiguous whatever its stride, but cannot be viewed as bytes before the stride is 1.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def copier(locals_: Sequence[Local]) -> Copy:
    """Return a function that copies bytes of an entry of this rank's file to host memory; their CRC32, or the `PendingBytes` of a device's bytes.

    Values of a device are those of work that was queued on the current streams before this call. They are copied on a stream of their own, which
    waits for nothing else; call this on the thread that queued the work, the function on any.
    """
    sides = {
        local.data.device: _SideStream(local.data.device) for local in locals_ if streams.is_device_memory(local.data)
    }
    flat: dict[int, Tensor] = {}  # made one after another: the device waits for the first

    def copy(target: memoryview, item: Item, start: int) -> int | PendingBytes:
        index, first = item.piece.shard, item.piece.start * ITEMSIZE[item.dtype] + start
        side = sides.get(locals_[index].data.device)
        if index not in flat:
            with nullcontext() if side is None else side.current():
                flat[index] = _flat_bytes(locals_[index].data)
        source = flat[index][first : first + target.nbytes]
        if side is None or not streams.is_device_memory(source):
            # One thread, without the GIL. torch would share 4 MiB among its threads, which costs more than it gains where
            # the other cores are busy writing (5x slower saves were seen).
            return copy_crc32(target, source.numpy().data)
        return side.send(target, source)

    return copy


class _SideStream:
    """A stream beside the current one of a device, for copies to the host."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, streams.new_stream(device)
        streams.wait_stream(self.stream, streams.current_stream(device))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Queue this thread's work on the side stream, while inside."""
        with streams.on_device(self.device), streams.on_stream(self.stream, self.device):
            yield

    def send(self, target: memoryview, source: Tensor) -> _SideTransfer:
        """Queue the copy of `source`; the host goes on where `target` is page-locked."""
        with self.current():
            streams.copy_into(streams.host_memory(torch.frombuffer(target, dtype=torch.uint8)), source)
            return _SideTransfer(target, streams.record_event(self.device), self.device)


class _SideTransfer:
    """Bytes that a side stream of `device` copies."""

    def __init__(self, target: memoryview, event: streams.DeviceEvent, device: torch.device) -> None:
        self._target, self._event, self._device = target, event, device

    def wait(self) -> None:
        """Block until the copy is done."""
        with streams.on_device(
            self._device
        ):  # the thread that writes begins with device 0, and would make a context there
            self._event.synchronize()

    def checksum(self) -> int:
        """Wait, and return the CRC32 of the bytes."""
        self.wait()
        return crc32(self._target)


def lock_slabs(pool: SlabPool, locals_: Sequence[Local]) -> None:
    """Let a pool have page-locked slabs if a shard is on a device that copies to such memory by itself."""
    if get_accelerator().facts.pinned and any(streams.is_device_memory(local.data) for local in locals_):
        pool.lock_pages(_page_locked)


def _page_locked(nbytes: int) -> memoryview:
    """Allocate page-locked memory that begins on a page, as files are written from."""
    memory = streams.page_locked((nbytes,), torch.uint8)
    if memory.data_ptr() % mmap.PAGESIZE:
        memory = streams.page_locked((nbytes + mmap.PAGESIZE,), torch.uint8)
        memory = memory[-memory.data_ptr() % mmap.PAGESIZE :][:nbytes]
    array: Any = memory.numpy()  # numpy's types name no buffer before Python 3.12
    return memoryview(array)


def _in_place(local: Local, stored_dtype: str) -> bool:
    data = local.data
    return not streams.is_device_memory(data) and data.is_contiguous() and local.shard.dtype == stored_dtype


def staged_groups(locals_: Sequence[Local], stored_dtypes: Sequence[str], limit_bytes: int) -> list[set[int]]:
    """Group the shards to fill at the same time, in order, within `limit_bytes` of staging host memory per group.

    A group may exceed the limit only with a single shard. A shard that is read into its own memory (host memory:
    pinned,
    shared with other processes, or plain) counts for nothing.
    """
    groups: list[set[int]] = [set()]
    staged_bytes = 0
    for i, (local, dtype) in enumerate(zip(locals_, stored_dtypes, strict=True)):
        nbytes = 0 if _in_place(local, dtype) else local.shard.numel * ITEMSIZE[dtype]
        if staged_bytes and staged_bytes + nbytes > limit_bytes:
            groups.append(set())
            staged_bytes = 0
        groups[-1].add(i)
        staged_bytes += nbytes
    return groups


def staging(local: Local, stored_dtype: str) -> tuple[Tensor, bool]:
    """Return host memory to read a shard into: (the shard's data, False) where that works, else (a buffer, True).

    For a device's shard the buffer is pinned where the device gains from it.
    """
    data = local.data.detach()
    if _in_place(local, stored_dtype):
        return data.reshape(-1), False
    size, dtype = (local.shard.numel,), torch_dtype(stored_dtype)
    pinned = streams.is_device_memory(data) and get_accelerator().facts.pinned
    return streams.page_locked(size, dtype) if pinned else torch.empty(size, dtype=dtype, device="cpu"), True


class _Whole:
    def __init__(self, name: str, data: Tensor) -> None:
        self.shard = TensorShard.whole(name, tuple(data.shape), dtype_name(data.dtype))
        self.data = data.detach().reshape(-1)


class _OfDTensor:
    """This rank's elements of a DTensor (FSDP2's parameters, `parallelize_module`'s), in its memory."""

    def __init__(self, name: str, data: Tensor) -> None:
        tensor: Any = data
        local: Tensor = tensor.to_local().detach()
        chunks = tensor.__create_chunk_list__()
        if any(placement.is_partial() for placement in tensor.placements) or len(chunks) > 1:
            raise CheckpointError(
                f"{name!r} is a DTensor of placements {tensor.placements}, whose local elements are no box of it",
                code="ckpt-shard",
                fix="Redistribute it to Shard and Replicate placements.",
            )
        whole = tuple(data.shape)
        offset = tuple(chunks[0].offsets) if chunks else (0,) * len(whole)
        box = Box(offset if local.numel() else (0,) * len(whole), tuple(local.shape))
        self.shard = TensorShard(name, whole, dtype_name(data.dtype), box, Interval(0, local.numel()))
        self.data = local.reshape(-1)


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")  # torch imports the module of DTensors for seconds, where nobody has any


def full_shards(state: Mapping[str, Any]) -> list[Local]:
    """Shards of tensors that this process holds completely: `ds_ckpt.save(path, ds_ckpt.full_shards(model.state_dict()), {})`.

    A DTensor is the shard that this rank holds of it, so every rank saves and loads its own; the layouts may differ. A load fills the tensors
    in place, so every one must be contiguous.

    Args:
        state: Tensors by name, or dicts and lists of them, as an optimizer's `state_dict()`: names are joined by dots
            (`state.0.exp_avg`). What is no tensor is left out: it belongs in the meta, see `full_meta`.
    Raises:
        CheckpointError: "ckpt-shard": a tensor that is not contiguous; two tensors of one name; a DTensor that is a sum yet to be made.
    """
    tensors: dict[str, Tensor] = {}
    for path, value in _leaves(state):
        name = ".".join(path)
        if isinstance(value, Tensor):
            if name in tensors:
                raise CheckpointError(
                    f"two tensors have the name {name!r}", code="ckpt-shard", fix="Rename a key that holds a dot."
                )
            tensors[name] = value
    for name, data in tensors.items():
        if not (data.to_local() if _is_dtensor(data) else data).is_contiguous():  # type: ignore[attr-defined]
            raise CheckpointError(
                f"{name!r} is not contiguous; a load could not fill it in place",
                code="ckpt-shard",
                fix="Call .contiguous() and copy back after a load.",
            )
    return [_OfDTensor(name, data) if _is_dtensor(data) else _Whole(name, data) for name, data in tensors.items()]


def full_meta(state: Any) -> Json:
    """Return a state dict with `null` in place of its tensors, and lists of pairs in place of dicts with keys that are no text.

    The result is what `save` takes as meta, beside the `full_shards` of the same state; `fill_state` puts both together.
    """
    if isinstance(state, Tensor):
        return None
    if isinstance(state, Mapping):
        if all(isinstance(key, str) for key in state):
            return {key: full_meta(value) for key, value in state.items()}
        return {_PAIRS: [[key, full_meta(value)] for key, value in state.items()]}
    return [full_meta(value) for value in state] if isinstance(state, list | tuple) else state


def fill_state(meta: Json, state: Any) -> Any:
    """Return a copy of `state` with the numbers and texts of the meta that `full_meta` made; its tensors are those of `state`.

    Raises:
        CheckpointError: the meta is that of another state ("ckpt-mismatch").
    """
    if isinstance(state, Tensor):
        return state
    if isinstance(state, Mapping):
        values = dict(meta[_PAIRS]) if isinstance(meta, Mapping) and _PAIRS in meta else meta
        if not isinstance(values, Mapping) or set(values) != set(state):
            raise _other_state(meta, state)
        return {key: fill_state(values[key], value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        if not isinstance(meta, list | tuple) or len(meta) != len(state):
            raise _other_state(meta, state)
        return type(state)(fill_state(old, value) for old, value in zip(meta, state, strict=True))
    return meta


_PAIRS = "pairs of a dict"


def _other_state(meta: Json, state: Any) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint holds {str(meta)[:200]}, this state {str(list(state))[:200]}",
        code="ckpt-mismatch",
        fix="Make the model and the optimizer as they were saved; an optimizer has state after its first step.",
    )


def _leaves(state: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _leaves(value, (*path, str(index)))
    else:
        yield path, state
