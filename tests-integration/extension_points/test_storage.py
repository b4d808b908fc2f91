"""A storage of checkpoints that is a dictionary: this file, and nothing in ds-ckpt knows of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

import ds_ckpt
from ds_ckpt.format import MANIFEST
from ds_ckpt.protocols import not_found


class Bytes(bytearray):
    """A file: written from its first byte to its last, read anywhere."""

    nbytes = property(len)

    def write(self, offset: int, data: memoryview) -> None:
        self[offset:] = data

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self)[offset : offset + nbytes]

    def close(self) -> None: ...

    abandon = close


class Draft(dict[str, Bytes]):
    """Files that nobody sees before `commit`."""

    def __init__(self, storage: InMemory, tag: str) -> None:
        super().__init__()
        self.storage, self.tag, self.abort = storage, tag, self.clear

    def file_name(self, rank: int) -> str:
        return f"rank-{rank}.safetensors"

    def create(self) -> None: ...

    def write_file(self, name: str, nbytes: int) -> Bytes:
        return self.setdefault(name, Bytes())

    def commit(self, manifest: bytes) -> None:
        self.storage[self.tag] = {**self, MANIFEST: Bytes(manifest)}


class InMemory(dict[str, dict[str, Bytes]]):
    tags = dict.keys
    remove = dict.pop

    def draft(self, tag: str, token: str) -> Draft:
        return Draft(self, tag)

    def open(self, tag: str, name: str) -> Bytes:
        if name not in self.get(tag, {}):
            raise not_found(self.where(tag), name)
        return self[tag][name]

    def read(self, tag: str, name: str, limit: int) -> bytes:
        return bytes(self.open(tag, name)[:limit])

    def hold(self, tag: str, seconds: float) -> Callable[[], None]:
        return lambda: None

    def where(self, tag: str) -> str:
        return f"memory of this process, {tag}"


def test_a_model_comes_back_from_it():
    storage, model = InMemory(), torch.nn.Linear(4, 3)
    expected = model.weight.detach().clone()
    ds_ckpt.save(ds_ckpt.CheckpointRef(storage, "one"), ds_ckpt.full_shards(model.state_dict()), {"step": 1})
    model.weight.data.zero_()
    assert ds_ckpt.load(ds_ckpt.CheckpointRef(storage, "one"), ds_ckpt.full_shards(model.state_dict())) == {"step": 1}
    assert torch.equal(model.weight, expected)
