"""Checkpoints as directories of a file system.

The draft is `.tmp-<tag>-<token>` beside the tag; files and directories are synced, then one rename publishes it. An older
checkpoint of the same tag is renamed to `.old-<tag>` for the moment between two renames, and readers look there when the
tag is gone. A draft is locked by its owner (flock on the directory), so the next save can tell a crashed draft, which it
removes, from one that is being written. Locks of network file systems often end at the host: the token says on which host a draft
was begun, and that of another one is a leftover only when nothing has touched it for a day.

A root may lie in a folder that others write to. No link leads out of it: neither a tag, nor a file of one, nor the folders beside the
tags is followed to another place, and what was not made here is never removed: files that a program puts into the folder of a
checkpoint stay in it when it is saved again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

import ds_monitor
from ds_ckpt.format import MANIFEST
from ds_ckpt.local_files import Disk, LocalWriteFile, no_file, open_to_read
from ds_ckpt.manifest_owner import has_manifest, refuse_foreign
from ds_ckpt.protocols import SHARED, Draft, ReadFile, WriteFile, not_found, put
from ds_ckpt.read_leases import READERS, held_tags, hold_name
from ds_config.errors import CheckpointError
from ds_config.regular_file import leads_out, read_regular

__all__ = ["REPLACED", "Disk", "LocalDraft", "LocalStorage", "link_others", "new_token"]

_TMP: Final = ".tmp-"
_OLD: Final = ".old-"
_LEFTOVER_S: Final = 86_400.0  # of another host: a save that goes on writes more often than this
_LOCK_TRIALS: Final = (
    200  # of 10 ms: another save of this root looks at a draft for as long as it takes to remove an empty folder
)
_TOKEN = re.compile(r"[0-9a-f]{16}([0-9a-f]{8})")
_REMOVED: Final = f"{_TMP}removed-"
_FILES = re.compile(
    r"data-\d+\.safetensors|leaf-\d+\.json|blocks-\d+-[0-9a-f]+\.bin|(?:bf16_|fp16_)?(?:zero_pp_rank|mp_rank|layer|expp_rank)_\d.*_states\.pt"
)
REPLACED: Final = "replaced"
"""In the draft of a folder in DeepSpeed's layout: the older one of that tag, between two renames."""
_SUMS: Final = "checksums.json"  # beside files in DeepSpeed's layout


def new_token() -> str:
    """Generate a unique name for a draft, with a mark of this host at its end."""
    return secrets.token_hex(8) + _host_mark()


def _host_mark() -> str:
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


class LocalDraft:
    """A directory beside its place, renamed when it is complete."""

    def __init__(self, storage: LocalStorage, tag: str, token: str) -> None:
        self._storage, self._disk, self._tag, self._token = storage, storage.disk, tag, token
        self._path = os.path.join(storage.root, f"{_TMP}{tag}-{token}")
        self._lock, self._is_part = -1, False

    def file_name(self, rank: int) -> str:
        return f"data-{rank:05d}.safetensors"

    def leaf_name(self, rank: int) -> str:
        return f"leaf-{rank:05d}.json"

    def blocks_name(self, rank: int) -> str:
        return f"blocks-{rank:05d}-{self._token}.bin"

    def create(self) -> None:
        root = self._storage.root
        self._disk.make_directory(root)
        self._storage.recover()
        target = os.path.join(root, self._tag)
        if _is_something_else(target):
            raise CheckpointError(
                f"{target} exists and is not a folder; saving there would delete it",
                code="ckpt-target-exists",
                fix="Choose another directory, or move what is there.",
            )
        if os.path.isfile(manifest := os.path.join(target, MANIFEST)):
            refuse_foreign(target, partial(read_regular, manifest))
        self.make_locked()

    def make_locked(self) -> None:
        """Make the folder of the draft and lock it, once more where another save took it for a leftover before it was locked."""
        for _ in range(_LOCK_TRIALS):
            self._disk.make_directory(self._path)
            try:
                fd = self._disk.lock(self._path)
            except (BlockingIOError, FileNotFoundError):
                time.sleep(0.01)
                continue
            if fd < 0 or _is_open(fd, self._path):
                self._lock = fd
                return
            os.close(fd)
        raise CheckpointError(
            f"{self._path} is locked or removed by another save as soon as it is made",
            code="ckpt-io",
            fix="Let each job save into a directory of its own.",
        )

    def write_file(self, name: str, nbytes: int) -> WriteFile:
        return LocalWriteFile(self._disk, self.data_path(name), nbytes)

    def data_path(self, name: str) -> str:
        """Return the path for the data file `name` of the draft.

        Raises CheckpointError "ckpt-not-shared": this rank does not see the draft.
        """
        if not os.path.isdir(self._path):
            raise CheckpointError(
                f"this rank does not see {self._path}, which rank 0 made",
                code="ckpt-not-shared",
                fix="Save into a directory that all ranks share.",
            )
        return os.path.join(self._path, name)

    def write_shared(self, name: str) -> WriteFile:
        folder = os.path.join(self._storage.root, SHARED)
        if os.path.islink(folder):
            raise _outside(folder)
        self._disk.make_directory(folder)
        return LocalWriteFile(self._disk, os.path.join(folder, name), 0)

    def commit(self, manifest: bytes) -> None:
        put(self, MANIFEST, manifest)
        self._publish()

    def commit_part(self) -> None:
        """Publish the files as they are: those of a checkpoint whose manifest lies in another rank's directory."""
        self._publish()
        self._is_part = True

    def _publish(self) -> None:
        disk, root = self._disk, self._storage.root
        link_others(os.path.join(root, self._tag), self._path, disk)
        disk.sync_directory(self._path)
        if os.path.isdir(shared := os.path.join(root, SHARED)):
            disk.sync_directory(shared)
        target, aside = os.path.join(root, self._tag), os.path.join(root, _OLD + self._tag)
        replaced = os.path.lexists(target)
        if replaced:
            disk.rename(target, aside)
        disk.rename(self._path, target)
        disk.sync_directory(root)
        self.unlock()
        if replaced:
            try:
                disk.remove_tree(aside)
            except OSError as error:  # the save is done; the next one into this root tries again
                ds_monitor.event("ckpt.leftover", path=aside, why=str(error))

    def abort(self) -> None:
        # Also undoes a commit that failed half way: the older checkpoint of this tag returns.
        try:
            if os.path.isdir(self._path):
                self._disk.remove_tree(self._path)
            if self._is_part:  # its manifest was not published
                self._disk.remove_tree(os.path.join(self._storage.root, self._tag))
            self._storage.put_back()
            self._storage.remove_shared([name for name, _ in self._storage.shared() if self._token in name])
        finally:
            self.unlock()

    def unlock(self) -> None:
        if self._lock >= 0:
            fd, self._lock = self._lock, -1
            os.close(fd)


