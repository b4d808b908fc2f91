"""Checkpoints below an fsspec URL.

Object storage has no rename. Data objects get names of their own (the token), and the manifest, one atomic put, is the
commit. What no manifest names is removed after the next commit.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ds_ckpt.format import MANIFEST
from ds_ckpt.protocols import Draft, ReadFile, WriteFile, not_found, truncated
from ds_config.errors import CheckpointError, UnsupportedError

__all__ = ["ObjectStorage"]


class _ObjectWriteFile:
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
        with contextlib.suppress(AttributeError):  # files that cannot be told; the others would upload when collected
            self._file.closed = True


class _ObjectReadFile:
    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self.nbytes = int(fs.info(path)["size"])

    def view(self, offset: int, nbytes: int) -> memoryview:
        data = self._fs.cat_file(self._path, start=offset, end=offset + nbytes) if nbytes else b""
        if len(data) != nbytes:
            raise truncated(self._path, offset, nbytes)
        return memoryview(data)

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
            raise not_found(self.where(tag), name) from error

    def open(self, tag: str, name: str) -> ReadFile:
        try:
            return _ObjectReadFile(self.fs, f"{self.root}/{tag}/{name}")
        except FileNotFoundError as error:
            raise not_found(self.where(tag), name) from error

    def draft(self, tag: str, token: str) -> Draft:
        return _ObjectDraft(self, tag, token)

    def remove(self, tag: str) -> None:
        # The manifest goes first: without it there is no checkpoint.
        self.fs.rm_file(f"{self.root}/{tag}/{MANIFEST}")
        self.fs.rm(f"{self.root}/{tag}", recursive=True)

    def where(self, tag: str) -> str:
        return f"{self.url}/{tag}"
