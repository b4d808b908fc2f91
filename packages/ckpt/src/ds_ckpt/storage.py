"""Where checkpoints live: a local directory, this process's memory, or any fsspec URL. One small protocol for the three.

Words: a *root* holds checkpoints by *tag*; a *draft* is a checkpoint under way, invisible to readers until `commit`.
Atomicity is the storage's own business:

- local: the draft is `.tmp-<tag>-<token>` beside the tag; files and directories are synced, then one rename publishes
  it. An older checkpoint of the same tag steps aside as `.old-<tag>` for the moment between two renames, and readers
  look there when the tag is gone. A draft is locked by its owner (flock on the directory), so the next save can tell a
  crashed draft, which it removes, from one that is being written.
- objects (fsspec): no rename there. Data objects get names of their own (the token), and the manifest, one atomic put,
  is the commit. What no manifest names is removed after the next commit.
- memory: a dict; the commit is one assignment.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import ds_monitor
from ds_ckpt.format import MANIFEST
from ds_config.errors import CheckpointError, UnsupportedError

__all__ = [
    "At",
    "Disk",
    "Draft",
    "LocalStorage",
    "LocalWriteFile",
    "MemoryStorage",
    "ObjectStorage",
    "ReadFile",
    "Storage",
    "WriteFile",
    "locate",
    "open_storage",
]

_TAG = re.compile(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]{0,127}")
_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_PAGE: Final = 4096
_DIRECT_BYTES: Final = 2**20  # smaller files gain nothing from bypassing the page cache
_TMP: Final = ".tmp-"
_OLD: Final = ".old-"


class WriteFile(Protocol):
    """A data file being written. `parallel` says whether offsets may come in any order and from several threads."""

    parallel: bool

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data` from byte `offset`."""

    def close(self) -> None:
        """Return when the bytes are durable."""

    def abandon(self) -> None:
        """Let go of the file without any promise about its content."""


