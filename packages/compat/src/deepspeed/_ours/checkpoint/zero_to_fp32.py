"""`deepspeed.utils.zero_to_fp32`: whole fp32 weights from a checkpoint of ours or of upstream's."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed._ours.base.raising import refused
from ds_ckpt.convert import fp32
from ds_ckpt.convert.huggingface import write_hf
from ds_ckpt.convert.tensor_source import cast
from ds_config.regular_file import replacing

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """Load a full fp32 state dict from a ZeRO checkpoint. See `ds_ckpt.convert.fp32`.

    Upstream's files are read, too, through a restricted unpickler.
    """
    return dict(
        fp32.get_fp32_state_dict_from_zero_checkpoint(
            checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode, allow_pickle=True
        )
    )


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """Load the whole weights into a model that is not sharded, and return it."""
    return fp32.load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag, allow_pickle=True)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str, output_dir: str, max_shard_size: str | None = "5GB", safe_serialization: bool = False, tag: str
    | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Write the whole fp32 weights into `output_dir`: `pytorch_model.bin`, or safetensors of at most `max_shard_size`.

    Raises:
        ConfigError: `max_shard_size` is no size ("compat-argument").
    """
    out = Path(output_dir)
    if not safe_serialization:
        out.mkdir(parents=True, exist_ok=True)
        whole = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
        with replacing(out / "pytorch_model.bin") as draft, draft.open("wb") as file:
            torch.save(whole, file)
        return
    source = fp32.open_training(checkpoint_dir, tag, allow_pickle=True)
    model = cast(fp32.weights(source, exclude_frozen_parameters=exclude_frozen_parameters), "float32")
    write_hf(model, out, max_shard_bytes=_size(max_shard_size))


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


def _size(text: str | None) -> int:
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)B?\s*", text or "1000TB", re.IGNORECASE)
    if match is None:
        raise refused("shard-size", text)
    return int(float(match[1]) * _UNITS[match[2].upper()])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program `zero_to_fp32.py`: write the full fp32 weights of a checkpoint."""
    parser = argparse.ArgumentParser(description="Write the whole fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="folder of checkpoints, the one with the file `latest`")
    parser.add_argument("output_dir", help="folder to write into")
    parser.add_argument("--max_shard_size", default="5GB", help="largest safetensors file")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of pytorch_model.bin")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint; the newest complete one by default")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help=argparse.SUPPRESS)
    options = vars(parser.parse_args(arguments))
    options.pop("debug")
    convert_zero_checkpoint_to_fp32_state_dict(**options)