class LocalStorage:
    """Checkpoints as directories below `root`, on any file system with an atomic rename."""

    def __init__(self, root: str | os.PathLike[str], disk: Disk | None = None) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.disk = disk or Disk()

    def tags(self) -> list[str]:
        try:
            names = os.listdir(self.root)
        except (FileNotFoundError, NotADirectoryError):
            return []
        candidates = {n.removeprefix(_OLD) for n in names if not n.startswith(".") or n.startswith(_OLD)}
        return [t for t in candidates if self._is_checkpoint(self._directory(t))]

    def _is_checkpoint(self, path: str) -> bool:
        if not has_manifest(path):
            return False
        if os.path.islink(
            path
        ):  # another name of a checkpoint, or the name of another folder's: never one of this root
            if leads_out(self.root, os.path.basename(path)):
                ds_monitor.event("ckpt.skipped", checkpoint=path, why="a link out of its folder", code="ckpt-outside")
            return False
        return True

    def read(self, tag: str, name: str, limit: int) -> bytes:
        try:
            return read_regular(self._file(tag, name), limit)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise not_found(self.where(tag), name) from error
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENXIO):  # ENXIO: a socket
                raise no_file(f"{self.where(tag)}/{name}") from error
            raise

    def open(self, tag: str, name: str) -> ReadFile:
        try:
            return open_to_read(self._file(tag, name), f"{self.where(tag)}/{name}")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise not_found(self.where(tag), name) from error

    def _file(self, tag: str, name: str) -> str:
        """Return the path of a file of a checkpoint. Raises CheckpointError "ckpt-outside": a link out of its folder."""
        folder = self._directory(tag)
        path = os.path.join(folder, name)
        if os.path.islink(path) and leads_out(folder, name):
            raise _outside(path)
        return path

    def draft(self, tag: str, token: str) -> Draft:
        return LocalDraft(self, tag, token)

    def remove(self, tag: str) -> None:
        # Out of sight first: a crash while files go leaves no checkpoint that looks whole.
        path, hidden = os.path.join(self.root, tag), os.path.join(self.root, f"{_REMOVED}{tag}")
        if os.path.lexists(hidden):
            self.disk.remove_tree(hidden)
        self.disk.rename(path, hidden)
        self.disk.remove_tree(hidden)

    def where(self, tag: str) -> str:
        return os.path.join(self.root, tag)

    def shared(self) -> list[tuple[str, float]]:
        folder = os.path.join(self.root, SHARED)
        if os.path.islink(folder):  # what is behind it belongs to somebody else
            return []
        try:
            return [
                (e.name, time.time() - e.stat(follow_symlinks=False).st_mtime)
                for e in os.scandir(folder)
                if _FILES.fullmatch(e.name)
            ]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove_shared(self, names: Collection[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.root, SHARED, name))

    def hold(self, tag: str, seconds: float) -> Callable[[], None]:
        path = os.path.join(self.root, READERS, hold_name(tag, seconds))
        try:
            if os.path.islink(os.path.dirname(path)):
                raise OSError(errno.ELOOP, "a link is not followed", os.path.dirname(path))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
        except OSError as error:
            ds_monitor.event("ckpt.not_held", checkpoint=self.where(tag), why=str(error))
            return lambda: None

        def over() -> None:
            with contextlib.suppress(OSError):  # it ends by itself
                os.unlink(path)
                os.rmdir(os.path.dirname(path))  # when it was the last

        return over

    def tags_in_use(self) -> set[str]:
        try:
            return held_tags(os.listdir(os.path.join(self.root, READERS)))
        except OSError:
            return set()

    def recover(self) -> None:
        """Finish or undo what a crash left: overwritten checkpoints, drafts whose owner has ended."""
        self.put_back()
        for name in os.listdir(self.root):
            path = os.path.join(self.root, name)
            if name.startswith(_TMP) and os.path.isdir(path) and not os.path.islink(path):
                self._remove_if_dead(path)

    def put_back(self) -> None:
        """Give a checkpoint that stepped aside its name again, or remove it when its successor is in place."""
        for name in os.listdir(self.root) if os.path.isdir(self.root) else []:
            if not name.startswith(_OLD):
                continue
            tag = name.removeprefix(_OLD)
            aside, target = os.path.join(self.root, name), os.path.join(self.root, tag)
            replacing = not os.path.lexists(target) and any(
                n.startswith(f"{_TMP}{tag}-") for n in os.listdir(self.root)
            )
            if not replacing and not _has_only_our_files(aside):
                continue
            if os.path.lexists(target):
                self.disk.remove_tree(aside)
            else:
                self.disk.rename(aside, target)

    def _remove_if_dead(self, path: str) -> None:
        begun = _TOKEN.fullmatch(path.rpartition("-")[2])
        if begun is None and not _has_only_our_files(path):
            return  # of somebody who begins names so, too
        if begun is not None and begun[1] != _host_mark() and time.time() - _touched_s(path) < _LEFTOVER_S:
            return
        try:
            fd = self.disk.lock(path)
        except (BlockingIOError, FileNotFoundError):
            return  # its owner runs, or has just finished
        if fd < 0:
            return  # no locks here: better a leftover than someone's draft
        try:
            self._finish(path)
            self.disk.remove_tree(path)
        finally:
            os.close(fd)

    def _finish(self, path: str) -> None:
        """Put a folder at its place whose owner ended between the two renames that replace an older one."""
        tag = os.path.basename(path).removeprefix(_TMP).rpartition("-")[0]
        new, target = os.path.join(path, tag), os.path.join(self.root, tag)
        if os.path.isdir(os.path.join(path, REPLACED)) and os.path.isdir(new) and not os.path.lexists(target):
            self.disk.rename(new, target)

    def _directory(self, tag: str) -> str:
        path = os.path.join(self.root, tag)
        aside = os.path.join(self.root, _OLD + tag)
        return aside if not os.path.lexists(path) and os.path.isdir(aside) else path


