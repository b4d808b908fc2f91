"""Checkpoint folders as clients expect them: `latest`, the tag's folder, `zero_to_fp32.py`; our format inside; and whole weights out of one."""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed._ours.base.forwarding import answers
from deepspeed._ours.base.raising import raising, refused
from ds_ckpt.convert import fp32
from ds_ckpt.convert.deepspeed_folders import check_tag
from ds_ckpt.convert.huggingface import write_hf
from ds_ckpt.convert.tensor_source import cast
from ds_comm import Group, broadcast_object_list
from ds_config.regular_file import replace_text, replacing
from ds_engine.deepspeed_checkpoints import latest_tag

_log = logging.getLogger("DeepSpeed")
_SCRIPTS = {
    "zero_to_fp32": "Write the whole fp32 weights of the checkpoints beside this file: python zero_to_fp32.py . OUTPUT_DIR",
    "zero_to_torch": "Write the whole weights of the checkpoints beside this file: python zero_to_torch.py . OUTPUT_DIR --dtype bf16",
}
_SCRIPT = '''#!/usr/bin/env python3
"""{what}"""

import runpy

if __name__ == "__main__":
    runpy.run_module("deepspeed.utils.{name}", run_name="__main__")
'''
# Where DeepSpeed is installed in place of the facade, this runs DeepSpeed's, whose module has no `main`.


# ---- folders


def same_everywhere(value: Any, group: Group) -> Any:
    """Rank 0's value on every rank. Collective."""
    holder = [value]
    broadcast_object_list(holder, group=group, group_src=0)
    return holder[0]


def name_of_tag(load_dir: str, tag: str | None, group: Group, universal: bool = False) -> str | None:
    """Return the tag to load: `tag`, or the content of `latest`; None selects the newest complete checkpoint. Collective.

    With `universal` the file `latest_universal` goes before `latest`.

    Raises:
        CheckpointError: the tag leads out of the directory ("ckpt-outside"); `latest` is broken, and nothing is sound ("ckpt-latest").
    """
    if tag is None:
        return latest_tag(load_dir, group, universal)
    name: str = same_everywhere(str(tag), group)
    check_tag(load_dir, name)
    return name


def leave_signs(save_dir: str, tag: str, *, latest: bool, sharded: bool) -> None:
    """Write the files that clients expect beside the tag's folder.

    Called by a single rank, when the checkpoint is complete.

    Args:
        latest: Write the file `latest`.
        sharded: Write `zero_to_fp32.py` and `zero_to_torch.py`, as upstream does from stage 1.
    """
    folder = Path(save_dir)
    for name, what in _SCRIPTS.items() if sharded else ():
        replace_text(folder / f"{name}.py", _SCRIPT.format(name=name, what=what), 0o777)
    if latest:
        replace_text(folder / "latest", tag)


def leave_files(folder: str, module: Mapping[str, Tensor], facts: Mapping[str, Any], optim: str) -> None:
    """Write the files that programs expect in a checkpoint of upstream's, beside ours.

    Called by a single rank. Nothing here reads them. They hold the weights, the caller's state, and the stage, which
    torch.load(weights_only=True) can load unless the state has more than numbers, texts, containers and tensors. Entries that
    pickle cannot write are left out, with a warning.

    Args:
        module: The model's weights, where upstream stores them in one file: below stage 3.
        facts: `zero_stage`, `partition_count`, `ds_version`, and what upstream stores beside the weights.
        optim: Path of the first rank's optimizer file.
    """
    stage = facts["zero_stage"]
    name = get_model_ckpt_name_for_rank(folder, "00")
    if stage == 3:
        name = f"{folder}/zero_pp_rank_0_mp_rank_00_model_states.pt"
    leave_model(name, module, facts)
    if stage > 0:
        _save(
            {"optimizer_state_dict": {key: facts[key] for key in ("zero_stage", "partition_count", "ds_version")}},
            optim,
        )


