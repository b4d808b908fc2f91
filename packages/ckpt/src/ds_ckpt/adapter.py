"""Checkpoints of adapters only, tied to the frozen base they were trained on by its hash.

The base is hashed as logical tensors (name, dtype, shape, bytes; names sorted), so its layout and file format do not matter.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from torch import Tensor

from ds_ckpt.checkpoint_list import inspect
from ds_ckpt.checkpoint_loader import load
from ds_ckpt.coordinator import Coordinator
from ds_ckpt.jsontext import Json
from ds_ckpt.local_storage import CheckpointRef
from ds_ckpt.save_job import SaveResult, save
from ds_ckpt.shard_tensors import byte_view, dtype_name, full_shards
from ds_config.errors import CheckpointError

__all__ = ["base_hash", "load_adapter", "save_adapter"]

_KEY = "base_sha256"


def base_hash(base: Mapping[str, Tensor]) -> str:
    """Hash tensors and their names, dtypes and shapes with SHA-256, in the order of the names.

    Cost: one pass over the bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(base):
        tensor = base[name]
        digest.update(f"{name}\0{dtype_name(tensor.dtype)}\0{tuple(tensor.shape)}\0".encode())
        digest.update(byte_view(tensor))
    return digest.hexdigest()


def save_adapter(
    path: str | os.PathLike[str] | CheckpointRef,
    adapter: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    meta: Mapping[str, Json],
) -> SaveResult:
    """Write the adapter's tensors and the hash of the base. Every rank must hold both completely."""
    return save(path, full_shards(dict(adapter)), {**meta, _KEY: base_hash(base)})


def load_adapter(
    path: str | os.PathLike[str] | CheckpointRef, adapter: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> dict[str, Json]:
    """Fill the adapter's tensors in place and return the meta.

    Raises:
        CheckpointError: "ckpt-base-differs": the adapter was trained on another base than that of a rank; on every rank.
    """

    def compare() -> None:
        saved, digest = inspect(path).meta.get(_KEY), base_hash(base)
        if saved != digest:
            raise CheckpointError(
                f"the adapter in {path} belongs to a base with SHA-256 {saved}, this base has {digest}",
                code="ckpt-base-differs",
                fix="Load the base it was trained on, in the same dtype.",
            )

    ranks = Coordinator()
    ranks.settle(compare)
    meta = load(path, full_shards(dict(adapter)), group=ranks)
    return {key: value for key, value in meta.items() if key != _KEY}
