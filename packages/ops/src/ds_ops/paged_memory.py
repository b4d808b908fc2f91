"""Host memory that the kernel may write out: files without a name, mapped.

Ordinary memory can only be swapped; a page of a mapped file returns to its file where memory is short, and comes back when it is
touched. The file system decides what that costs: an NVMe disk a few milliseconds a megabyte, tmpfs nothing gained.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_config.errors import PlanError

__all__ = ["open_nameless", "zeros_paged"]

_ALIGN_BYTES = 64


def open_nameless(folder: str) -> int:
    """Open a fresh unnamed file in `folder` and return its descriptor."""
    tmpfile = getattr(os, "O_TMPFILE", 0)
    if tmpfile:
        with contextlib.suppress(OSError):  # not every file system has it
            return os.open(folder, tmpfile | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fd, name = tempfile.mkstemp(prefix="ds-scratch-", dir=folder)
    os.unlink(name)
    return fd


def zeros_paged(numels: Sequence[int], dtype: torch.dtype, folder: str | None = None) -> list[Tensor]:
    """Allocate 1-D zero tensors on the CPU, one per length, as views of one mapped file; it ends with the last view.

    Args:
        folder: where the file lies; None for the system's folder of temporary files.
    Raises:
        PlanError: no file of that size can be made there ("offload-folder").
    """
    folder = folder or tempfile.gettempdir()
    offsets, end = [], 0
    for n in numels:
        offsets.append(end)
        end += -(-n * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
    if not end:
        return [torch.zeros(n, dtype=dtype, device="cpu") for n in numels]
    try:
        fd = open_nameless(folder)
        try:
            os.posix_fallocate(fd, 0, end)  # a full disk would end the process at some later step
            region = mmap.mmap(fd, end, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)
    except OSError as error:
        raise PlanError(
            f"no file of {end:,} bytes for paged states in {folder}: {error.strerror}",
            code="offload-folder",
            fix="Set paged to a folder on a disk with room, or leave it out.",
        ) from error
    whole = torch.frombuffer(region, dtype=torch.uint8)  # keeps the mapping alive
    return [whole[o : o + n * dtype.itemsize].view(dtype) for o, n in zip(offsets, numels, strict=True)]
