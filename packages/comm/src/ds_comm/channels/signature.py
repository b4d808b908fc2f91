"""The signature of a message: dtypes and shapes, sent once, and where each byte of it goes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ds_config.errors import CommError

__all__ = ["CellPiece", "Leaf", "MessageSignature"]

Leaf = tuple[torch.dtype, torch.Size]
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class CellPiece:
    """Bytes [start, stop) of leaf `leaf`, at byte `place` of a cell."""

    leaf: int
    start: int
    stop: int
    place: int


@dataclass(frozen=True)
class MessageSignature:
    """dtype and shape of each tensor of a message. The leaves lie one after the other, aligned to 64 bytes."""

    leaves: tuple[Leaf, ...]

    @staticmethod
    def key(tensors: Sequence[Tensor]) -> tuple[Leaf, ...]:
        """Return the dtype and shape of each tensor, equal for messages of one signature."""
        return tuple([(tensor.dtype, tensor.shape) for tensor in tensors])

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each leaf."""
        return [shape.numel() * dtype.itemsize for dtype, shape in self.leaves]

    @cached_property
    def starts(self) -> list[int]:
        """Where each leaf begins."""
        offsets, at = [], 0
        for size in self.sizes:
            offsets.append(at)
            at += -(-size // _ALIGNED) * _ALIGNED
        return offsets

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.starts[-1] + self.sizes[-1] if self.leaves else 0

    def empties(self, device: torch.device | None = None) -> list[Tensor]:
        """Allocate uninitialized tensors of this signature on `device`."""
        return [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in self.leaves]

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
        leaves = [[str(dtype).removeprefix("torch."), list(shape)] for dtype, shape in self.leaves]
        return json.dumps(leaves, separators=(",", ":")).encode()

    @staticmethod
    def parse(text: bytes) -> MessageSignature:
        """Parse a signature that another rank encoded with `text`.

        Raises:
            CommError: `text` is not a signature ("comm-metadata").
        """
        try:
            leaves = [(getattr(torch, name), torch.Size(shape)) for name, shape in json.loads(text)]
            if not all(isinstance(dtype, torch.dtype) and min(shape, default=0) >= 0 for dtype, shape in leaves):
                raise TypeError("no dtype, or a negative size")
        except (ValueError, TypeError, AttributeError) as error:
            raise CommError(
                f"another rank told a signature that is none: {text[:80]!r} ({error})",
                code="comm-metadata",
                fix="See whether all ranks run one version of the packages.",
            ) from error
        return MessageSignature(tuple(leaves))
