"""`.pt` files of others: read with as little trust as the format allows, and written without the code of others.

torch's weights-only unpickler builds tensors, containers, and what is on a list; nothing else is called. Classes of programs, and
DeepSpeed's, are replaced by records that only hold their fields, so their code need not be installed and never runs.
That is much safer than plain unpickling and still not safe against a hostile file as JSON is: hence `allow_pickle`.

Written files name the few classes that DeepSpeed's loader insists on, by the names it has for them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ds_ckpt.convert.pickled_objects import PickledObject, restored, stand_in
from ds_config.errors import CheckpointError, UnsupportedError

__all__ = [
    "DynamicLossScaler",
    "FragmentAddress",
    "LossScaler",
    "SubparamShape",
    "load_pt",
    "require_pickle",
    "save_pt",
]


class LossScaler:
    """Fields of DeepSpeed's constant loss scale."""

    def __init__(self, scale: float) -> None:
        self.cur_scale, self.dynamic = scale, False


class DynamicLossScaler:
    """Fields of DeepSpeed's dynamic loss scale.

    Args:
        state: As ds_zero keeps it: scale, tolerance, step, last_overflow.
        rule: The `fp16` section of the configuration.
    """

    def __init__(self, state: Mapping[str, Any], rule: Mapping[str, Any]) -> None:
        self.cur_scale, self.cur_hysteresis = float(state["scale"]), int(state["tolerance"])
        self.cur_iter, self.last_overflow_iter = int(state["step"]), int(state["last_overflow"])
        self.scale_factor, self.dynamic, self.raise_error_at_min_scale = 2.0, True, False
        self.scale_window = int(rule.get("loss_scale_window", 1000))
        self.min_scale = float(rule.get("min_loss_scale", 1))
        self.delayed_shift = int(rule.get("hysteresis", 2))
        self.consecutive_hysteresis = bool(rule.get("consecutive_hysteresis", False))
        self.dtype = torch.float16


def scaler_of(meta: Mapping[str, Any]) -> LossScaler | DynamicLossScaler | None:
    """Return DeepSpeed's form of the loss scale in the meta of a checkpoint of ours; None without one."""
    state = (meta.get("optimizer") or {}).get("loss_scale")
    rule = dict((meta.get("config") or {}).get("fp16") or {})
    if state is None:
        return None
    return LossScaler(float(state["scale"])) if float(rule.get("loss_scale") or 0) else DynamicLossScaler(state, rule)


def clip_of(meta: Mapping[str, Any]) -> float:
    """Return the gradient norm that a run clipped to; where its configuration does not say it, the default of both engines."""
    clip = (meta.get("config") or {}).get("gradient_clipping", 1.0)
    return float(clip or 0.0)


class FragmentAddress:
    """Where a parameter lies in a flat tensor, in elements."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


@dataclass
class SubparamShape:
    """Of a parameter that is several in one: the sizes of these in a dimension, and which that is."""

    patterns: list[str]
    shape: Sequence[Any]
    partition_dim: int

    def __post_init__(self) -> None:
        self.shape = tuple(tuple(size) if isinstance(size, list | tuple) else size for size in self.shape)


_KNOWN: Final[Sequence[tuple[Callable[..., Any], str]]] = (
    (PickledObject, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (PickledObject, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (PickledObject, "deepspeed.utils.tensor_fragment.fragment_address"),
    (PickledObject, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (set, "builtins.set"),
)


_CODE = ("builtins.", "torch.")  # of these only what is on torch's list


_WRITTEN: Final[Mapping[type, str]] = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler LossScaler",
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler",
    FragmentAddress: "deepspeed.utils.tensor_fragment fragment_address",
    SubparamShape: "deepspeed.checkpoint.universal_checkpoint SubparamShape",
}


class _Naming(pickle._Pickler):
    """Writes the classes above under the names they have there. The pickler in C does not let a name be chosen."""

    def save_global(self, obj: object, name: str | None = None) -> None:
        there = _WRITTEN.get(obj) if isinstance(obj, type) else None
        if there is None:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + there.replace(" ", "\n").encode() + b"\n")  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


class _PickleModule:
    """What `torch.save` takes for the module `pickle`."""

    Pickler = _Naming


def save_pt(content: Any, path: str | os.PathLike[str]) -> None:
    """Write a `.pt` file that DeepSpeed reads; tensors that are the same object are stored once."""
    torch.save(content, path, pickle_module=_PickleModule)


def require_pickle(allowed: bool, what: str) -> None:
    """Raise UnsupportedError "ckpt-pickle" unless the caller said yes to a format that is made of pickles."""
    if not allowed:
        raise UnsupportedError(
            f"{what} is made of pickle files, which can be written to run code when they are read",
            code="ckpt-pickle",
            fix="If you trust where it comes from, say so: allow_pickle=True, or --allow-pickle on the command line.",
        )


def load_pt(path: str | os.PathLike[str]) -> Any:
    """Load a `.pt` file with its tensors mapped from the file (host memory is used as they are read).

    Raises:
        CheckpointError: "ckpt-not-found"; "ckpt-foreign": no `.pt` file, or a file that needs code that is not on the
        list.
    """
    try:
        with torch.serialization.safe_globals(list(_KNOWN)):
            strangers: list[Any] = [
                (stand_in(name), name)
                for name in torch.serialization.get_unsafe_globals_in_checkpoint(path)
                if not name.startswith(_CODE)
            ]
            with torch.serialization.safe_globals(strangers):
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            return restored(content) if strangers else content
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", code="ckpt-not-found", fix="Complete the checkpoint.") from error
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read safely: {str(error)[:500]}",
            code="ckpt-foreign",
            fix="The file is damaged, or holds objects that need the code of the program that wrote it.",
        ) from error
