"""`deepspeed.runtime.state_dict_factory`: Megatron's checkpoints of one number of model-parallel ranks, read by another.

A file is a rank's; its weights lie under `module` or `model`. They are joined or cut by what their names say: outputs of a column-parallel
layer and rows of the vocabulary along dim 0, inputs of a row-parallel one along dim 1; others are the same on every rank. The fused weight of
queries, keys and values is one third after the other in version 0, by heads in 1.0 and 2.0 (Megatron's `checkpoint_version`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed._ours.base.raising import refused, wrong_argument
from deepspeed._ours.checkpoint.checkpoint_api import TorchCheckpointEngine

_ROWS = ("mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias", "word_embeddings.weight", "final_linear.weight")
_COLUMNS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
_FUSED = "attention.query_key_value"
_AUTO = "auto"


class MegatronSDLoader:
    """Loads the state of one of `mp_world_size` ranks.

    Args:
        ckpt_list: Files by rank.
        version: Of the fused weight; None: as the files say, else 0.
        checkpoint_engine: Has `load(path, map_location=)`; None: torch.load of weights only.
    Raises:
        ConfigError: no file, or not as many as the first one says; an AssertionError, too ("compat-argument").
    """

    def __init__(self, ckpt_list: Sequence[str], version: float | None, checkpoint_engine: Any = None) -> None:
        self.ckpt_list, self.version = list(ckpt_list), version
        self.checkpoint_engine = checkpoint_engine or TorchCheckpointEngine()
        self.module_key: str | None = None
        if not self.ckpt_list:
            raise _wrong("ckpt_list is empty", "Give a file for each rank that saved.")
        saved = self._read(0).get("mp_world_size")
        if saved not in (None, len(self.ckpt_list)):
            raise _wrong(f"{len(self.ckpt_list)} files of a checkpoint of {saved} ranks", "Give all of them.")

    def load(
        self, mp_world_size: int, mp_rank: int, module_key: str | None = _AUTO, is_pipe_parallel: bool = False,
        quantize: bool = False, quantize_bits: int = 8, quantize_groups: int = 64, mlp_extra_grouping: bool = True,
    ) -> tuple[str, Any, tuple[None, int]]:  # fmt: skip
        """Return the path of a file, the state, and (None, how many files were joined).

        Args:
            module_key: Under which the weights lie; None: the state is the weights.
            is_pipe_parallel: Files with a `module_key` have no layers in them, and are the same on every rank.
        Raises:
            ConfigError: the numbers of ranks do not divide; an AssertionError, too ("compat-argument").
            UnsupportedError: quantize=True ("compat-argument").
        """
        del quantize_bits, quantize_groups, mlp_extra_grouping
        if quantize:
            raise refused("megatron-quantize")
        self.module_key, files = module_key, len(self.ckpt_list)
        if is_pipe_parallel and module_key is not None and mp_world_size != files:
            mp_world_size, mp_rank = files, 0
        path = self.ckpt_list[mp_rank * files // mp_world_size]
        if files == mp_world_size:
            return path, self._read(mp_rank), (None, 1)
        if files > mp_world_size:
            state, _, count = self.merge_state_dict(mp_world_size, mp_rank)
            return path, state, (None, count)
        return path, self.split_state_dict(mp_world_size, mp_rank)[0], (None, 1)

    def merge_state_dict(self, mp_world_size: int, mp_rank: int) -> tuple[Any, None, int]:
        """Join the files of a rank: the state, None, how many they were."""
        count = _times(len(self.ckpt_list), mp_world_size)
        self.sanity_check(self.ckpt_list[0])
        states = [self._read(i) for i in range(count * mp_rank, count * (mp_rank + 1))]
        modules = [self.get_module(state) for state in states]
        version = self.get_checkpoint_version(states[0])
        joined = {key: _joined(key, [module[key] for module in modules], version) for key in modules[0]}
        return self.set_module(copy.copy(states[0]), joined), None, count

    def split_state_dict(self, mp_world_size: int, mp_rank: int) -> tuple[Any, None]:
        """Cut a file: the part of a rank, and None."""
        count = _times(mp_world_size, len(self.ckpt_list))
        state, part = self._read(mp_rank // count), mp_rank % count
        version = self.get_checkpoint_version(state)
        cut = {key: _cut(key, value, version, (part, count)) for key, value in self.get_module(state).items()}
        return self.set_module(copy.copy(state), cut), None

    def get_module(self, sd: Any) -> Any:
        """Return the weights in a state."""
        key = self._choose_module_key(sd) if self.module_key == _AUTO else self.module_key
        return sd if key is None else sd[key]

    def set_module(self, sd: Any, module: Any) -> Any:
        """Replace the weights in a state; the state."""
        key = self._choose_module_key(sd) if self.module_key == _AUTO else self.module_key
        if key is None:
            return module
        sd[key] = module
        return sd

    def sanity_check(self, ckpt_file_name: str) -> None:
        """Check that a file has layers; programs that join files of embeddings replace this.

        Raises:
            ConfigError: it has not; an AssertionError, too ("compat-argument").
        """
        names = list(self.get_module(self._load(ckpt_file_name)))
        for part in (*_COLUMNS, _FUSED, *_ROWS[:2]):
            if not any(part in name for name in names):
                raise _wrong(f"key: {part} is not found in the checkpoint {ckpt_file_name}", "Give a file with layers.")

    def get_checkpoint_version(self, state_dict: Mapping[str, Any]) -> float:
        """Return the version of the fused weight."""
        return state_dict.get("checkpoint_version", 0) if self.version is None else self.version

    def _choose_module_key(self, sd: Mapping[str, Any]) -> str:
        keys = [key for key in ("module", "model") if key in sd]
        if len(keys) != 1:
            raise _wrong(f"a checkpoint with {' and '.join(keys) or 'neither module nor model'}", "Pass module_key=.")
        return keys[0]

    def _read(self, number: int) -> Any:
        return self._load(self.ckpt_list[number])

    def _load(self, path: str) -> Any:
        return self.checkpoint_engine.load(path, map_location="cpu")


class SDLoaderFactory:
    """Makes a loader of what a checkpoint's JSON file says."""

    @staticmethod
    def get_sd_loader_json(json_file: str | Mapping[str, Any], checkpoint_engine: Any = None) -> Any:
        """Return a loader; of types "bloom" and "ds_model" what the file says, which init_inference takes."""
        data: Mapping[str, Any] = json.loads(Path(json_file).read_text()) if isinstance(json_file, str) else json_file
        if data["type"].lower() in ("bloom", "ds_model"):
            return data
        return SDLoaderFactory.get_sd_loader(data["checkpoints"], checkpoint_engine, data["type"], data["version"])

    @staticmethod
    def get_sd_loader(
        ckpt_list: Sequence[str], checkpoint_engine: Any = None, sd_type: str = "Megatron", version: float | None = None
    ) -> MegatronSDLoader:
        """Return a loader of files by rank.

        Raises:
            ConfigError: another type; an AssertionError, too ("compat-argument").
        """
        if sd_type != "Megatron":
            raise _wrong(f"{sd_type} checkpoint type is not supported", 'Use "Megatron".')
        return MegatronSDLoader(ckpt_list, version, checkpoint_engine)


