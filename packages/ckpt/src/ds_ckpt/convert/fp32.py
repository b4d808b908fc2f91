"""Full fp32 weights from a training checkpoint, under the names of DeepSpeed's recovery script.

Works on our checkpoints, and with `allow_pickle` on DeepSpeed's. `checkpoint_dir` is the folder that contains the tags;
`tag=None` means the newest complete one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_ckpt.checkpoint_list import find_latest
from ds_ckpt.convert.deepspeed_layout import open_deepspeed
from ds_ckpt.convert.huggingface import Exported, write_hf
from ds_ckpt.convert.tensor_source import TensorSource, cast, open_checkpoint, renamed
from ds_ckpt.manifest_owner import has_manifest
from ds_ckpt.shard_tensors import torch_dtype
from ds_config.errors import CheckpointError

__all__ = [
    "LazyTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "weights",
]


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is read by `contiguous()`, each time."""

    shape: torch.Size
    dtype: torch.dtype
    contiguous: Callable[[], Tensor]


def open_training(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    allow_pickle: bool = False,
    parallel_info: Mapping[str, Any] | None = None,
) -> TensorSource:
    """Open a checkpoint of this package or of DeepSpeed in a folder of tags (or the folder of a tag).

    Args:
        parallel_info: As of `open_deepspeed`.
    """
    root = Path(checkpoint_dir)
    if tag is not None and has_manifest(root / tag):
        return open_checkpoint(root / tag)
    if tag is None and has_manifest(root):
        return open_checkpoint(root)
    latest = find_latest(root) if tag is None else None
    if latest is not None:
        return open_checkpoint(latest)
    if any(root.glob("*_model_states.pt")) or any(root.glob("*/*_model_states.pt")):
        return open_deepspeed(root, tag=tag, allow_pickle=allow_pickle, parallel_info=parallel_info)
    raise CheckpointError(
        f"{root} holds no complete checkpoint{f' {tag!r}' if tag else ''}",
        code="ckpt-not-found",
        fix="Give the folder that contains the tags.",
    )


def weights(source: TensorSource, *, exclude_frozen_parameters: bool = False) -> TensorSource:
    """Extract the model of a training checkpoint: parameters and buffers under the module's names.

    Args:
        exclude_frozen_parameters: Leave out parameters without optimizer state.
    """
    trained = {key.removeprefix("optim/").rpartition("/")[0] for key in source.entries if key.startswith("optim/")}

    def name(key: str) -> str | None:
        kind, _, rest = key.partition("/")
        if kind == "param":
            stored = source.aliases.get(key, key).removeprefix("param/")
            return None if exclude_frozen_parameters and stored not in trained else rest
        return rest if kind == "buffer" else None

    return renamed(source, name)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
    *,
    allow_pickle: bool = False,
) -> dict[str, Tensor] | dict[str, LazyTensor]:
    """Return a state dict of full fp32 tensors; tied names share a tensor.

    With `lazy_mode` the values are `LazyTensor`s.

    Cost: the whole model in host memory, unless lazy.
    """
    source = open_training(checkpoint_dir, tag, allow_pickle=allow_pickle)
    model = cast(weights(source, exclude_frozen_parameters=exclude_frozen_parameters), "float32")
    if lazy_mode:
        lazy = {
            name: LazyTensor(torch.Size(entry.shape), torch_dtype(entry.dtype), entry.read)
            for name, entry in model.entries.items()
        }
        return {**lazy, **{alias: lazy[target] for alias, target in model.aliases.items()}}
    read = {name: entry.read() for name, entry in model.entries.items()}
    return {**read, **{alias: read[target] for alias, target in model.aliases.items()}}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_bytes: int = 5 * 10**9,
    *,
    tag: str | None = None,
    allow_pickle: bool = False,
) -> Exported:
    """Write the full fp32 weights as safetensors. Cost: one tensor of host memory at a time."""
    source = open_training(checkpoint_dir, tag, allow_pickle=allow_pickle)
    return write_hf(cast(weights(source), "float32"), output_dir, max_shard_bytes=max_shard_bytes)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None, *, allow_pickle: bool = False
) -> nn.Module:
    """Load the full weights into `model` (strictly, in its own dtype and where it is), and return it."""
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, allow_pickle=allow_pickle))
    return model
