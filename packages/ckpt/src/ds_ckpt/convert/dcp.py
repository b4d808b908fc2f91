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
from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ds_ckpt.convert.pickled import require_pickle
from ds_ckpt.convert.tensor_source import TensorEntry, TensorSource, foreign_reader
from ds_ckpt.shard_tensors import dtype_name
from ds_config.errors import CheckpointError

__all__ = ["open_dcp", "write_dcp"]

_METADATA: Final = ".metadata"
_OPTIM: Final = ("optim.state.", "optimizer.state.")
_MODEL: Final = "model."
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
        if not Path(where, name).is_file():
            raise CheckpointError(f"{where}/{name} is missing", code="ckpt-not-found", fix="Complete the directory.")
    return metadata


@foreign_reader
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
    prefix = _prefix(tensors)
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


def _theirs(name: str) -> str | None:
    kind, _, rest = name.partition("/")
    if kind == "optim":
        param, _, state = rest.rpartition("/")
        return f"{_OPTIM[0]}{param}.{state}"
    return rest if kind in ("param", "buffer") else None


def _prefix(keys: Collection[str]) -> str:
    """Return what a module's names begin with where the directory holds `{"model": ..., "optim": ...}`.

    A module may have names that begin so itself: its optimizer's do, too, then, or others of it do not.
    """
    names = [key for key in keys if not key.startswith(_OPTIM)]
    trained = {key.partition("state.")[2] for key in keys if key.startswith(_OPTIM)}
    own = any(name.startswith(_MODEL) for name in trained)
    return _MODEL if names and all(name.startswith(_MODEL) for name in names) and not own else ""


def _read(root: Path, key: str, value: TensorStorageMetadata) -> Tensor:
    out = torch.empty(value.size, dtype=value.properties.dtype, device="cpu")
    try:
        dcp.load({key: out}, storage_reader=_SafeDcpReader(root), no_dist=True)
    except dcp.CheckpointException as error:  # of this one process; it is no Exception
        raise next(iter(error.failures.values()))[0] from error
    return out


def write_dcp(source: TensorSource, out: str | os.PathLike[str], *, optimizer: bool = True) -> list[str]:
    """Write `source` as a DCP directory that `torch.distributed.checkpoint.load` reads at any world size.

    Returns: Names of tensors that have no place in such a directory, which were not written.
    Raises:
        CheckpointError: "ckpt-target-exists"; "ckpt-foreign": two tensors would have one name there, or a state's name has a point.
    Cost: all tensors in host memory at once: DCP has no streaming interface.
    """
    root = Path(out)
    if root.exists() and any(root.iterdir()):
        raise CheckpointError(f"{root} is not empty", code="ckpt-target-exists", fix="Write into a new directory.")
    keys = {name: key for name in source.entries if (key := _theirs(name)) is not None}
    count = Counter(keys.values())
    back = {name: f"param/{name.removeprefix('buffer/')}" if name.startswith("buffer/") else name for name in keys}
    if wrong := sorted(name for name, key in keys.items() if count[key] > 1 or _ours(key, "") != back[name]):
        raise CheckpointError(
            f"{', '.join(wrong[:4])} cannot be told from other tensors by their names in a DCP directory",
            code="ckpt-foreign",
            fix="Rename them.",
        )
    state = {
        key: source.entries[name].read() for name, key in keys.items() if optimizer or not name.startswith("optim/")
    }
    for alias, target in source.aliases.items():
        if alias.startswith("param/"):
            state[alias.removeprefix("param/")] = state[target.removeprefix("param/")]
    dcp.save(state, storage_writer=dcp.FileSystemWriter(root), no_dist=True)
    return sorted(source.entries.keys() - keys.keys())
