"""Experts from safetensors into this rank's shards, and back out under a family's own names.

Families have two layouts: *packed*, as the weights are in memory ([E, ...] each), and *listed*, a name for each expert and matrix, which is what
most files on the hub have. Reading finds out which one a file has. Only bytes of this rank's experts are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_comm import param_sharding
from ds_config.errors import CheckpointError
from ds_config.json_files import read_weight_map
from ds_moe.autoep import ExpertParallelModel
from ds_moe.detect import MoEBlock
from ds_moe.moe_families import MoEFamily
from ds_moe.packed_experts import PackedExperts, gather_experts

__all__ = ["full_state", "load_experts"]


def load_experts(cut: ExpertParallelModel, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Fill the experts of a model that was cut; before ZeRO. Also of a model on the meta device: experts get memory here.

    Args:
        path: A folder with `*.safetensors` (and an index), or one such file.
    Returns: Names in files that were read. The rest of the model is not touched.

    Raises:
        CheckpointError: a name is missing or has another shape ("moe-files").
    Cost: this rank's experts are read once; no communication.
    """
    used: list[str] = []
    with ExitStack() as stack:
        files = _ExpertFiles(Path(path), stack)
        for one in cut.blocks:
            layer = cut.layers[one.name]
            for name, param in layer.named_parameters():
                if isinstance(layer, PackedExperts) and "." not in name:
                    value, names = _packed(files, one, name, param)
                elif one.parts is not None and name.startswith(f"{one.parts.experts}."):
                    full = param_sharding(param).name or f"{one.name}.{name}"
                    value, names = files.part(full, None), [full]
                else:
                    continue
                if value.shape != param.shape:
                    raise _broken(
                        f"{names[0]} gives {tuple(value.shape)}, and {one.name}.{name} is {tuple(param.shape)}"
                    )
                if param.is_meta:
                    param.data = torch.empty_like(param, device="cpu")
                param.detach().copy_(value)
                used += names
    return tuple(used)


def full_state(cut: ExpertParallelModel, *, listed: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the whole model, all experts included, on every rank; one layer at a time. Collective.

    Args:
        listed: Experts by names of their own, as the family's files on the hub have them, where the family does that.
    Parameters must be whole: within `ds_zero.GatheredParameters` or after `close()`.
    """
    packed = {
        id(param): (one, name)
        for one in cut.blocks
        if one.parts is None
        for name, param in cut.layers[one.name].named_parameters(recurse=False)
    }
    state = cut.model.state_dict(keep_vars=True)
    local = [f"{one.name}.{one.parts.experts}." for one in cut.blocks if one.parts is not None]
    for name, value in state.items():
        if any(name.startswith(prefix) for prefix in local):
            yield from _everyones(cut, name, value)
        elif id(value) not in packed:
            yield name, value.detach()
        else:
            one, key = packed[id(value)]
            whole = gather_experts(value, cut.places)
            files = one.family.files if listed and one.family is not None else ()
            yield from _listed(one, key, whole, files) if files else [(name, whole)]


def _everyones(cut: ExpertParallelModel, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Gather an expert of a list from this rank and its peers in the expert group; yield each under its global name.

    Collective over the expert group.
    """
    logical = param_sharding(value).name or name
    before, number, after = _numbered(name, logical)
    group = cut.places.expert
    layer = next(layer for at, layer in cut.layers.items() if name.startswith(f"{at}."))
    each = layer.num_experts // group.size
    all_of_them = gather_experts(value.detach()[None], cut.places)
    for rank in range(group.size):
        yield f"{before}{rank * each + number % each}{after}", all_of_them[rank]


def _numbered(name: str, logical: str) -> tuple[str, int, str]:
    """Split a logical name at the expert's number, which is where `name` has the number on this rank."""
    parts, name_parts = logical.split("."), name.split(".")
    at = next((i for i, (a, b) in enumerate(zip(parts, name_parts, strict=True)) if a != b), None)
    if at is None:
        at = max(i for i, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[:at]) + ".", int(parts[at]), "." + ".".join(parts[at + 1 :])


def _packed(files: _ExpertFiles, one: MoEBlock, name: str, param: Tensor) -> tuple[Tensor, list[str]]:
    """Read this rank's part of a packed weight, from a packed or a listed file."""
    box = param_sharding(param).box
    first = 0 if box is None else box.offset[0]
    full = f"{one.name}.{name}"
    if files.has(full):
        return files.part(full, slice(first, first + param.shape[0])), [full]
    family = one.family
    if family is None or not family.files or name not in ("gate_up_proj", "up_proj", "down_proj"):
        raise _broken(f"no {full} in {files.path}")
    wanted = {"gate_up_proj": family.files[:2], "up_proj": family.files[1:2], "down_proj": family.files[2:]}[name]
    stem = _in_files(one.name, family)
    names = [f"{stem}.{e}.{w}" for e in range(first, first + param.shape[0]) for w in wanted]
    each = len(wanted)
    matrices = [torch.cat([files.part(n, None) for n in names[i : i + each]]) for i in range(0, len(names), each)]
    return torch.stack(matrices), names


def _listed(one: MoEBlock, key: str, whole: Tensor, files: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    stem = _in_files(one.name, one.family)
    for number, matrix in enumerate(whole):
        if key == "gate_up_proj":
            gate, up = matrix.chunk(2)
            yield f"{stem}.{number}.{files[0]}", gate.contiguous()
            yield f"{stem}.{number}.{files[1]}", up.contiguous()
        else:
            yield f"{stem}.{number}.{files[1 if key == 'up_proj' else 2]}", matrix.contiguous()


def _in_files(name: str, family: MoEFamily | None) -> str:
    if family is None or family.block_in_files is None:
        return name
    memory, files = family.block_in_files
    return name.replace(f".{memory}.", f".{files}.")


class _ExpertFiles:
    """Tensors of a folder of safetensors, opened when they are needed."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path, self._stack = path, stack
        self._open: dict[Path, Any] = {}
        listed = None if path.is_file() else read_weight_map(path, _broken)
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        self._where = listed or {name: file for file in files for name in self._file(file).keys()}  # noqa: SIM118
        if not self._where:
            raise _broken(f"no safetensors in {path}")

    def has(self, name: str) -> bool:
        return name in self._where

    def part(self, name: str, rows: slice | None) -> Tensor:
        """Read a tensor, or a range of its rows."""
        if name not in self._where:
            raise _broken(f"no {name} in {self.path}")
        try:
            view = self._file(self._where[name]).get_slice(name)
        except SafetensorError as error:
            raise _broken(f"{self._where[name]}: {error}") from error
        value: Tensor = view[:] if rows is None else view[rows.start : rows.stop]
        return value

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            if not path.is_file():
                raise _broken(f"there is no file {path}")
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise _broken(f"{path} cannot be read as safetensors: {error}") from error
        return self._open[path]


def _broken(message: str) -> CheckpointError:
    return CheckpointError(
        message, code="moe-files", fix="Load files of the same model, with its experts packed or listed."
    )
