"""Small things that programs import by name: formats of inference, addresses of fragments, calls over lists of tensors, autocast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from deepspeed._ours.base.raising import refused


class DtypeEnum(Enum):
    """Formats of inference, each with the words for it."""

    fp16 = (torch.float16, "torch.float16", "fp16", "float16", "half")
    fp32 = (torch.float32, "torch.float32", "fp32", "float32", "float")
    bf16 = (torch.bfloat16, "torch.bfloat16", "bf16", "bfloat16", "bfloat")
    int8 = (torch.int8, "torch.int8", "int8")

    @classmethod
    def from_str(cls, value: str) -> DtypeEnum:
        """Return the format of a word.

        Raises:
            ConfigError: there is none; a ValueError, too ("compat-argument").
        """
        for member in cls:
            if value in member.value:
                return member
        raise refused("format-word", value, ", ".join(cls.__members__))


@dataclass
class fragment_address:  # noqa: N801  upstream's name
    """Where a parameter lies in a flat tensor, in elements. Files that DeepSpeed wrote name it: `torch.serialization.add_safe_globals` takes it."""

    numel: int
    start: int


fragment_address.__module__ = "deepspeed.utils.tensor_fragment"


def autocast_if_enabled(engine: Any) -> AbstractContextManager[Any]:
    """Return the context of `torch_autocast` that the engine's forward runs in; one that does nothing where it is off."""
    context: AbstractContextManager[Any] = engine._autocast()
    return context


class MultiTensorApply:
    """Calls an operation over lists of tensors, which goes through them by `chunk_size` elements."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        """Call `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
