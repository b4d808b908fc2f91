"""Reading `.pt` files of others with as little trust as the format allows.

torch's weights-only unpickler builds tensors, containers, and what is on a list; nothing else is called. The few classes of
DeepSpeed on the list are replaced by records that only hold their fields, so its code need not be installed and never runs.
That is much safer than plain unpickling and still not safe against a hostile file as JSON is: hence `allow_pickle`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ds_config.errors import CheckpointError, UnsupportedError

__all__ = ["Record", "load_pt", "require_pickle"]


class Record:
    """A stand-in for a class of another program: its fields, without its code."""

    def __init__(self, *args: object) -> None:
        self.args = args


_KNOWN: Final[Sequence[tuple[Callable[..., Any], str]]] = (
    (Record, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Record, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Record, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Record, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (set, "builtins.set"),
)


def require_pickle(allowed: bool, what: str) -> None:
    """Raise UnsupportedError "ckpt-pickle" unless the caller said yes to a format that is made of pickles."""
    if not allowed:
        raise UnsupportedError(
            f"{what} is made of pickle files, which can be written to run code when they are read",
            code="ckpt-pickle",
            fix="If you trust where it comes from, say so: allow_pickle=True, or --allow-pickle on the command line.",
        )


def load_pt(path: str | os.PathLike[str]) -> Any:
    """The content of a `.pt` file, tensors mapped from the file (host memory is used as they are read).

    Raises:
        CheckpointError: "ckpt-not-found"; "ckpt-foreign": not such a file, or it wants code that is not on the list.
    """
    try:
        with torch.serialization.safe_globals(list(_KNOWN)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", code="ckpt-not-found", fix="Complete the checkpoint.") from error
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read safely: {str(error)[:500]}",
            code="ckpt-foreign",
            fix="The file is damaged, or holds objects that need the code of the program that wrote it.",
        ) from error
