"""Pretrained weights from safetensors straight into parts: each rank reads the bytes of its own boxes.

with torch.device("meta"):
    model = LlamaForCausalLM(config)
cut = parallelize_model(model, plan, group)      # shapes only
load_sharded_weights(cut, "llama/", device)        # now memory is taken, for this rank's part
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_config.errors import CheckpointError
from ds_config.json_files import read_weight_map
from ds_parallel.tensor.apply import TensorParallelModel

__all__ = ["load_sharded_weights"]


def load_sharded_weights(
    cut: TensorParallelModel,
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Fill every parameter and saved buffer of a cut model from a folder or file of safetensors.

    Names are the uncut model's, with or without the prefix of its base model (`model.`). Parameters on meta get memory.

    Args:
        dtype: Of the parameters; the model's own by default.
    Raises:
        CheckpointError: a tensor is missing or has another shape; all of them are listed ("tensor-weights").
    Cost: reads the bytes of this rank's boxes; no communication.
    """
    with ExitStack() as opened:
        files = _FolderTensors(Path(path), opened)
        problems: list[str] = []
        done: set[int] = set()
        for name, tensor in _wanted(cut):
            shard = cut.shards.get(name)
            logical, shape = (shard.name, shard.shape) if shard else (name, tuple(tensor.shape))
            stored = files.find(logical)
            if stored is None:
                if id(tensor) not in done and not _loaded_elsewhere(cut, tensor, files):
                    problems.append(f"{logical} is missing")
                continue
            piece = files.slice(stored)
            if tuple(piece.get_shape()) != shape:
                problems.append(f"{logical} is {tuple(piece.get_shape())}, the model's {shape}")
                continue
            box = shard.box(cut.group.rank) if shard else None
            index = (
                tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
                if box
                else tuple(slice(None) for _ in shape)
            )
            value: Tensor = piece[index] if shape else files.whole(stored)
            _put(cut.model, name, tensor, value.to(device=device, dtype=dtype or tensor.dtype))
            done.add(id(tensor))
    if problems:
        raise CheckpointError(
            f"{path} does not fit the model:\n" + "\n".join(f"  {problem}" for problem in problems),
            code="tensor-weights",
            fix="Load the weights of this very architecture; converted names must be the model's own.",
        )


def _wanted(cut: TensorParallelModel) -> Iterator[tuple[str, Tensor]]:
    yield from cut.model.named_parameters(remove_duplicate=False)
    saved = cut.model.state_dict(keep_vars=True)
    for name, buffer in cut.model.named_buffers(remove_duplicate=False):
        if name in saved:
            yield name, buffer


def _loaded_elsewhere(cut: TensorParallelModel, tensor: Tensor, files: _FolderTensors) -> bool:
    """Whether a tied name of the same parameter is in the files."""
    for name, other in cut.model.named_parameters(remove_duplicate=False):
        shard = cut.shards.get(name)
        if other is tensor and files.find(shard.name if shard else name) is not None:
            return True
    return False


def _put(model: nn.Module, name: str, tensor: Tensor, value: Tensor) -> None:
    if tensor.device.type != "meta":
        with torch.no_grad():
            tensor.copy_(value)
        return
    above, _, key = name.rpartition(".")
    module = model.get_submodule(above)
    if isinstance(tensor, nn.Parameter):
        with torch.no_grad():
            torch.utils.swap_tensors(tensor, nn.Parameter(value, requires_grad=tensor.requires_grad))
    else:
        module._buffers[key] = value


class _FolderTensors:
    """Tensors by name, over all files of a folder. Files are opened when they are first read."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self._opened = opened
        self._handles: dict[Path, Any] = {}
        self._places = dict(self._index(path))

    def _index(self, path: Path) -> Iterator[tuple[str, Path]]:
        listed = read_weight_map(path, _damaged) if path.is_dir() else None
        if listed is not None:
            yield from listed.items()
            return
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            yield from ((name, file) for name in self._open(file).keys())  # noqa: SIM118  no mapping

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                from safetensors import SafetensorError, safe_open  # the extra `hf`
            except ImportError as error:
                raise CheckpointError(
                    "reading safetensors needs the package of that name",
                    code="tensor-weights",
                    fix="Install ds-parallel[hf].",
                ) from error
            if not file.is_file():
                raise CheckpointError(f"there is no {file}", code="tensor-weights", fix="Check the path.")
            try:
                self._handles[file] = self._opened.enter_context(safe_open(str(file), "pt"))
            except (OSError, SafetensorError) as error:
                raise _damaged(f"{file} cannot be read as safetensors: {error}") from error
        return self._handles[file]

    def find(self, name: str) -> str | None:
        """Find the stored name: `name`, without its first part, or with the first part of the stored names."""
        if name in self._places:
            return name
        rest = name.partition(".")[2]
        if rest in self._places:
            return rest
        firsts = {stored.partition(".")[0] for stored in self._places}
        return next((f"{first}.{name}" for first in sorted(firsts) if f"{first}.{name}" in self._places), None)

    def slice(self, name: str) -> Any:
        opened = self._open(self._places[name])
        try:
            return opened.get_slice(name)
        except Exception as error:  # SafetensorError, of a package that may be absent
            raise _damaged(f"{self._places[name]}: {error}") from error

    def whole(self, name: str) -> Tensor:
        tensor: Tensor = self._open(self._places[name]).get_tensor(name)
        return tensor


def _damaged(text: str) -> CheckpointError:
    return CheckpointError(text, code="tensor-weights", fix="Give a .safetensors file, or a folder that has some.")
