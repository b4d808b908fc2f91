"""What is in a directory of checkpoints, and whether one of them is whole. Reads manifests and file sizes; no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import ds_monitor
from ds_ckpt.checkpoint_index import CheckpointIndex, Leaf, LeafEntry, decode_index, decode_leaf
from ds_ckpt.file_reads import Files
from ds_ckpt.format import MANIFEST, MAX_MANIFEST_BYTES, MAX_SEQUENCE, decode, peek_sequence, version_of
from ds_ckpt.local_storage import CheckpointRef, locate, open_storage
from ds_ckpt.manifest_merge import join, select
from ds_ckpt.protocols import CheckpointStorage
from ds_ckpt.records import FileRecord, Manifest
from ds_comm.placement import TensorShard
from ds_config.errors import CheckpointError

__all__ = [
    "collect",
    "find_latest",
    "hold_newest",
    "inspect",
    "is_complete",
    "list_tags",
    "newest_tag",
    "next_sequence",
    "prune",
    "read_for",
    "read_manifest",
    "read_top",
    "remove",
    "resolve",
    "shared_files",
]

_THREADS: Final = 8
_LEFTOVER_S: Final = 86_400.0  # of a save that never ended: a file that nothing refers to, and that is older
_LOOKS: Final = 100  # at a root whose checkpoints come and go
_PLAUSIBLE: Final = 10**15  # a save each millisecond for 30,000 years


def read_top(at: CheckpointRef) -> Manifest | CheckpointIndex:
    """Read and check `manifest.json` of a checkpoint: the whole manifest in version 1, the index in version 2.

    Raises:
        CheckpointError: see `format.decode`; "ckpt-not-found".
    """
    where = f"{at.storage.where(at.tag)}/{MANIFEST}"
    data = at.storage.read(at.tag, MANIFEST, MAX_MANIFEST_BYTES + 1)
    return decode_index(data, where) if version_of(data, where) == 2 else decode(data, where)


def read_manifest(at: CheckpointRef) -> Manifest:
    """Read and check the whole manifest of a checkpoint, with every leaf.

    Raises CheckpointError as `read_top`.
    """
    top = read_top(at)
    return top if isinstance(top, Manifest) else join(top, _leaves(at, top, top.leaves), whole=True)


def read_for(at: CheckpointRef, shards: Sequence[TensorShard]) -> Manifest:
    """Read the manifest of a checkpoint with at least the pieces that `shards` need.

    Memory grows with the shards, not with the checkpoint.

    Raises:
        CheckpointError: as `read_top`.
    """
    return resolve(at, read_top(at), shards)


def resolve(at: CheckpointRef, top: Manifest | CheckpointIndex, shards: Sequence[TensorShard]) -> Manifest:
    """`read_for`, of what `read_top` returned."""
    return top if isinstance(top, Manifest) else join(top, _leaves(at, top, select(top, shards)), whole=False)


def _leaves(at: CheckpointRef, index: CheckpointIndex, entries: Sequence[LeafEntry]) -> list[Leaf]:
    def one(entry: LeafEntry) -> Leaf:
        data = at.storage.read(at.tag, entry.name, entry.nbytes + 1)
        return decode_leaf(data, entry, index, f"{at.storage.where(at.tag)}/{entry.name}")

    if len(entries) < 2:
        return [one(entry) for entry in entries]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ds-ckpt-leaf") as pool:
        return list(pool.map(one, entries))


def inspect(path: str | os.PathLike[str] | CheckpointRef) -> Manifest:
    """Return the manifest of a checkpoint, without reading tensor data."""
    return read_manifest(locate(path))


def list_tags(root: str | os.PathLike[str] | CheckpointStorage) -> list[str]:
    """Tags of the complete checkpoints below `root`, oldest first. Complete: a sound manifest, every file of its size.

    One that is not complete is left out and reported as the event `ckpt.skipped`.
    """
    storage = open_storage(root)
    return [tag for tag in _by_age(storage) if _complete(storage, tag)]


def find_latest(root: str | os.PathLike[str] | CheckpointStorage) -> str | CheckpointRef | None:
    """Find the newest complete checkpoint below `root`, in the form that `load` takes; None where there is none.

    There is none at a first start. Newest is the highest sequence number in the manifests: no file names the newest, so
    no
    such file can be wrong.
    """
    storage = open_storage(root)
    tag = newest_tag(storage)
    if tag is None:
        return None
    return storage.where(tag) if isinstance(root, str | os.PathLike) else CheckpointRef(storage, tag)


def is_complete(path: str | os.PathLike[str] | CheckpointRef) -> bool:
    """Whether a checkpoint has a sound manifest and every file of its size."""
    at = locate(path)
    return _complete(at.storage, at.tag)


def next_sequence(storage: CheckpointStorage) -> int:
    """Return the highest sequence number below the root plus 1, damaged checkpoints included.

    A number that no series of saves reaches counts only from a manifest that is sound: what damage or another program wrote there
    would push all later saves beyond what readers take.

    Raises:
        CheckpointError: "ckpt-sequence": a sound checkpoint has the highest number there is.
    """
    return 1 + max((_plausible(storage, number, tag) for number, tag in _numbers(storage)), default=0)


def _plausible(storage: CheckpointStorage, number: int, tag: str) -> int:
    if number < _PLAUSIBLE:
        return number
    try:
        read_top(CheckpointRef(storage, tag))
    except CheckpointError as error:
        ds_monitor.event("ckpt.skipped", checkpoint=storage.where(tag), why=error.message, code=error.code)
        return 0
    if number >= MAX_SEQUENCE:
        raise CheckpointError(
            f"{storage.where(tag)} has the sequence number {number}, the highest there is; no later save can be newer",
            code="ckpt-sequence",
            fix="Move that checkpoint elsewhere, or save into another directory.",
        )
    return number


def newest_tag(storage: CheckpointStorage) -> str | None:
    """Return the tag of the newest complete checkpoint; None where there is none.

    While another job saves and removes, a list is old before it is read: where nothing of it is complete, it is made again until it
    no longer changes.
    """
    before: list[str] | None = None
    for _ in range(_LOOKS):
        tags = _by_age(storage)
        found = next((tag for tag in reversed(tags) if _complete(storage, tag)), None)
        if found is not None or tags == before:
            return found
        before = tags
    return None


def hold_newest(
    root: str | os.PathLike[str] | CheckpointStorage, seconds: float
) -> tuple[str | None, Callable[[], None]]:
    """Return the tag of the newest complete checkpoint below `root` with a read lease on it, and the function that ends the lease.

    Between the look and the lease another job may remove what was newest: then there is a newer one, and that is taken.

    Args:
        seconds: After which the lease ends by itself.
    """
    storage = open_storage(root)
    for _ in range(_LOOKS):
        tag = newest_tag(storage)
        if tag is None:
            break
        release = storage.hold(tag, seconds)
        if _complete(storage, tag):
            return tag, release
        release()
    return None, lambda: None


def remove(path: str | os.PathLike[str] | CheckpointRef) -> None:
    """Delete one checkpoint, and the blocks that no other refers to. Readers see all of it or none.

    Raises:
        CheckpointError: "ckpt-in-use": it is being read.
    """
    at = locate(path)
    if at.tag in at.storage.tags_in_use():
        raise CheckpointError(
            f"somebody reads {at.storage.where(at.tag)}",
            code="ckpt-in-use",
            fix="Remove it when the load is over; what a reader that died left ends by itself within the hour.",
        )
    shared = shared_files(at)
    at.storage.remove(at.tag)
    collect(at.storage, shared)


def prune(root: str | os.PathLike[str] | CheckpointStorage, keep: int) -> list[str]:
    """Remove all but the `keep` newest complete checkpoints below `root`; the removed tags, oldest first.

    Checkpoints that are not complete are not counted and not touched. One that is being read stays until the next time. Blocks that a
    checkpoint refers to stay as long as it does.
    """
    if keep < 1:
        raise CheckpointError(
            f"keep is {keep}; the newest checkpoint always stays", code="ckpt-keep", fix="Use 1 or more."
        )
    storage = open_storage(root)
    in_use = storage.tags_in_use()
    old = [tag for tag in list_tags(storage)[:-keep] if tag not in in_use]
    free: set[str] = set()
    removed = []
    for tag in old:
        if tag in storage.tags_in_use():  # a reader came since the list was made
            continue
        free |= shared_files(CheckpointRef(storage, tag))
        storage.remove(tag)
        removed.append(tag)
    collect(storage, free)
    return removed


def shared_files(at: CheckpointRef) -> set[str]:
    """Return the shared files, beside the checkpoints, that `at` refers to; none when there is no such checkpoint.

    Raises:
        CheckpointError: the manifest cannot be read, so the files are not known.
    """
    try:
        top = read_top(at)
    except CheckpointError as error:
        if error.code == "ckpt-not-found":
            return set()
        raise
    if isinstance(top, Manifest):
        return set()
    return {name for leaf in top.leaves for name, _, shared in leaf.files if shared}


def collect(storage: CheckpointStorage, free: set[str]) -> None:
    """Remove files beside the checkpoints that nothing refers to: those of `free`, and what was left a day ago.

    Where a manifest cannot be read, nothing is removed: it may refer to anything.
    """
    there = storage.shared()
    if not there:
        return
    try:
        used = {name for tag in storage.tags() for name in shared_files(CheckpointRef(storage, tag))}
    except CheckpointError as error:
        ds_monitor.event("ckpt.kept", why=error.message)
        return
    storage.remove_shared([name for name, age in there if name not in used and (name in free or age > _LEFTOVER_S)])


def _by_age(storage: CheckpointStorage) -> list[str]:
    return [tag for _, tag in sorted(_numbers(storage))]


def _numbers(storage: CheckpointStorage) -> list[tuple[int, str]]:
    """List sequence number and tag of the checkpoints below a root, without those that are being removed or are no files."""
    out = []
    for tag in storage.tags():
        try:
            out.append((peek_sequence(storage.read(tag, MANIFEST, 256)), tag))
        except CheckpointError as error:
            ds_monitor.event("ckpt.skipped", checkpoint=storage.where(tag), why=error.message, code=error.code)
    return out


def _complete(storage: CheckpointStorage, tag: str) -> bool:
    try:
        top = read_top(CheckpointRef(storage, tag))
        records = top.files if isinstance(top, Manifest) else _data_files(top)
        with Files(storage, tag, records, direct=False) as files:
            for index in range(len(records)):
                files.check(index)
    except CheckpointError as error:
        ds_monitor.event("ckpt.skipped", checkpoint=storage.where(tag), why=error.message, code=error.code)
        return False
    return True


def _data_files(index: CheckpointIndex) -> tuple[FileRecord, ...]:
    """List every file of a checkpoint whose size can be checked: the leaves and the files that the leaves need."""
    leaves = [FileRecord(leaf.name, leaf.nbytes, 0, "") for leaf in index.leaves]
    data = dict.fromkeys(file for leaf in index.leaves for file in leaf.files)
    return (*leaves, *(FileRecord(name, nbytes, 0, "", shared) for name, nbytes, shared in data))
