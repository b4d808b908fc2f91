"""Checkpoints in this process's memory: a dict; the commit is one assignment."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ds_ckpt.format import MANIFEST
from ds_ckpt.protocols import SHARED, Draft, ReadFile, WriteFile, not_found, truncated

__all__ = ["MemoryStorage"]


class _MemoryFile:
    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + data.nbytes] = data  # grows where the size was not known

    def close(self) -> None:
        """Do nothing: a file in memory has no data to flush."""

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
        """Do nothing: bytes in memory need no open file."""


class _MemoryDraft:
    def __init__(self, storage: MemoryStorage, tag: str, token: str) -> None:
        self._storage, self._tag, self._token = storage, tag, token
        self._files: dict[str, _MemoryFile] = {}

    def file_name(self, rank: int) -> str:
        return f"data-{rank:05d}.safetensors"

    def leaf_name(self, rank: int) -> str:
        return f"leaf-{rank:05d}.json"

    def blocks_name(self, rank: int) -> str:
        return f"blocks-{rank:05d}-{self._token}.bin"

    def create(self) -> None:
        self._files = {}

    def write_shared(self, name: str) -> WriteFile:
        file = self._files[f"{SHARED}/{name}"] = _MemoryFile(0)
        return file

    def write_file(self, name: str, nbytes: int) -> WriteFile:
        self._files[name] = _MemoryFile(nbytes)
        return self._files[name]

    def commit(self, manifest: bytes) -> None:
        files = {n: f.data for n, f in self._files.items() if not n.startswith(SHARED)}
        beside = {n.rpartition("/")[2]: f.data for n, f in self._files.items() if n.startswith(SHARED)}
        if beside:
            self._storage.checkpoints[SHARED] = {**self._storage.checkpoints.get(SHARED, {}), **beside}
        self._storage.checkpoints[self._tag] = {**files, MANIFEST: manifest}

    def abort(self) -> None:
        self._files = {}


class MemoryStorage:
    """Checkpoints in this process's memory: for tests, and for snapshots that a disk need not see. One rank only."""

    def __init__(self) -> None:
        self.checkpoints: dict[str, dict[str, bytes | bytearray]] = {}

    def tags(self) -> list[str]:
        return [tag for tag in self.checkpoints if tag != SHARED]

    def read(self, tag: str, name: str, limit: int) -> bytes:
        return bytes(self._file(tag, name)[:limit])

    def open(self, tag: str, name: str) -> ReadFile:
        return _BytesReadFile(self._file(tag, name), f"{self.where(tag)}/{name}")

    def draft(self, tag: str, token: str) -> Draft:
        return _MemoryDraft(self, tag, token)

    def remove(self, tag: str) -> None:
        del self.checkpoints[tag]

    def shared(self) -> list[tuple[str, float]]:
        return [(name, 0.0) for name in self.checkpoints.get(SHARED, {})]

    def remove_shared(self, names: Collection[str]) -> None:
        for name in names:
            self.checkpoints.get(SHARED, {}).pop(name, None)

    def hold(self, tag: str, seconds: float) -> Callable[[], None]:
        return lambda: None  # what is read stays in memory with its reader

    def tags_in_use(self) -> set[str]:
        return set()

    def where(self, tag: str) -> str:
        return f"memory:{tag}"

    def _file(self, tag: str, name: str) -> bytes | bytearray:
        try:
            return self.checkpoints[tag][name]
        except KeyError as error:
            raise not_found(self.where(tag), name) from error
