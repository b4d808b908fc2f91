"""Real text that every machine has: the source of Python's own standard library.

Files are taken in the order of their names and split by a hash of the name, so that every process, run and resume sees
the same bytes, and no file is in both parts.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Blocks", "read_text", "unigram_entropy"]

_SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_VALIDATION_SHARE = 16  # one file in 16
_MAX_BYTES = 12_000_000


def read_text(folder: Path | None = None) -> tuple[bytes, bytes]:
    """The training and the validation text.

    Args:
        folder: Where to look for .py files; by default the standard library of the running Python.
    Raises:
        FileNotFoundError: there are no .py files, or too few to fill both parts.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    total = 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _SKIP.isdisjoint(name.split("/")) and total < _MAX_BYTES:
            held_out = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _VALIDATION_SHARE == 0
            text = path.read_bytes()
            parts[held_out].append(text)
            total += len(text)
    if not parts[True] or not parts[False]:
        raise FileNotFoundError(
            f"found {len(parts[False])} training and {len(parts[True])} validation .py files under {root}; "
            "this example needs some of both. Pass --data FOLDER with Python sources."
        )
    return b"\n".join(parts[False]), b"\n".join(parts[True])


def unigram_entropy(text: bytes) -> float:
    """Nats per byte of the best model that knows only how often each byte occurs."""
    counts = Counter(text)
    return -sum(n / len(text) * math.log(n / len(text)) for n in counts.values())


class Blocks(Dataset[Tensor]):
    """`text` cut into blocks of `context` bytes, each with the byte that follows: [context + 1], int64."""

    def __init__(self, text: bytes, context: int) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.data[start : start + self.context + 1].long()
