"""Models too large to exist whole in one process: sharded while they are built, filled from files slice by slice.

    with ds_zero.Init():                       # each module is cut over the ranks as soon as it is made
        model = Net()
    optimizer = ds_zero.shard(model, AdamW(model.parameters()), stage=3)
    ds_zero.load_pretrained(model, "weights/")  # each rank reads the bytes it holds

`Init` uses torch's own registration hooks and draws no random numbers of its own: with equal seeds the values are those of the model
built without it. With `meta=True` parameters have no values at all; buffers do.

The format of safetensors: 8 bytes little-endian length n, n bytes of JSON {name: {dtype, shape, data_offsets}}, then the data;
row-major, so a range of a flattened parameter is a range of the file.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import Parameter

import ds_comm as comm
from ds_comm import Group
from ds_comm.placement import TensorShard
from ds_config.errors import CheckpointError, PlanError
from ds_config.json_files import read_weight_map
from ds_config.regular_file import open_regular
from ds_zero.runtime.init_shards import Scatter, is_scattered
from ds_zero.runtime.sharded_model import ShardedModel, sharding_of

__all__ = ["Init", "MiCS_Init", "load_pretrained"]


class Init:
    """Inside, modules are cut over the ranks as soon as they become part of another one, the root at the end.

    Args:
        group: Ranks to cut over; None: all.
        enabled: False makes this do nothing.
        meta: Give parameters no values: for `load_pretrained`. Buffers, also non-persistent ones, are computed as usual.
        dtype: Format of floating-point parameters; None: as the model makes them.
    A module must be built alike on every rank; values of rank 0 win. Peak memory is the largest module that is registered
    in one piece plus this rank's chunks. Nestable; collective on registration and exit.
    """

    def __init__(
        self,
        *,
        group: Group | dist.ProcessGroup | None = None,
        enabled: bool = True,
        meta: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.enabled, self.meta, self.dtype = enabled, meta, dtype
        world = comm.ensure_world if enabled and not meta else comm.world_group
        self._scatter = Scatter(world() if group is None else comm.as_group(group))
        self._created: list[weakref.ref[Parameter]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Init:
        self.go_on()
        return self

    def pause(self) -> None:
        """Stop sharding new modules until `go_on` is called."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def go_on(self) -> None:
        """Cut what is made from here on."""
        if self.enabled and not self._handles:
            self._handles = [
                register_module_parameter_registration_hook(cast(Any, self._parameter)),
                register_module_module_registration_hook(self._module),
            ]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()
        if kind is None:
            for number, ref in enumerate(self._created):
                param = ref()
                if param is not None:
                    self._take(param, f"parameter {number}")
            self._scatter.settle()
        self._created.clear()

    def _parameter(self, module: nn.Module, name: str, param: Any) -> Any:
        del module, name
        if not isinstance(param, Parameter):
            return None
        dtype = self.dtype if self.dtype is not None and param.is_floating_point() else param.dtype
        if self.meta and not param.is_meta:
            return Parameter(torch.empty(param.shape, dtype=dtype, device="meta"), param.requires_grad)
        if dtype is not param.dtype and not is_scattered(param):
            param.data = param.data.to(dtype)  # the same object: it may be tied, or carry a mark
        self._created.append(weakref.ref(param))
        return None

    def _module(self, module: nn.Module, name: str, child: Any) -> None:
        del module
        self._scatter.settle()
        if isinstance(child, nn.Module):
            for path, param in child.named_parameters():
                self._take(param, f"{name}.{path}")

    def _take(self, param: Parameter, name: str) -> None:
        if not self.meta:
            self._scatter.take(param, name)
        self.on_sharded(param)

    def cut(self, model: nn.Module) -> None:
        """Cut a model that is there already. Collective."""
        for name, param in model.named_parameters():
            self._take(param, name)

    def on_sharded(self, param: Parameter) -> None:
        """Do nothing: subclasses override this hook, called after `param` is sharded, or again if it already was."""


class MiCS_Init(Init):  # noqa: N801  the reference's name
    """Init for a model that `shard(..., shard_size=...)` then cuts over replicas. Until then all ranks share one copy."""


_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor is: file, first byte, format, shape."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def load_pretrained(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> tuple[str, ...]:
    """Fill a sharded model from safetensors. Collective.

    Args:
        model: Given to `shard` before; built on meta (`Init(meta=True)`) or with values of its own.
        path: A .safetensors file, or a directory with such files (with or without an index).
        strict: Raise if a parameter or persistent buffer is in no file. Else it keeps its value, or is zero on meta.
    Returns:
        Names the files have and the model does not.
    Raises:
        PlanError: the model is not sharded ("zero-not-sharded").
        CheckpointError: a name is missing ("pretrained-missing"), a shape differs ("pretrained-shape"), or a file is not
            what it says ("pretrained-file").
    Cost: reads each byte of the files once over all ranks of a replica; 16 MiB of memory besides the shards.
    """
    sharding = next((s for s in map(sharding_of, model.parameters()) if s is not None), None)
    if sharding is None:
        raise PlanError(
            "load_pretrained was given a model that is not sharded",
            code="zero-not-sharded",
            fix="Call ds_zero.shard(model, ...) first; on meta it allocates this rank's shards only.",
        )
    entries = _entries(Path(path))
    aliases = _aliases(model)
    # Checked on all ranks before anything is written on one.
    sources = _find(sharding, entries, aliases)
    buffers = {n: b for n, b in model.named_buffers() if n in entries and entries[n].shape == tuple(b.shape)}
    missing = _told(sharding, [n for n, entry in sources.items() if entry is None] + _missing_buffers(model, buffers))
    if missing and strict:
        raise CheckpointError(
            f"{len(missing)} tensors of the model are in no file of {path}: {', '.join(missing[:5])}",
            code="pretrained-missing",
            fix="Load the right weights, or pass strict=False and set what is missing yourself.",
        )
    _read_params(sharding, sources)
    for name, buffer in buffers.items():
        _read(entries[name], 0, buffer.view(-1))
    sharding.unloaded.clear()
    sharding.refresh()
    known = {alias for names in aliases.values() for alias in names} | {n for n, _ in model.named_buffers()}
    known |= {logical.name for logical in sharding.logical.values()}
    # What no rank has: of experts each has others.
    return tuple(sorted(set(entries).difference(_told(sharding, sorted(known & set(entries))))))