def _joined(key: str, parts: Sequence[Tensor], version: float) -> Any:
    if any(name in key for name in _COLUMNS):
        return torch.cat(list(parts), 1)
    if _FUSED in key:
        return torch.cat(
            [third for thirds in zip(*(_thirds(p, version) for p in parts), strict=True) for third in thirds]
        )
    return torch.cat(list(parts)) if any(name in key for name in _ROWS) else parts[0]


def _cut(key: str, value: Tensor, version: float, part: tuple[int, int]) -> Any:
    if any(name in key for name in _COLUMNS):
        return _piece(key, value, part, 1)
    if _FUSED in key:
        return torch.cat([_piece(key, third, part, 0) for third in _thirds(value, version)])
    return _piece(key, value, part, 0) if any(name in key for name in _ROWS) else value


def _thirds(value: Tensor, version: float) -> Sequence[Tensor]:
    """Split into what is cut by itself: queries, keys and values of version 0, the whole of those that lie by heads."""
    if version not in (0, 1.0, 2.0):
        raise _wrong(f"checkpoint version: {version} is not supported", "Use 0, 1.0 or 2.0.")
    return (value,) if version else value.split(_times(value.shape[0], 3))


def _piece(key: str, value: Tensor, part: tuple[int, int], dim: int) -> Tensor:
    number, count = part
    if value.shape[dim] % count:
        raise _wrong(f"{key} {list(value.shape)} cannot be cut in {count} along dim {dim}", "Choose another degree.")
    return value.chunk(count, dim)[number].clone()


def _times(larger: int, smaller: int) -> int:
    if larger % smaller:
        raise _wrong(f"{smaller} does not divide {larger}", "Use numbers of ranks that divide each other.")
    return larger // smaller


def _wrong(what: str, fix: str) -> Exception:
    return wrong_argument(what, fix, AssertionError)
