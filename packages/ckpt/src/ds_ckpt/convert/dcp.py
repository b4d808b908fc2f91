"""torch.distributed.checkpoint directories, both ways.

A DCP directory has a pickled `.metadata`; it is read by an unpickler that knows the classes such a file consists of
and refuses everything else, and only with `allow_pickle`. Entries that are pickled objects instead of tensors (a scheduler's
state, say) are not read: they are named in the meta under `left_out`.

Names: `param/<n>` and `buffer/<n>` are `<n>`, `optim/<n>/<state>` is `optim.state.<n>.<state>`, which is how torch's
`get_model_state_dict` and `get_optimizer_state_dict` name them once flattened.
"""

from __future__ import annotations

import os
import pickle
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ds_ckpt.convert.pickled import require_pickle
from ds_ckpt.convert.tensor_source import TensorEntry, TensorSource
from ds_ckpt.shard_tensors import dtype_name
from ds_config.errors import CheckpointError

__all__ = ["open_dcp", "write_dcp"]

_METADATA: Final = ".metadata"
_OPTIM: Final = ("optim.state.", "optimizer.state.")
_ALLOWED: Final = frozenset(
    {
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        "torch.Size",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
        "collections.OrderedDict",
        "builtins.set",
    }
)


class _Careful(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in _ALLOWED or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants {module}.{name}")


class _SafeDcpReader(dcp.FileSystemReader):
    """torch's reader with the careful unpickler."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / _METADATA, "rb") as file:
            return _metadata(file, str(self.path))


def _metadata(file: IO[bytes], where: str) -> Metadata:
    try:
        metadata = _Careful(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}/{_METADATA} cannot be read safely: {error}",
            code="ckpt-foreign",
            fix="It is damaged, or holds objects that no DCP directory needs.",
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{where}/{_METADATA} is no metadata", code="ckpt-foreign", fix="Give a DCP directory.")
    for place in (metadata.storage_data or {}).values():
        name = str(place.relative_path)
        if "/" in name or "\\" in name or name.startswith("."):
            raise CheckpointError(
                f"{where}/{_METADATA} names the file {name!r}, outside", code="ckpt-foreign", fix="Do not use it."
            )
    return metadata


def open_dcp(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> TensorSource:
    """Open the tensors of a DCP directory under the names of this package.

    Raises:
        UnsupportedError: "ckpt-pickle" without `allow_pickle`.
        CheckpointError: "ckpt-not-found", "ckpt-foreign".
    """
    require_pickle(allow_pickle, f"the DCP directory {path}")
    root = Path(path)
    if not (root / _METADATA).is_file():
        raise CheckpointError(f"{root} has no {_METADATA}", code="ckpt-not-found", fix="Give a DCP directory.")
    with open(root / _METADATA, "rb") as file:
        items_by_key = _metadata(file, str(root)).state_dict_metadata
    tensors = {key: value for key, value in items_by_key.items() if isinstance(value, TensorStorageMetadata)}
    prefix = "model." if any(key.startswith("model.") for key in tensors) else ""
    entries = {}
    for key, value in tensors.items():
        dtype = value.properties.dtype
        entries[_ours(key, prefix)] = TensorEntry(
            tuple(value.size), dtype_name(dtype), partial(_read, root, key, value)
        )
    return TensorSource(entries, {}, {"left_out": sorted(items_by_key.keys() - tensors.keys())})


def _ours(key: str, prefix: str) -> str:
    for start in _OPTIM:
        if key.startswith(start):
            name, _, state = key.removeprefix(start).rpartition(".")
            return f"optim/{name}/{state}"
    return f"param/{key.removeprefix(prefix)}"


def _read(root: Path, key: str, value: TensorStorageMetadata) -> Tensor:
    out = torch.empty(value.size, dtype=value.properties.dtype)
    dcp.load({key: out}, storage_reader=_SafeDcpReader(root), no_dist=True)
    return out


def write_dcp(source: TensorSource, out: str | os.PathLike[str], *, optimizer: bool = True) -> None:
    """Write `source` as a DCP directory that `torch.distributed.checkpoint.load` reads at any world size.

    Raises:
        CheckpointError: "ckpt-target-exists".
    Cost: all tensors in host memory at once: DCP has no streaming interface.
    """
    root = Path(out)
    if root.exists() and any(root.iterdir()):
        raise CheckpointError(f"{root} is not empty", code="ckpt-target-exists", fix="Write into a new directory.")
    state: dict[str, Tensor] = {}
    for name, entry in source.entries.items():
        kind, _, rest = name.partition("/")
        if kind in ("param", "buffer"):
            state[rest] = entry.read()
        elif kind == "optim" and optimizer:
            param, _, key = rest.rpartition("/")
            state[f"{_OPTIM[0]}{param}.{key}"] = entry.read()
    for alias, target in source.aliases.items():
        if alias.startswith("param/"):
            state[alias.removeprefix("param/")] = state[target.removeprefix("param/")]
    dcp.save(state, storage_writer=dcp.FileSystemWriter(root), no_dist=True)
