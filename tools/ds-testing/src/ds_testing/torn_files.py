"""Folders of safetensors that are torn in a known way, for the tests of what reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["SPOILS", "write_folder"]

_FILE, _INDEX = "1.safetensors", "model.safetensors.index.json"


def write_folder(folder: Path) -> None:
    """Write the tensors a [2, 3] and b [4] of ones, and the index that names their file."""
    header = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F32", "shape": [4], "data_offsets": [24, 40]},
    }
    _write(folder, header, b"\0\0\x80\x3f" * 10)
    _index({"weight_map": {"a": _FILE, "b": _FILE}})(folder)


def _write(folder: Path, header: Mapping[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / _FILE).write_bytes(len(text).to_bytes(8, "little") + text + data)


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        raw = (folder / _FILE).read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        change(header)
        _write(folder, header, raw[start:])

    return spoil


def _index(value: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / _INDEX).write_text(json.dumps(value))

    return spoil


def _pipe(folder: Path) -> None:
    os.remove(folder / _FILE)
    os.mkfifo(folder / _FILE)


SPOILS: Mapping[str, Callable[[Path], None]] = {
    "index": _index([1]),
    "no map": _index({"a": 1}),
    "another file": _index({"weight_map": {"a": "2.safetensors"}}),
    "pipe": _pipe,
    "cut": lambda folder: os.truncate(folder / _FILE, 100),
    "no dtype": _header(lambda header: header["a"].pop("dtype")),
    "larger than its bytes": _header(lambda header: header["a"].update(shape=[3, 3])),
    "no object": _header(lambda header: header.update(a=5)),
}
"""What makes a folder of `write_folder` one that no reader takes."""