def _touched_s(path: str) -> float:
    """Return when a draft or any of its files was last written; now for a draft that is being removed."""
    try:
        return max(os.stat(each).st_mtime for each in (path, *(entry.path for entry in os.scandir(path))))
    except FileNotFoundError:
        return time.time()


def _is_something_else(path: str) -> bool:
    return os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path))


def link_others(old: str, new: str, disk: Disk | None = None) -> None:
    """Link into the folder `new` what is no file of a checkpoint in `old`, which it is to replace, and not in `new`."""
    link, names = (disk or Disk()).link, os.listdir(old) if os.path.isdir(old) else []
    universal = any(
        name.endswith("_model_states.pt") for name in names
    )  # the layout, whose folder `zero` has the values
    for name in names:
        path, place = os.path.join(old, name), os.path.join(new, name)
        theirs = name == _SUMS or (name == "zero" and universal)
        ours = _FILES.fullmatch(name) or (name == MANIFEST and has_manifest(old))
        if ours or theirs or os.path.lexists(place):
            continue
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.copytree(path, place, symlinks=True, copy_function=link)
        else:
            link(path, place)


def _has_only_our_files(path: str) -> bool:
    """Whether a folder is a checkpoint, or what a removal that was cut short left of one."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    return has_manifest(path) or all(_FILES.fullmatch(name) for name in os.listdir(path))


def _is_open(fd: int, path: str) -> bool:
    """Whether the descriptor is of what `path` names now."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _outside(path: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a link to {os.path.realpath(path)}, outside of its folder",
        code="ckpt-outside",
        fix="Put the files themselves there, or give the folder that the link leads to.",
    )
