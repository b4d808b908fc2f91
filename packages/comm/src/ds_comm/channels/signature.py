"""The signature of a message: dtypes, shapes and places, sent once, and where each byte of it goes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ds_accel.streams import copy_to
from ds_config.errors import CommError

__all__ = ["CellPiece", "Leaf", "MessageSignature"]

Leaf = tuple[torch.dtype, torch.Size, bool]
_ALIGNED = 64
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class CellPiece:
    """Bytes [start, stop) of leaf `leaf`, at byte `place` of a cell."""

    leaf: int
    start: int
    stop: int
    place: int


@dataclass(frozen=True)
class MessageSignature:
    """dtype and shape of each tensor of a message, and whether it is on a device. The leaves lie one after the other, aligned to 64 bytes."""

    leaves: tuple[Leaf, ...]

    @staticmethod
    def key(tensors: Sequence[Tensor]) -> tuple[Leaf, ...]:
        """Return dtype, shape and whether it is on a device of each tensor, equal for messages of one signature."""
        return tuple([(tensor.dtype, tensor.shape, tensor.device != _HOST) for tensor in tensors])

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each leaf."""
        return [shape.numel() * dtype.itemsize for dtype, shape, _ in self.leaves]

    @cached_property
    def starts(self) -> list[int]:
        """Where each leaf begins."""
        offsets, at = [], 0
        for size in self.sizes:
            offsets.append(at)
            at += -(-size // _ALIGNED) * _ALIGNED
        return offsets

    @cached_property
    def strides(self) -> list[tuple[int, ...]]:
        """Strides of each leaf in elements: rows lie one after the other."""
        return [torch.empty(shape, device="meta").stride() for _, shape, _ in self.leaves]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.starts[-1] + self.sizes[-1] if self.leaves else 0

    @cached_property
    def on_device(self) -> bool:
        """Whether any tensor is on a device."""
        return any(there for _, _, there in self.leaves)

    def empties(self) -> list[Tensor]:
        """Allocate uninitialized tensors of this signature in host memory."""
        return [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape, _ in self.leaves]

    def placed(self, tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
        """Return the tensors, of which those that were on a device of the sender are copied to `device`, valid on its current stream."""
        return tuple(
            copy_to(tensor, device) if leaf[2] else tensor for tensor, leaf in zip(tensors, self.leaves, strict=True)
        )

    def cells(self, cell_bytes: int) -> list[list[CellPiece]]:
        """List the pieces in each cell of a message split into cells; at least one cell."""
        return [list(self._pieces(at, at + cell_bytes)) for at in range(0, max(self.nbytes, 1), cell_bytes)]

    def _pieces(self, first: int, last: int) -> Iterator[CellPiece]:
        for leaf, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            low, high = max(start, first), min(start + size, last)
            if low < high:
                yield CellPiece(leaf, low - start, high - start, low - first)

    def text(self) -> bytes:
        """Encode this signature as JSON for the other rank."""
        leaves = [[str(dtype).removeprefix("torch."), list(shape), there] for dtype, shape, there in self.leaves]
        return json.dumps(leaves, separators=(",", ":")).encode()

    @staticmethod
    def parse(text: bytes) -> MessageSignature:
        """Parse a signature that another rank encoded with `text`.

        Raises:
            CommError: `text` is not a signature ("comm-metadata").
        """
        try:
            leaves = [(getattr(torch, name), torch.Size(shape), bool(there)) for name, shape, there in json.loads(text)]
            if not all(isinstance(dtype, torch.dtype) and min(shape, default=0) >= 0 for dtype, shape, _ in leaves):
                raise TypeError("no dtype, or a negative size")
        except (ValueError, TypeError, AttributeError) as error:
            raise CommError(
                f"another rank told a signature that is none: {text[:80]!r} ({error})",
                code="comm-metadata",
                fix="See whether all ranks run one version of the packages.",
            ) from error
        return MessageSignature(tuple(leaves))
