"""What rehearsed ranks told each other: small messages of integers, so that a rank finds what one that was rehearsed before it would send.

Shapes, sizes, pickled objects and numbers of signatures travel as integers; without them a stage of a pipeline does not know what its
input looks like. Numbers with a fraction are not kept: what they would be is nobody's business here.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["MessageBook"]

_MOST_BYTES = 1 << 20


class MessageBook:
    """Messages by channel, in the order in which they were sent.

    Args:
        folder: Where the books of the ranks of one rehearsed world are; None: nothing is kept or known.
        rank: Of this process in the world.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._written: dict[str, list[str | None]] = {}
        self._known: dict[int, dict[str, list[str | None]]] = {}
        self._read: dict[tuple[int, str], int] = {}

    @staticmethod
    def keeps(tensor: Tensor) -> bool:
        """Whether such a message is kept."""
        whole = not tensor.is_floating_point() and not tensor.is_complex()
        return whole and tensor.device.type == "cpu" and tensor.nbytes <= _MOST_BYTES

    def write(self, channel: str, tensor: Tensor) -> None:
        """Note the next message of a channel of this rank."""
        if self._folder is not None:
            text = base64.b64encode(_bytes_of(tensor)).decode() if self.keeps(tensor) else None
            self._written.setdefault(channel, []).append(text)

    def knows(self, source: int) -> bool:
        """Whether rank `source` of the world was rehearsed before."""
        return self._folder is not None and (source in self._known or _file(self._folder, source).exists())

    def read(self, source: int, channel: str, tensor: Tensor) -> bool:
        """Copy the next message of a channel of rank `source` into `tensor`; return False where there is none that was kept.

        Messages beyond the last one are not there: ranks that make equally many steps never wait for one.
        """
        if self._folder is None or not self.knows(source):
            return False
        if source not in self._known:
            self._known[source] = json.loads(_file(self._folder, source).read_text())
        messages, at = self._known[source].get(channel, []), self._read.get((source, channel), 0)
        self._read[source, channel] = at + 1
        if at >= len(messages) or (text := messages[at]) is None:
            return False
        data = (
            torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            if text
            else torch.empty(0, device="cpu")
        )
        if data.numel() != tensor.nbytes:
            return False
        if text:
            tensor.view(-1).view(torch.uint8).copy_(data) if tensor.dim() else tensor.copy_(data.view(tensor.dtype)[0])
        return True

    def save(self) -> None:
        """Write what this rank sent, for ranks that are rehearsed later."""
        if self._folder is not None:
            _file(self._folder, self._rank).write_text(json.dumps(self._written))


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _file(folder: Path, rank: int) -> Path:
    return folder / f"messages-{rank}.json"
