"""Checkpoints in this process's memory: a dict; the commit is one assignment."""

from __future__ import annotations

from ds_ckpt.format import MANIFEST
from ds_ckpt.protocols import Draft, ReadFile, WriteFile, not_found, truncated

__all__ = ["MemoryStorage"]


class _MemoryFile:
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

    def view(self, offset: int, nbytes: int) -> memoryview:
        if offset + nbytes > self.nbytes:
            raise truncated(self._where, offset, nbytes)
        return self._data[offset : offset + nbytes]

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
            raise not_found(self.where(tag), name) from error
