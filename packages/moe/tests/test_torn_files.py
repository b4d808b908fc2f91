"""Folders of safetensors that are torn: an error that names the file, never one of another library, never a wait."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import save_file

from ds_config.errors import CheckpointError
from ds_moe.expert_files import _ExpertFiles


def _read(path):
    with ExitStack() as stack:
        files = _ExpertFiles(path, stack)
        return [files.part(name, None) for name in ("a", "b", "c")]


def _folder(path):
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4)}, path / "1.safetensors")
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}})
    )


def _header(change):
    """Save with a header that `change` gets."""

    def spoil(path):
        raw = (path / "1.safetensors").read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        (path / "1.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])

    return spoil


def _index(value):
    return lambda path: (path / "model.safetensors.index.json").write_text(json.dumps(value))


def _pipe(path):
    os.remove(path / "1.safetensors")
    os.mkfifo(path / "1.safetensors")


SPOILS = {
    "index": _index([1]),
    "no map": _index({"a": 1}),
    "another file": _index({"weight_map": {"a": "2.safetensors"}}),
    "not in its file": _index({"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "1.safetensors"}}),
    "pipe": _pipe,
    "cut": lambda path: os.truncate(path / "1.safetensors", 100),
    "no dtype": _header(lambda header: header["a"].pop("dtype")),
    "larger than its bytes": _header(lambda header: header["a"].update(shape=[3, 3])),
    "no object": _header(lambda header: header.update(a=5)),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_torn_safetensors(tmp_path, spoil):
    _folder(tmp_path)
    SPOILS[spoil](tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        _read(tmp_path)