class ReadFile(Protocol):
    """A data file being read, at any offset, from any thread."""

    nbytes: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset`; raises CheckpointError "ckpt-file-truncated" when the file ends before."""

    def close(self) -> None: ...


class Draft(Protocol):
    """A checkpoint under way. Rank 0 creates, commits and aborts; every rank writes its own files."""

    def file_name(self, rank: int) -> str: ...
    def create(self) -> None: ...
    def write_file(self, name: str, nbytes: int) -> WriteFile: ...
    def commit(self, manifest: bytes) -> None: ...
    def abort(self) -> None: ...


class Storage(Protocol):
    """Checkpoints by tag."""

    def tags(self) -> list[str]:
        """Tags that have a manifest, in no order. Whether it is a good one is for the caller to see."""

    def read(self, tag: str, name: str, limit: int) -> bytes:
        """At most `limit` first bytes of a file; raises CheckpointError "ckpt-not-found"."""

    def open(self, tag: str, name: str) -> ReadFile: ...
    def draft(self, tag: str, token: str) -> Draft: ...
    def remove(self, tag: str) -> None: ...
    def where(self, tag: str) -> str:
        """The tag as a user would write it, for messages."""


@dataclass(frozen=True, slots=True)
class At:
    """A tag in a storage object: what `save` and `load` take where a path does not say enough."""

    storage: Storage
    tag: str


def open_storage(root: str | os.PathLike[str] | Storage) -> Storage:
    """The storage of a directory or URL; a storage object is returned as it is."""
    if not isinstance(root, str | os.PathLike):
        return root
    text = os.fspath(root)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return ObjectStorage(text) if _URL.match(text) else LocalStorage(text)


def locate(path: str | os.PathLike[str] | At) -> At:
    """Split `<root>/<tag>` into a storage and a tag.

    Raises:
        CheckpointError: "ckpt-tag": the last component cannot be a tag (empty, hidden, control characters, too long).
    """
    if isinstance(path, At):
        at = path
    else:
        text = os.fspath(path).rstrip("/")
        if _URL.match(text):
            root, _, tag = text.rpartition("/")
        else:
            root, tag = os.path.split(os.path.abspath(text))
        at = At(open_storage(root), tag)
    if not _TAG.fullmatch(at.tag) or len(at.tag.encode()) > 200:
        raise CheckpointError(
            f"{at.tag!r} cannot be the name of a checkpoint",
            code="ckpt-tag",
            fix="Use 1 to 128 characters, no slash or control character, no dot in front.",
        )
    return at


class Disk:
    """The system calls a local save makes, one method each, so that a test can make any of them fail or be the last."""

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def lock(self, path: str) -> int:
        """A descriptor of the directory that holds an exclusive lock; -1 where the file system has no locks.

        Raises:
            BlockingIOError: another process holds it.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL):
                return -1
            raise
        return fd

    def open_new(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open_direct(self, path: str) -> int:
        """A second descriptor of a file, for writes that bypass the page cache; -1 where there is no such thing."""
        try:
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP):
                return -1
            raise

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserve the file's space: a full disk is known before the first write, and parallel writes need no lock."""
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                raise

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path)


class LocalWriteFile:
    """Whole pages go past the page cache where the file system lets them (O_DIRECT), the rest through it."""

    parallel = True

    def __init__(self, disk: Disk, path: str, nbytes: int) -> None:
        self._disk, self._path = disk, path
        self._fd = disk.open_new(path)
        self._direct = -1
        try:
            if nbytes >= _DIRECT_BYTES:
                disk.allocate(self._fd, nbytes)
                self._direct = disk.open_direct(path)
        except BaseException:
            self.abandon()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        pages = data.nbytes - data.nbytes % _PAGE
        if self._direct >= 0 and pages and offset % _PAGE == 0:
            done = self._put(self._direct, data[:pages], offset)
            data, offset = data[done:], offset + done
        self._put(self._fd, data, offset)

    def _put(self, fd: int, data: memoryview, offset: int) -> int:
        total = 0
        while total < data.nbytes:
            try:
                done = self._disk.write(fd, data[total:], offset + total)
            except OSError as error:
                if fd == self._direct and error.errno == errno.EINVAL:
                    return total  # memory or size that this device does not take directly: the page cache does
                raise
            if done <= 0:
                raise OSError(errno.EIO, "the device took no bytes", self._path)
            total += done
            if fd == self._direct and done % _PAGE:
                return total
        return total

    def close(self) -> None:
        try:
            self._disk.sync(self._fd)
        finally:
            fds, self._fd, self._direct = (self._fd, self._direct), -1, -1
            for fd in fds:
                if fd >= 0:
                    self._disk.close(fd)

    def abandon(self) -> None:
        fds, self._fd, self._direct = (self._fd, self._direct), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


class _LocalReadFile:
    def __init__(self, path: str, where: str) -> None:
        self._fd, self._where = os.open(path, os.O_RDONLY | os.O_CLOEXEC), where
        self.nbytes = os.fstat(self._fd).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        while buffer.nbytes:
            got = os.preadv(self._fd, [buffer], offset)
            if got <= 0:
                raise _truncated(self._where, offset, buffer.nbytes)
            buffer, offset = buffer[got:], offset + got

    def close(self) -> None:
        os.close(self._fd)


class _LocalDraft:
    def __init__(self, storage: LocalStorage, tag: str, token: str) -> None:
        self._storage, self._disk, self._tag = storage, storage.disk, tag
        self._path = os.path.join(storage.root, f"{_TMP}{tag}-{token}")
        self._lock = -1

    def file_name(self, rank: int) -> str:
        return f"data-{rank:05d}.safetensors"

    def create(self) -> None:
        root = self._storage.root
        self._disk.make_directory(root)
        self._storage.recover()
        target = os.path.join(root, self._tag)
        if _is_something_else(target):
            raise CheckpointError(
                f"{target} exists and is not a checkpoint; saving there would delete it",
                code="ckpt-target-exists",
                fix="Choose another directory, or move what is there.",
            )
        self._disk.make_directory(self._path)
        self._lock = self._disk.lock(self._path)

    def write_file(self, name: str, nbytes: int) -> WriteFile:
        if not os.path.isdir(self._path):
            raise CheckpointError(
                f"this rank does not see {self._path}, which rank 0 made",
                code="ckpt-not-shared",
                fix="Save into a directory that all ranks share.",
            )
        return LocalWriteFile(self._disk, os.path.join(self._path, name), nbytes)

    def commit(self, manifest: bytes) -> None:
        disk, root = self._disk, self._storage.root
        file = LocalWriteFile(disk, os.path.join(self._path, MANIFEST), 0)
        try:
            file.write(0, memoryview(manifest))
            file.close()
        except BaseException:
            file.abandon()
            raise
        disk.sync_directory(self._path)
        target, aside = os.path.join(root, self._tag), os.path.join(root, _OLD + self._tag)
        replaced = os.path.lexists(target)
        if replaced:
            disk.rename(target, aside)
        disk.rename(self._path, target)
        disk.sync_directory(root)
        self._unlock()
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
            self._storage.put_back()
        finally:
            self._unlock()

    def _unlock(self) -> None:
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
        found = {n.removeprefix(_OLD) for n in names if not n.startswith(".") or n.startswith(_OLD)}
        return [t for t in found if os.path.isfile(os.path.join(self._directory(t), MANIFEST))]

    def read(self, tag: str, name: str, limit: int) -> bytes:
        try:
            with open(os.path.join(self._directory(tag), name), "rb") as file:
                return file.read(limit)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise _not_found(self.where(tag), name) from error

    def open(self, tag: str, name: str) -> ReadFile:
        path = os.path.join(self._directory(tag), name)
        try:
            return _LocalReadFile(path, f"{self.where(tag)}/{name}")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise _not_found(self.where(tag), name) from error

    def draft(self, tag: str, token: str) -> Draft:
        return _LocalDraft(self, tag, token)

    def remove(self, tag: str) -> None:
        # Out of sight first: a crash while files go leaves no checkpoint that looks whole.
        path, hidden = os.path.join(self.root, tag), os.path.join(self.root, f"{_TMP}removed-{tag}")
        if os.path.isdir(hidden):
            self.disk.remove_tree(hidden)
        self.disk.rename(path, hidden)
        self.disk.remove_tree(hidden)

    def where(self, tag: str) -> str:
        return os.path.join(self.root, tag)

    def recover(self) -> None:
        """Finish or undo what a crash left: overwritten checkpoints, drafts whose owner is gone."""
        self.put_back()
        for name in os.listdir(self.root):
            path = os.path.join(self.root, name)
            if name.startswith(_TMP) and os.path.isdir(path):
                self._remove_if_dead(path)

    def put_back(self) -> None:
        """Give a checkpoint that stepped aside its name again, or remove it when its successor is in place."""
        for name in os.listdir(self.root) if os.path.isdir(self.root) else []:
            if not name.startswith(_OLD):
                continue
            aside, target = os.path.join(self.root, name), os.path.join(self.root, name.removeprefix(_OLD))
            if os.path.lexists(target):
                self.disk.remove_tree(aside)
            else:
                self.disk.rename(aside, target)

    def _remove_if_dead(self, path: str) -> None:
        try:
            fd = self.disk.lock(path)
        except (BlockingIOError, FileNotFoundError):
            return  # its owner lives, or has just finished
        if fd < 0:
            return  # no locks here: better a leftover than someone's draft
        try:
            self.disk.remove_tree(path)
        finally:
            os.close(fd)

    def _directory(self, tag: str) -> str:
        path = os.path.join(self.root, tag)
        aside = os.path.join(self.root, _OLD + tag)
        return aside if not os.path.lexists(path) and os.path.isdir(aside) else path


class _MemoryFile:
    parallel = True

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + data.nbytes] = data

    def close(self) -> None:
        """Memory is as durable as it gets."""

    def abandon(self) -> None:
        self.data = bytearray()


class _BytesReadFile:
    def __init__(self, data: bytes | bytearray, where: str) -> None:
        self._data, self._where, self.nbytes = memoryview(data), where, len(data)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if offset + buffer.nbytes > self.nbytes:
            raise _truncated(self._where, offset, buffer.nbytes)
        buffer[:] = self._data[offset : offset + buffer.nbytes]

    def close(self) -> None:
        """Nothing is open."""


class _MemoryDraft:
    def __init__(self, storage: MemoryStorage, tag: str) -> None:
        self._storage, self._tag = storage, tag
        self._files: dict[str, _MemoryFile] = {}

    def file_name(self, rank: int) -> str:
        return f"data-{rank:05d}.safetensors"

    def create(self) -> None:
        self._files = {}

    def write_file(self, name: str, nbytes: int) -> WriteFile:
        self._files[name] = _MemoryFile(nbytes)
        return self._files[name]

    def commit(self, manifest: bytes) -> None:
        self._storage.checkpoints[self._tag] = {**{n: f.data for n, f in self._files.items()}, MANIFEST: manifest}

    def abort(self) -> None:
        self._files = {}


class MemoryStorage:
    """Checkpoints in this process's memory: for tests, and for snapshots that a disk need not see. One rank only."""

    def __init__(self) -> None:
        self.checkpoints: dict[str, dict[str, bytes | bytearray]] = {}

    def tags(self) -> list[str]:
        return list(self.checkpoints)

    def read(self, tag: str, name: str, limit: int) -> bytes:
        return bytes(self._file(tag, name)[:limit])

    def open(self, tag: str, name: str) -> ReadFile:
        return _BytesReadFile(self._file(tag, name), f"{self.where(tag)}/{name}")

    def draft(self, tag: str, token: str) -> Draft:
        return _MemoryDraft(self, tag)

    def remove(self, tag: str) -> None:
        del self.checkpoints[tag]

    def where(self, tag: str) -> str:
        return f"memory:{tag}"

    def _file(self, tag: str, name: str) -> bytes | bytearray:
        try:
            return self.checkpoints[tag][name]
        except KeyError as error:
            raise _not_found(self.where(tag), name) from error


class _ObjectWriteFile:
    parallel = False

    def __init__(self, fs: Any, path: str) -> None:
        self._file, self._at, self._path = fs.open(path, "wb"), 0, path

    def write(self, offset: int, data: memoryview) -> None:
        if offset != self._at:
            raise CheckpointError(
                f"{self._path}: a write at byte {offset} where {self._at} comes next",
                code="ckpt-storage",
                fix="Report this: objects are written in order.",
            )
        self._file.write(data)
        self._at += data.nbytes

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        # An upload that is not completed leaves no object; `discard` is what fsspec's buffered files call it.
        discard = getattr(self._file, "discard", None)
        if discard is not None:
            discard()


class _ObjectReadFile:
    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self.nbytes = int(fs.info(path)["size"])

    def read_into(self, buffer: memoryview, offset: int) -> None:
        data = self._fs.cat_file(self._path, start=offset, end=offset + buffer.nbytes) if buffer.nbytes else b""
        if len(data) != buffer.nbytes:
            raise _truncated(self._path, offset, buffer.nbytes)
        buffer[:] = data

    def close(self) -> None:
        """Ranges are separate requests; nothing is open."""


class _ObjectDraft:
    def __init__(self, storage: ObjectStorage, tag: str, token: str) -> None:
        self._storage, self._tag, self._token = storage, tag, token
        self._path = f"{storage.root}/{tag}"

    def file_name(self, rank: int) -> str:
        return f"data-{rank:05d}-{self._token}.safetensors"

    def create(self) -> None:
        self._storage.fs.makedirs(self._path, exist_ok=True)

    def write_file(self, name: str, nbytes: int) -> WriteFile:
        return _ObjectWriteFile(self._storage.fs, f"{self._path}/{name}")

    def commit(self, manifest: bytes) -> None:
        fs = self._storage.fs
        fs.pipe_file(f"{self._path}/{MANIFEST}", manifest)
        self._clean(keep_token=True)

    def abort(self) -> None:
        self._clean(keep_token=False)

    def _clean(self, *, keep_token: bool) -> None:
        # After a commit everything but this draft's objects is garbage; after an abort exactly these are.
        fs = self._storage.fs
        for path in fs.ls(self._path, detail=False, refresh=True) if fs.exists(self._path) else []:
            name = path.rsplit("/", 1)[-1]
            if name.startswith("data-") and name.endswith(f"-{self._token}.safetensors") != keep_token:
                fs.rm_file(path)


class ObjectStorage:
    """Checkpoints below an fsspec URL (`s3://bucket/run`, `memory://run`, ...). Needs the extra `fsspec`."""

    def __init__(self, url: str, **options: Any) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise UnsupportedError(
                f"{url} needs fsspec, which is not installed", code="ckpt-fsspec", fix="pip install 'ds-ckpt[fsspec]'"
            ) from error
        self.url = url.rstrip("/")
        self.fs, root = fsspec.core.url_to_fs(self.url, **options)
        self.root = root.rstrip("/")

    def tags(self) -> list[str]:
        try:
            paths = self.fs.ls(self.root, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        names = {path.rstrip("/").rsplit("/", 1)[-1] for path in paths}
        return [n for n in names if n and not n.startswith(".") and self.fs.exists(f"{self.root}/{n}/{MANIFEST}")]

    def read(self, tag: str, name: str, limit: int) -> bytes:
        path = f"{self.root}/{tag}/{name}"
        try:
            size = int(self.fs.info(path, refresh=True)["size"])
            return bytes(self.fs.cat_file(path, start=0, end=min(limit, size))) if size else b""
        except FileNotFoundError as error:
            raise _not_found(self.where(tag), name) from error

    def open(self, tag: str, name: str) -> ReadFile:
        try:
            return _ObjectReadFile(self.fs, f"{self.root}/{tag}/{name}")
        except FileNotFoundError as error:
            raise _not_found(self.where(tag), name) from error

    def draft(self, tag: str, token: str) -> Draft:
        return _ObjectDraft(self, tag, token)

    def remove(self, tag: str) -> None:
        # The manifest goes first: without it there is no checkpoint.
        self.fs.rm_file(f"{self.root}/{tag}/{MANIFEST}")
        self.fs.rm(f"{self.root}/{tag}", recursive=True)

    def where(self, tag: str) -> str:
        return f"{self.url}/{tag}"


def _is_something_else(path: str) -> bool:
    if not os.path.lexists(path) or os.path.isfile(os.path.join(path, MANIFEST)):
        return False
    return not os.path.isdir(path) or bool(os.listdir(path))


def _not_found(where: str, name: str) -> CheckpointError:
    siblings = ""
    parent = Path(where).parent
    if parent.is_dir():
        near = sorted(p.name for p in parent.iterdir() if (p / MANIFEST).is_file())[:8]
        siblings = f"; checkpoints beside it: {', '.join(near) or 'none'}"
    return CheckpointError(
        f"{where} has no {name}{siblings}",
        code="ckpt-not-found",
        fix="Give the directory of one checkpoint, as `ds_ckpt.find_latest(dir)` returns it.",
    )


def _truncated(where: str, offset: int, nbytes: int) -> CheckpointError:
    return CheckpointError(
        f"{where} ends before byte {offset + nbytes} ({nbytes} bytes were asked for at {offset})",
        code="ckpt-file-truncated",
        fix="The file was cut; use another checkpoint.",
    )