def _told(sharding: ShardedModel, names: list[str]) -> list[str]:
    """Return the names of all ranks, where the ranks' models differ. Collective: all-gathers the names."""
    if len(sharding.families) == 1 and sharding.everyone.ranks == sharding.group.ranks:
        return names
    gathered = comm.all_gather_json(names, sharding.everyone, unit="load_pretrained")
    return sorted({name for of in gathered for name in of})


def _find(
    sharding: ShardedModel, entries: Mapping[str, _Entry], aliases: Mapping[str, list[str]]
) -> dict[str, _Entry | None]:
    """Find each parameter's logical tensor in the files; None where no file has the tensor."""
    matches: dict[str, _Entry | None] = {}
    for slot in (slot for unit in sharding.units for slot in unit.layout.slots):
        logical = sharding.logical[slot.name]
        names = aliases[slot.name] if logical.name == slot.name else [logical.name]
        entry = matches[slot.name] = next((entries[n] for n in names if n in entries), None)
        if entry is not None and entry.shape != logical.shape:
            raise CheckpointError(
                f"{logical.name} has shape {logical.shape}, the file says {entry.shape} ({entry.path.name})",
                code="pretrained-shape",
                fix="Build the model with the configuration that the weights were made with.",
            )
    return matches


def _read_params(sharding: ShardedModel, matches: Mapping[str, _Entry | None]) -> None:
    sharding.arrivals.finish()
    sharding.quiet("load_pretrained")
    for unit in sharding.units:
        unit.state_store.fetch()
        for piece in sharding.pieces(unit):
            entry = matches[piece.name]
            if entry is not None:
                local = sharding.logical[piece.name].shard("param", "", piece.interval)
                for here, there in local.overlap(TensorShard.whole(local.name, entry.shape, "")):
                    _read(entry, there.start, unit.shard[piece.start + here.start : piece.start + here.stop])
        unit.state_store.store()


def _missing_buffers(model: nn.Module, available: Mapping[str, Tensor]) -> list[str]:
    needless = {
        f"{name}.{key}" if name else key for name, m in model.named_modules() for key in m._non_persistent_buffers_set
    }
    return [name for name, _ in model.named_buffers() if name not in available and name not in needless]


def _read(entry: _Entry, start: int, out: Tensor) -> None:
    """Read elements [start, start + n) of a tensor in a file into `out`, cast to the dtype of `out`."""
    width, done = entry.dtype.itemsize, 0
    with open(entry.path, "rb") as file, torch.no_grad():
        file.seek(entry.start + start * width)
        while done < out.numel():
            raw = bytearray(file.read(min((out.numel() - done) * width, _CHUNK_BYTES)))
            if not raw or len(raw) % width:
                raise _damaged(entry.path, "it ends before its data does")
            part = torch.frombuffer(raw, dtype=entry.dtype)
            out[done : done + part.numel()].copy_(part)
            done += part.numel()


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Map the first name of each parameter to all its names: a file may store tied parameters under any of them."""
    first = {id(p): n for n, p in model.named_parameters()}
    names: dict[str, list[str]] = {n: [] for n in first.values()}
    for name, param in model.named_parameters(remove_duplicate=False):
        names[first[id(param)]].append(name)
    return names


def _entries(path: Path) -> dict[str, _Entry]:
    listed = read_weight_map(path, _broken)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if listed is not None:
        files = sorted(set(listed.values()))
    if not files:
        raise _damaged(path, "there is no .safetensors file")
    return {name: entry for file in files for name, entry in _header(file).items()}


def _header(path: Path) -> dict[str, _Entry]:
    try:
        with open(open_regular(path), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= path.stat().st_size - 8:
                raise _damaged(path, f"its header cannot be {length} bytes long")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            return {name: _entry(path, 8 + length, name, **facts) for name, facts in header.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error


def _entry(path: Path, data: int, name: str, dtype: str, shape: list[int], data_offsets: list[int]) -> _Entry:
    if dtype not in _DTYPES:
        raise _damaged(path, f"{name} has the format {dtype}, which torch cannot read here")
    start, end = data_offsets
    if start < 0 or end - start != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise _damaged(path, f"{name} of the format {dtype} and shape {shape} cannot lie at {start} to {end}")
    return _Entry(path, data + start, _DTYPES[dtype], tuple(shape))


def _damaged(path: Path, why: str) -> CheckpointError:
    return _broken(f"{path} cannot be read as safetensors: {why}")


def _broken(text: str) -> CheckpointError:
    return CheckpointError(text, code="pretrained-file", fix="Give a .safetensors file, or a directory that has some.")