def leave_model(name: str, module: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a model's file of upstream's: `module` and the facts, without those that pickle cannot write."""
    weights = clone_tensors_for_torch_save(dict(module))  # of Megatron-DeepSpeed's models a dict of dicts
    try:
        _save({"module": weights, **facts}, name)
    except OSError:
        raise
    except Exception as error:  # of a class that pickle cannot import, which the checkpoint can hold
        storable = {key: value for key, value in facts.items() if _is_picklable(value)}
        _log.warning("%s lacks %s: %s", name, sorted(map(str, set(facts) - set(storable))), error)
        _save({"module": weights, **storable}, name)


def _save(value: Any, path: str) -> None:
    """Write all of it or nothing."""
    with replacing(path) as draft, draft.open("wb") as file:
        torch.save(value, file)


def _is_picklable(value: Any) -> bool:
    try:
        torch.save(value, io.BytesIO())
    except Exception:  # whatever a value says of being pickled
        return False
    return True


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

    commit = answers(True, "Return True: a file is complete when `save` returns.")


OUTPUT_DTYPE_NAMES = {
    "float32": torch.float32, "fp32": torch.float32, "float16": torch.float16, "fp16": torch.float16,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
}  # fmt: skip
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """Load a full fp32 state dict from a ZeRO checkpoint. See `ds_ckpt.convert.fp32`.

    Upstream's files are read, too, through a restricted unpickler.
    """
    read = _not_found(tag)(fp32.get_fp32_state_dict_from_zero_checkpoint)
    return dict(read(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode, allow_pickle=True))


def _not_found(tag: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return raising(ValueError if tag is None else FileNotFoundError, "ckpt-not-found")


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """Load the whole weights into a model that is not sharded, on the CPU, and return it.

    Names that only one of them has are told in a warning, and left as they are.
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    apart = model.cpu().load_state_dict(weights, strict=False)
    if any(apart):
        _log.warning("%s and the model differ: %s", checkpoint_dir, apart)
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str, output_dir: str, dtype: str | torch.dtype = torch.float32, max_shard_size: str | int | None =
    "5GB", safe_serialization: bool = False, tag: str | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Write the whole weights into `output_dir`: `pytorch_model.bin` or `model.safetensors`, in files of at most `max_shard_size`.

    Files of a former conversion are replaced.

    Args:
        dtype: Of floating-point tensors; others keep theirs.

    Raises:
        ConfigError: `max_shard_size` is no size, or `dtype` none of `OUTPUT_DTYPE_NAMES` ("compat-argument").
    """
    wanted = OUTPUT_DTYPE_NAMES.get(str(dtype).removeprefix("torch.").lower())
    if wanted is None:
        raise refused("output-dtype", dtype, ", ".join(sorted(OUTPUT_DTYPE_NAMES)))
    limit = _size(max_shard_size)
    stored = _not_found(tag)(fp32.open_training)(checkpoint_dir, tag, allow_pickle=True)
    source = fp32.weights(stored, exclude_frozen_parameters=exclude_frozen_parameters)
    model = cast(source, str(wanted).removeprefix("torch."))
    write_hf(model, output_dir, max_shard_bytes=limit, pickled=not safe_serialization, overwrite=True)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str, output_dir: str, max_shard_size: str | int | None = "5GB", safe_serialization: bool = False,
    tag: str | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Write the whole fp32 weights, see `convert_zero_checkpoint_to_state_dict`."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """List upstream's optimizer files in the folder of a tag.

    Raises:
        CheckpointError: there are none, as in checkpoints of ours ("compat-files").
    """
    return _files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    """List upstream's model files in the folder of a tag, by their numbers. Raises as `get_optim_files`."""
    return _files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """Return the path of upstream's model file of the first rank. Raises as `get_optim_files`."""
    name = "mp_rank_00_model_states.pt" if zero_stage <= 2 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    return _files(checkpoint_dir, name)[0]


def _files(folder: str, pattern: str) -> list[str]:
    paths = sorted(map(str, Path(folder).glob(pattern)), key=_by_number)
    if not paths:
        raise refused("no-files", folder, pattern)
    return paths


def _by_number(path: str) -> list[Any]:
    # 2 before 10, as files of ranks are counted.
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]


def _size(text: str | int | None) -> int:
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)B?\s*", str(text or "1000TB"), re.IGNORECASE)
    if match is None:
        raise refused("shard-size", text)
    return int(float(match[1]) * _UNITS[match[2].upper()])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program `zero_to_fp32.py`: write the full fp32 weights of a checkpoint."""
    convert_zero_checkpoint_to_fp32_state_dict(**_options(_parser("fp32 "), arguments))


def main_with_dtype(arguments: Sequence[str] | None = None) -> None:
    """Run the program `zero_to_torch.py`: write the full weights of a checkpoint in the dtype that is asked for."""
    parser = _parser("")
    parser.add_argument("--dtype", required=True, choices=sorted(OUTPUT_DTYPE_NAMES), help="of floating-point tensors")
    convert_zero_checkpoint_to_state_dict(**_options(parser, arguments))


def _parser(kind: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Write the whole {kind}weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="folder of checkpoints, the one with the file `latest`")
    parser.add_argument("output_dir", help="folder to write into")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of pytorch_model.bin")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint; the newest complete one by default")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help=argparse.SUPPRESS)
    return parser


def _options(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> dict[str, Any]:
    options = vars(parser.parse_args(arguments))
    options.pop("debug")
    return options
