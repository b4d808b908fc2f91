"""What is in a directory of checkpoints, and whether one of them is whole. Reads manifests and file sizes; no torch."""

from __future__ import annotations

import os

import ds_monitor
from ds_ckpt.format import MANIFEST, MAX_MANIFEST_BYTES, Manifest, decode, peek_sequence
from ds_ckpt.protocols import Storage
from ds_ckpt.reader import Files
from ds_ckpt.storage import At, locate, open_storage
from ds_config.errors import CheckpointError

__all__ = ["find_latest", "inspect", "list_tags", "next_sequence", "prune", "read_manifest", "remove"]


def read_manifest(at: At) -> Manifest:
    """The manifest of one checkpoint, checked. Raises CheckpointError (see `format.decode`; "ckpt-not-found")."""
    data = at.storage.read(at.tag, MANIFEST, MAX_MANIFEST_BYTES + 1)
    return decode(data, f"{at.storage.where(at.tag)}/{MANIFEST}")


def inspect(path: str | os.PathLike[str] | At) -> Manifest:
    """What a checkpoint holds: its manifest, without reading tensor data."""
    return read_manifest(locate(path))


def list_tags(root: str | os.PathLike[str] | Storage) -> list[str]:
    """Tags of the complete checkpoints below `root`, oldest first. Complete: a sound manifest, every file of its size.

    One that is not complete is left out and told as the event `ckpt.skipped`.
    """
    storage = open_storage(root)
    return [tag for tag in _by_age(storage) if _complete(storage, tag)]


def find_latest(root: str | os.PathLike[str] | Storage) -> str | At | None:
    """The newest complete checkpoint below `root`, as `load` takes it; None where there is none (a first start).

    Newest is the highest sequence number in the manifests: no file names it, so none can be wrong.
    """
    storage = open_storage(root)
    for tag in reversed(_by_age(storage)):
        if _complete(storage, tag):
            return storage.where(tag) if isinstance(root, str | os.PathLike) else At(storage, tag)
    return None


def next_sequence(storage: Storage) -> int:
    """One more than the highest sequence number below the root, damaged checkpoints included."""
    return 1 + max((peek_sequence(storage.read(tag, MANIFEST, 256)) for tag in storage.tags()), default=0)


def remove(path: str | os.PathLike[str] | At) -> None:
    """Delete one checkpoint. Readers see all of it or none."""
    at = locate(path)
    at.storage.remove(at.tag)


def prune(root: str | os.PathLike[str] | Storage, keep: int) -> list[str]:
    """Remove all but the `keep` newest complete checkpoints below `root`; the removed tags, oldest first.

    Checkpoints that are not complete are not counted and not touched.
    """
    if keep < 1:
        raise CheckpointError(
            f"keep is {keep}; the newest checkpoint always stays", code="ckpt-keep", fix="Use 1 or more."
        )
    storage = open_storage(root)
    old = list_tags(storage)[:-keep]
    for tag in old:
        storage.remove(tag)
    return old


def _by_age(storage: Storage) -> list[str]:
    return [tag for _, tag in sorted((peek_sequence(storage.read(tag, MANIFEST, 256)), tag) for tag in storage.tags())]


def _complete(storage: Storage, tag: str) -> bool:
    try:
        manifest = read_manifest(At(storage, tag))
        with Files(storage, tag, manifest) as files:
            for index in range(len(manifest.files)):
                files.get(index)
    except CheckpointError as error:
        ds_monitor.event("ckpt.skipped", checkpoint=storage.where(tag), why=error.message, code=error.code)
        return False
    return True
