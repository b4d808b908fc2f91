"""Named tensors that are read one at a time: what every converter takes and gives.

Words: a *source* knows names, shapes and dtypes at once and reads a tensor when asked, so a conversion holds one tensor (and
a writer's buffers) in memory, whatever the size of the model.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ds_ckpt.checkpoint_list import read_manifest
from ds_ckpt.file_reads import Files
from ds_ckpt.jsontext import Json, from_json
from ds_ckpt.local_storage import CheckpointRef, locate
from ds_ckpt.reader import check_block, read_blocks
from ds_ckpt.save_job import SaveResult, save_from
from ds_ckpt.save_plan import plan_load
from ds_ckpt.shard_tensors import byte_view, dtype_name, torch_dtype
from ds_comm.placement import TensorShard
from ds_config.errors import CheckpointError, DsError

__all__ = [
    "TensorEntry",
    "TensorSource",
    "cast",
    "foreign_reader",
    "from_dict",
    "never_stepped",
    "open_checkpoint",
    "renamed",
    "write_checkpoint",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor that can be read: global shape, dtype (torch's name), and how."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Tensors by name, other names of some of them, and JSON."""

    entries: Mapping[str, TensorEntry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Json] = field(default_factory=dict)


def from_dict(tensors: Mapping[str, Tensor], meta: Mapping[str, Json] | None = None) -> TensorSource:
    """Build a source over tensors in memory.

    Tensors that are the same object are stored once, under their first name; the other names are aliases.
    """
    entries, aliases, first = dict[str, TensorEntry](), dict[str, str](), dict[int, str]()
    for name, tensor in tensors.items():
        if first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
        else:
            entries[name] = TensorEntry(tuple(tensor.shape), dtype_name(tensor.dtype), lambda t=tensor: t)  # type: ignore[misc]
    return TensorSource(entries, aliases, meta or {})


def foreign_reader(
    open_folder: Callable[Concatenate[_Path, _P], TensorSource],
) -> Callable[Concatenate[_Path, _P], TensorSource]:
    """Make an opener of another program's files, and each read of a tensor, raise CheckpointError for whatever torn files make it raise."""

    def typed(path: _Path, read: Callable[[], _T]) -> _T:
        try:
            return read()
        except (DsError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # readers of headers, pickles and sizes have no list of what may be wrong with them
            raise CheckpointError(
                f"{os.fspath(path)} cannot be read: {type(error).__name__}: {str(error)[:500]}",
                code="ckpt-foreign",
                fix="Its files were cut, changed, or do not belong together; copy the folder again.",
            ) from error

    @functools.wraps(open_folder)
    def call(path: _Path, *args: _P.args, **kwargs: _P.kwargs) -> TensorSource:
        source = typed(path, lambda: open_folder(path, *args, **kwargs))
        entries = {n: replace(e, read=functools.partial(typed, path, e.read)) for n, e in source.entries.items()}
        return replace(source, entries=entries)

    return call


def open_checkpoint(path: str | os.PathLike[str] | CheckpointRef) -> TensorSource:
    """Open a checkpoint of this package as a source.

    Each read opens the files it needs and checks the blocks it touches.
    """
    at = locate(path)
    manifest = read_manifest(at)

    def read(name: str) -> Tensor:
        record = manifest.tensors[name]
        out = torch.empty(record.shape, dtype=torch_dtype(record.dtype), device="cpu")
        reads = plan_load([TensorShard.whole(name, record.shape, record.dtype)], manifest)
        with Files(at.storage, at.tag, manifest.files) as files:
            unproven = {(p.file, p.at) for p in read_blocks(files, reads, [byte_view(out)])}
            for block in reads:
                if (block.file, block.at) in unproven:
                    check_block(files, block)
        return out

    entries = {
        name: TensorEntry(record.shape, record.dtype, lambda name=name: read(name))  # type: ignore[misc]
        for name, record in manifest.tensors.items()
    }
    return TensorSource(entries, manifest.aliases, dict(from_json(manifest.meta)))


def never_stepped(source: TensorSource) -> list[list[str]]:
    """List, by optimizer group, the parameters that had no gradient so far, for which DeepSpeed keeps a state of zeros.

    Empty where the meta does not say which parameters are frozen.
    """
    frozen, optimizer = source.meta.get("frozen"), source.meta.get("optimizer") or {}
    if frozen is None:
        return []
    known = {*frozen, *(key.removeprefix("optim/").rpartition("/")[0] for key in source.entries if key[:6] == "optim/")}
    return [
        [n for n in names if n not in known and f"param/{n}" in source.entries]
        for names in optimizer.get("names") or []
    ]


def renamed(source: TensorSource, rename: Callable[[str], str | None]) -> TensorSource:
    """Rename the tensors of `source`; drop names for which `rename` returns None, and aliases of dropped names."""
    entries = {new: entry for name, entry in source.entries.items() if (new := rename(name)) is not None}
    aliases = {}
    for name, target in source.aliases.items():
        new, stored = rename(name), rename(target)
        if new is not None and stored in entries:
            aliases[new] = stored
    return TensorSource(entries, aliases, source.meta)


def cast(source: TensorSource, dtype: str) -> TensorSource:
    """Return `source` with every floating-point tensor converted to `dtype` when the tensor is read.

    Raises:
        CheckpointError: `dtype` is not known, or has no fractions ("ckpt-dtype").
    """
    wanted = torch_dtype(dtype)
    if not wanted.is_floating_point:
        raise CheckpointError(
            f"floating-point tensors as {dtype} would lose their fractions",
            code="ckpt-dtype",
            fix="Name a floating-point type: float32, bfloat16, float16, ...",
        )

    def converted(entry: TensorEntry) -> TensorEntry:
        if "float" not in entry.dtype or entry.dtype == dtype:
            return entry
        return TensorEntry(entry.shape, dtype, lambda: entry.read().to(wanted))

    return TensorSource({name: converted(e) for name, e in source.entries.items()}, source.aliases, source.meta)


def write_checkpoint(source: TensorSource, path: str | os.PathLike[str] | CheckpointRef) -> SaveResult:
    """Write a source as a checkpoint of ours, from one process, one tensor in memory at a time."""
    readers = {TensorShard.whole(name, e.shape, e.dtype): e.read for name, e in source.entries.items()}
    return save_from(path, readers, source.meta, source.aliases)
