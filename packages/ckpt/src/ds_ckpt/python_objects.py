"""Checkpoints below an fsspec URL.

Object storage has no rename. Data objects get names of their own (the token), and the manifest, one atomic put, is the
commit. What no manifest names is removed after the next commit, unless a reader has announced itself. Requests that fail are made again
(see `retrying`); what comes back short is asked for again.

A reader announces itself by an object in `.readers/`, named after the checkpoint and the time until which it is held.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import ds_monitor
from ds_ckpt.format import MANIFEST
from ds_ckpt.manifest_owner import refuse_foreign
from ds_ckpt.protocols import SHARED, Draft, ReadFile, WriteFile, not_found, truncated
from ds_ckpt.read_leases import READERS, held_tags, hold_name
from ds_ckpt.retrying import IncompleteError, RetryPolicy
from ds_ckpt.uploads import PartsFile, PlainFile, put_object
from ds_config.errors import CheckpointError, UnsupportedError

__all__ = ["ObjectStorage"]


class _ObjectReadFile:
    def __init__(self, storage: ObjectStorage, path: str) -> None:
        self._storage, self._path = storage, path
        self.nbytes = int(storage.ask(f"look at {path}", lambda fs: fs.info(path)["size"]))

    def view(self, offset: int, nbytes: int) -> memoryview:
        if not nbytes:
            return memoryview(b"")
        if offset + nbytes > self.nbytes:
            raise truncated(self._path, offset, nbytes)

        def fetch(fs: Any) -> bytes:
            data: bytes = fs.cat_file(self._path, start=offset, end=offset + nbytes)
            if len(data) != nbytes:
                raise IncompleteError(f"{len(data)} bytes came, {nbytes} were asked for")
            return data

        return memoryview(self._storage.ask(f"read bytes {offset}..{offset + nbytes} of {self._path}", fetch))

    def close(self) -> None:
        """Do nothing: ranges are separate requests, so nothing is open."""


class _ObjectDraft:
    def __init__(self, storage: ObjectStorage, tag: str, token: str) -> None:
        self._storage, self._tag, self._token = storage, tag, token
        self._path = f"{storage.root}/{tag}"

    def file_name(self, rank: int) -> str:
        return f"data-{rank:05d}-{self._token}.safetensors"

    def leaf_name(self, rank: int) -> str:
        return f"leaf-{rank:05d}-{self._token}.json"

    def blocks_name(self, rank: int) -> str:
        return f"blocks-{rank:05d}-{self._token}.bin"

    def create(self) -> None:
        if self._storage.has_object(f"{self._path}/{MANIFEST}"):
            refuse_foreign(self._storage.where(self._tag), partial(self._storage.read, self._tag, MANIFEST))
        self._storage.ask(f"make {self._path}", lambda fs: fs.makedirs(self._path, exist_ok=True))

    def write_file(self, name: str, nbytes: int) -> WriteFile:
        return self._storage.writer(f"{self._path}/{name}", nbytes)

    def write_shared(self, name: str) -> WriteFile:
        return self._storage.writer(f"{self._storage.root}/{SHARED}/{name}", 0)

    def commit(self, manifest: bytes) -> None:
        put_object(self._storage.fs, self._storage.retries, f"{self._path}/{MANIFEST}", manifest)
        try:
            if self._tag not in self._storage.tags_in_use():
                self._storage.drop(self._path, lambda name: _is_data(name) and self._token not in name)
        except (OSError, CheckpointError) as error:  # the save is done; the next one to this place tries again
            ds_monitor.event("ckpt.leftover", path=self._path, why=str(error))

    def abort(self) -> None:
        self._storage.drop(self._path, lambda name: _is_data(name) and self._token in name)
        self._storage.drop(f"{self._storage.root}/{SHARED}", lambda name: self._token in name)


def _is_data(name: str) -> bool:
    return name.startswith(("data-", "leaf-", "blocks-"))


class ObjectStorage:
    """Checkpoints below an fsspec URL (`s3://bucket/run`, `memory://run`, ...). Needs the extra `fsspec`."""

    range_bytes = 32 * 2**20  # of a request that reads; a load has four of them in memory

    def __init__(self, url: str, *, retries: RetryPolicy | None = None, **options: Any) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise UnsupportedError(
                f"{url} needs fsspec, which is not installed", code="ckpt-fsspec", fix="pip install 'ds-ckpt[fsspec]'"
            ) from error
        self.url, self.retries = url.rstrip("/"), retries or RetryPolicy()
        self.fs, root = fsspec.core.url_to_fs(self.url, **options)
        self.root = root.rstrip("/")

    def ask(self, what: str, action: Callable[[Any], Any]) -> Any:
        """Run `action` on the store and return its result.

        After a failure that passes, `action` is run again.
        """
        return self.retries(what, lambda: action(self.fs))

    def writer(self, path: str, nbytes: int) -> WriteFile:
        """Create a writer of a new object at `path`."""
        if hasattr(self.fs, "call_s3"):
            return PartsFile(self.fs, self.retries, path, nbytes)
        return PlainFile(self.fs, path)

    def names(self, path: str) -> list[tuple[str, float]]:
        """List the names below a path, with the seconds since each was written (0 where the store does not say)."""
        try:
            listing = self.ask(f"list {path}", lambda fs: fs.ls(path, detail=True, refresh=True))
        except FileNotFoundError:
            return []
        now = time.time()
        out = []
        for entry in listing:
            name = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
            written = entry.get("LastModified") or entry.get("mtime") or entry.get("created")
            stamp = getattr(written, "timestamp", None)
            out.append((name, now - float(stamp() if stamp is not None else written) if written else 0.0))
        return [(name, age) for name, age in out if name]

    def drop(self, path: str, gone: Callable[[str], bool]) -> None:
        """Remove objects below a path by name."""
        for name, _ in self.names(path):
            if gone(name):
                with contextlib.suppress(FileNotFoundError):
                    self.ask(f"remove {path}/{name}", lambda fs, name=name: fs.rm_file(f"{path}/{name}"))  # type: ignore[misc]

    def tags(self) -> list[str]:
        names = [name for name, _ in self.names(self.root) if not name.startswith(".")]
        return [name for name in names if self.has_object(f"{self.root}/{name}/{MANIFEST}")]

    def has_object(self, path: str) -> bool:
        """Whether there is an object at a path."""
        return bool(self.ask(f"look for {path}", lambda fs: fs.exists(path)))

    def read(self, tag: str, name: str, limit: int) -> bytes:
        path = f"{self.root}/{tag}/{name}"

        def fetch(fs: Any) -> bytes:
            fs.invalidate_cache(f"{self.root}/{tag}")
            size = min(limit, int(fs.info(path)["size"]))
            data = bytes(fs.cat_file(path, start=0, end=size)) if size else b""
            if len(data) != size:
                raise IncompleteError(f"{len(data)} bytes came, {size} were asked for")
            return data

        try:
            out: bytes = self.ask(f"read {path}", fetch)
        except FileNotFoundError as error:
            raise not_found(self.where(tag), name) from error
        return out

    def open(self, tag: str, name: str) -> ReadFile:
        try:
            return _ObjectReadFile(self, f"{self.root}/{tag}/{name}")
        except FileNotFoundError as error:
            raise not_found(self.where(tag), name) from error

    def draft(self, tag: str, token: str) -> Draft:
        return _ObjectDraft(self, tag, token)

    def remove(self, tag: str) -> None:
        # The manifest goes first: without it there is no checkpoint.
        path = f"{self.root}/{tag}"
        with contextlib.suppress(FileNotFoundError):
            self.ask(f"remove {path}/{MANIFEST}", lambda fs: fs.rm_file(f"{path}/{MANIFEST}"))
        self.drop(path, lambda name: True)

    def shared(self) -> list[tuple[str, float]]:
        return self.names(f"{self.root}/{SHARED}")

    def remove_shared(self, names: Collection[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.ask(f"remove {name}", lambda fs, name=name: fs.rm_file(f"{self.root}/{SHARED}/{name}"))  # type: ignore[misc]

    def hold(self, tag: str, seconds: float) -> Callable[[], None]:
        path = f"{self.root}/{READERS}/{hold_name(tag, seconds)}"
        try:
            put_object(self.fs, self.retries, path, b"held\n")
        except (OSError, CheckpointError) as error:
            ds_monitor.event("ckpt.not_held", checkpoint=self.where(tag), why=str(error))
            return lambda: None

        def over() -> None:
            try:
                self.ask(f"remove {path}", lambda fs: fs.rm_file(path))
            except (OSError, CheckpointError) as error:  # it ends by itself
                ds_monitor.event("ckpt.leftover", path=path, why=str(error))

        return over

    def tags_in_use(self) -> set[str]:
        names = [name for name, _ in self.names(f"{self.root}/{READERS}")]
        return held_tags(names)

    def where(self, tag: str) -> str:
        return f"{self.url}/{tag}"
