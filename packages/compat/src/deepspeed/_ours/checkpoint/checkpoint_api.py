"""Checkpoint folders as clients expect them: `latest`, the tag's folder, `zero_to_fp32.py`; our format inside.

A client's state is any mixture of containers, numbers, text and tensors; a checkpoint of ours holds JSON. What JSON has no
word for is written as `{"~": kind, ...}`; what that has no word for is refused, never pickled.
"""

from __future__ import annotations

import argparse
import base64
import io
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from ds_ckpt.convert.deepspeed_folders import check_tag
from ds_comm import Group, broadcast_object_list
from ds_config.errors import CheckpointError, UnsupportedError
from ds_config.regular_file import replace_text
from ds_engine.deepspeed_checkpoints import latest_tag

_KIND = "~"
_SCRIPT = '''#!/usr/bin/env python3
"""Write the whole fp32 weights of the checkpoints beside this file: python zero_to_fp32.py . OUTPUT_DIR"""

from deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


# ---- client state


def encode(value: Any, path: str = "client_state") -> Any:
    """Encode `value` as data that JSON can represent.

    Raises:
        UnsupportedError: a value that is neither data nor a tensor; the message gives its path ("compat-client-state").
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass (an enum's) the text alone
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "value": str(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: encode(inner, f"{path}.{key}") for key, inner in value.items()}
        pairs = [[encode(key, path), encode(inner, f"{path}[{key!r}]")] for key, inner in value.items()]
        return {_KIND: "dict", "value": pairs}
    if isinstance(value, list | tuple | set | frozenset):
        inner = [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
        kind = next(k for k in (list, tuple, set, frozenset) if isinstance(value, k)).__name__
        return inner if kind == "list" else {_KIND: kind, "value": inner}
    if isinstance(value, Tensor):
        data = save_bytes({"t": value.detach().cpu().contiguous()})
        return {_KIND: "tensor", "value": base64.b64encode(data).decode()}
    return _encode_other(value, path)


def _encode_other(value: Any, path: str) -> Any:
    if isinstance(value, bytes):
        return {_KIND: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, os.PathLike):
        return {_KIND: "path", "value": os.fspath(value)}
    if isinstance(value, argparse.Namespace | SimpleNamespace):  # the options of a program, as Megatron stores them
        kind = "Namespace" if isinstance(value, argparse.Namespace) else "SimpleNamespace"
        return {_KIND: kind, "value": encode(vars(value), path)}
    if isinstance(value, torch.dtype | torch.device):
        return {_KIND: type(value).__name__, "value": str(value).removeprefix("torch.")}
    if hasattr(value, "item") and hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0:
        return encode(value.item(), path)  # a NumPy scalar
    if hasattr(value, "__array__") and value.__array__().dtype.kind in "biufc":
        return {_KIND: "array", "value": encode(torch.as_tensor(value.__array__().copy()), path)}
    raise UnsupportedError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint without code cannot hold",
        code="compat-client-state",
        fix="Store its numbers, text, lists, dicts or tensors.",
    )


def decode(value: Any) -> Any:
    """Decode the result of `encode` into the original value."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(inner) for key, inner in value.items()}
    try:
        return _DECODE[value[_KIND]](value["value"])
    except CheckpointError:
        raise
    except Exception as error:  # whatever a decoder says of what no encoder wrote
        raise CheckpointError(
            f"the client state holds {str(value)[:200]}, which nothing wrote: {type(error).__name__}: {error}",
            code="compat-client-state",
            fix="Use another checkpoint; this one was changed by hand or damaged.",
        ) from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


_DECODE: Mapping[str, Any] = {
    "float": float,
    "dict": lambda pairs: {decode(key): decode(inner) for key, inner in pairs},
    "tuple": lambda items: tuple(decode(item) for item in items),
    "set": lambda items: {decode(item) for item in items},
    "frozenset": lambda items: frozenset(decode(item) for item in items),
    "tensor": lambda text: load_bytes(base64.b64decode(text))["t"],
    "array": lambda tensor: decode(tensor).numpy(),
    "bytes": base64.b64decode,
    "Namespace": lambda fields: argparse.Namespace(**decode(fields)),
    "SimpleNamespace": lambda fields: SimpleNamespace(**decode(fields)),
    "path": Path,
    "dtype": _dtype,
    "device": torch.device,
}


def same_everywhere(value: Any, group: Group) -> Any:
    """Rank 0's value on every rank: a checkpoint has one client state. Collective."""
    holder = [value]
    broadcast_object_list(holder, group=group, group_src=0)
    return holder[0]


# ---- folders


def name_of_tag(load_dir: str, tag: str | None, group: Group) -> str | None:
    """Return the tag to load: `tag`, or the content of `latest`; None selects the newest complete checkpoint. Collective.

    Raises:
        CheckpointError: the tag leads out of the directory ("ckpt-outside"); `latest` is broken, and nothing is sound ("ckpt-latest").
    """
    if tag is None:
        return latest_tag(load_dir, group)
    name: str = same_everywhere(str(tag), group)
    check_tag(load_dir, name)
    return name


def leave_signs(save_dir: str, tag: str, *, latest: bool, sharded: bool) -> None:
    """Write the files that clients expect beside the tag's folder.

    Called by a single rank, when the checkpoint is complete.

    Args:
        latest: Write the file `latest`.
        sharded: Write `zero_to_fp32.py`, as upstream does from stage 1.
    """
    folder = Path(save_dir)
    if sharded:
        replace_text(folder / "zero_to_fp32.py", _SCRIPT, 0o777)
    if latest:
        replace_text(folder / "latest", tag)


def leave_files(folder: str, module: Mapping[str, Tensor], facts: Mapping[str, Any], optim: str) -> None:
    """Write the files that programs expect in a checkpoint of upstream's, beside ours.

    Called by a single rank. Nothing here reads them. They hold only what torch.load(weights_only=True) can load: the
    weights, the caller's state, and the
    stage.

    Args:
        module: The model's weights, where upstream stores them in one file: below stage 3.
        facts: `zero_stage`, `partition_count`, `ds_version`, and what upstream stores beside the weights.
        optim: Path of the first rank's optimizer file.
    """
    stage = facts["zero_stage"]
    name = get_model_ckpt_name_for_rank(folder, "00")
    if stage == 3:
        name = f"{folder}/zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({"module": {key: value.detach().clone() for key, value in module.items()}, **facts}, name)
    if stage > 0:
        state = {key: facts[key] for key in ("zero_stage", "partition_count", "ds_version")}
        torch.save({"optimizer_state_dict": state}, optim)


# ---- upstream's helpers


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Clone nested containers with every tensor as a compact copy on `device`; the same tensor is copied once."""
    return _cloned(item, torch.device(device), {})


def _cloned(item: Any, device: torch.device, copies: dict[int, Tensor]) -> Any:
    if isinstance(item, Tensor):
        if id(item) not in copies:
            copies[id(item)] = item.detach().to(device=device, copy=True, memory_format=torch.contiguous_format)
        return copies[id(item)]
    if isinstance(item, list | tuple):
        return type(item)(_cloned(value, device, copies) for value in item)
    if isinstance(item, dict):
        return type(item)({key: _cloned(value, device, copies) for key, value in item.items()})
    return item


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Return the path of upstream's file of a model-parallel rank's weights, in the folder of a tag."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Return the path of upstream's file of a rank's optimizer state."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Return the path of upstream's file of a pipeline layer."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}-model_states.pt")


class TorchCheckpointEngine:
    """Files of torch's. The engine does not use it: its checkpoints are ds-ckpt's, so replacing a method has no effect there."""

    def __init__(self, config_params: Any = None) -> None:
        self.config = config_params

    def save(self, state_dict: Any, path: str) -> None:
        """Write a state dict with `torch.save`."""
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a state dict with `torch.load(weights_only=True)`."""
        return torch.load(io.BytesIO(Path(path).read_bytes()), map_location=map_location, weights_only=True)

    def commit(self, info: Any) -> bool:
        """Return True: a file is complete when `save` returns."""
        del info
        return True
