"""Hugging Face safetensors: `model.safetensors`, or numbered shards with `model.safetensors.index.json`, both ways.

The files are written by this package's own writer, so a model of any size is exported with one tensor in memory. Tied
tensors are written once under their stored name (that is how transformers saves them, too); a reader that wants every
name finds the others in the checkpoint's aliases.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor

from ds_ckpt.convert.tensor_source import TensorEntry, TensorSource, foreign_reader
from ds_ckpt.dtypes import BY_CODE, ITEMSIZE
from ds_ckpt.jsontext import parse
from ds_ckpt.local_files import Disk, LocalWriteFile
from ds_ckpt.shard_tensors import byte_view
from ds_ckpt.writer import safetensors_header
from ds_config.errors import CheckpointError
from ds_config.regular_file import replace_text, replacing

__all__ = ["INDEX", "Exported", "open_hf", "write_hf"]

INDEX: Final = "model.safetensors.index.json"
_MAX_INDEX: Final = 2**28


@dataclass(frozen=True, slots=True)
class Exported:
    """The files of an export, in order, and the bytes of their tensors."""

    files: tuple[str, ...]
    nbytes: int


@foreign_reader
def open_hf(path: str | os.PathLike[str]) -> TensorSource:
    """Open the tensors of a safetensors file, or of a directory with such a file, an index, or several files.

    Raises:
        CheckpointError: "ckpt-not-found" (no such file), "ckpt-foreign" (an index that names a file outside the
            directory or a tensor that its file does not have).
    """
    root = Path(path)
    weight_map = {} if root.is_file() else _weight_map(root)
    indexed = [root / name for name in sorted(set(weight_map.values()))]
    files = [root] if root.is_file() else indexed or sorted(root.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{root} holds no safetensors file", code="ckpt-not-found", fix="Give the model's directory."
        )
    entries: dict[str, TensorEntry] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing", code="ckpt-not-found", fix="Complete the download.")
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  safe_open is no mapping
                view = opened.get_slice(name)
                if view.get_dtype() not in BY_CODE:
                    raise CheckpointError(
                        f"{name!r} in {file} has elements of type {view.get_dtype()}",
                        code="ckpt-dtype",
                        fix="Convert it first.",
                    )
                entries[name] = TensorEntry(
                    tuple(view.get_shape()), BY_CODE[view.get_dtype()], partial(_read, file, name)
                )
    if absent := sorted(weight_map.keys() - entries.keys()):
        raise CheckpointError(
            f"{root / INDEX} names tensors that its files do not have: {', '.join(absent[:4])}",
            code="ckpt-foreign",
            fix="Copy the folder again; the index and the files do not belong together.",
        )
    return TensorSource(entries)


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def _weight_map(root: Path) -> dict[str, str]:
    """Return the file of each tensor by the directory's index; empty without one."""
    index = root / INDEX
    if not index.is_file():
        return {}
    content = parse(index.read_bytes()[:_MAX_INDEX], str(index))
    names: dict[str, str] = content["weight_map"] if isinstance(content, dict) and "weight_map" in content else {}
    if not names or any(not isinstance(n, str) or "/" in n or "\\" in n or n.startswith(".") for n in names.values()):
        raise CheckpointError(
            f"{index} names files outside its directory, or none", code="ckpt-foreign", fix="Do not use it."
        )
    return names


def write_hf(
    source: TensorSource,
    out: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    pickled: bool = False,
    overwrite: bool = False,
) -> Exported:
    """Write `source` into the directory `out`; one file when everything fits into `max_shard_bytes`.

    Args:
        pickled: Write `pytorch_model.bin`, files of `torch.save`, with a name of its own for each tied tensor.
        overwrite: Take the place of a former export: its files go when the new ones are complete.

    Raises:
        CheckpointError: "ckpt-target-exists": `out` already holds files of that kind.
    Cost: one tensor of host memory, or with `pickled` one file's; every byte is written once.
    """
    root = Path(out)
    root.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("pytorch_model", ".bin") if pickled else ("model", ".safetensors")
    if not overwrite and any(root.glob(f"*{suffix}")):
        raise CheckpointError(
            f"{root} already holds {suffix.removeprefix('.')} files",
            code="ckpt-target-exists",
            fix="Export into an empty directory.",
        )
    own = re.compile(re.escape(stem) + r"(-\d+-of-\d+)?" + re.escape(suffix) + r"(\.index\.json)?")
    former = {path for path in root.iterdir() if own.fullmatch(path.name)}
    shards = _shards(source, max_shard_bytes)
    files = [
        f"{stem}{suffix}" if len(shards) == 1 else f"{stem}-{i + 1:05d}-of-{len(shards):05d}{suffix}"
        for i in range(len(shards))
    ]
    if pickled:
        for names in shards:
            names += [alias for alias, target in source.aliases.items() if target in names]
    for file, names in zip(files, shards, strict=True):
        if pickled:
            _write_pickled(root / file, source, names)
        else:
            _write_file(root / file, [(name, source.entries[name]) for name in names])
    total = sum(_nbytes(entry) for entry in source.entries.values())
    index = root / f"{stem}{suffix}.index.json"
    if len(files) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        replace_text(index, json.dumps(content, indent=2) + "\n")
        former.discard(index)
    for path in former - {root / file for file in files}:
        path.unlink()
    return Exported(tuple(files), total)


def _nbytes(entry: TensorEntry) -> int:
    n = ITEMSIZE[entry.dtype]
    for size in entry.shape:
        n *= size
    return n


def _shards(source: TensorSource, limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, entry in source.entries.items():
        nbytes = _nbytes(entry)
        if shards[-1] and used + nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += nbytes
    return shards


def _write_file(path: Path, entries: Sequence[tuple[str, TensorEntry]]) -> None:
    ordered = sorted(entries, key=lambda e: (-ITEMSIZE[e[1].dtype], e[0]))
    head = safetensors_header([(name, entry.dtype, entry.shape) for name, entry in ordered])
    file = LocalWriteFile(Disk(), str(path), 0)
    try:
        file.put(0, memoryview(head))
        at = len(head)
        for _, entry in ordered:
            data = byte_view(entry.read())
            file.put(at, data)
            at += data.nbytes
        file.close()
    except BaseException:
        file.abandon()
        raise


def _write_pickled(path: Path, source: TensorSource, names: Sequence[str]) -> None:
    """Write tensors by `torch.save`; names of one tensor share its storage, as they did in the model."""
    read: dict[str, Tensor] = {}
    for name in names:
        target = source.aliases.get(name, name)
        read[name] = read[target] if target in read else source.entries[target].read()
    with replacing(path) as draft, draft.open("wb") as file:
        torch.save(read, file)
