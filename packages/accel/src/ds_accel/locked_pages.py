"""Memory of the host that is page-locked where it lies: as many pages as were asked for, for as long as a tensor is there.

torch's own page-locked memory comes in powers of two and is kept by torch when it is freed. That is right for what comes and goes. Of what
stays as long as a training, it takes up to twice the bytes from the machine: a shard of 1.1 GB would take 2 GB.

The pages of a process belong to its children, too, until one of both writes: then the writer gets a copy, and a device would go on with the
page that is the other's. So children do not see these pages (MADV_DONTFORK), and nobody there may touch them.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

import torch
from torch import Tensor

import ds_accel.streams as streams

__all__ = ["LEAST_BYTES", "locked_pages"]

LEAST_BYTES = 1 << 20
"""Less is left to torch: its rounding costs little, and locking takes a driver call."""

_inherited: list[Any] = []  # of the process that this one was forked from
_waiting: list[Any] = []  # given back inside a capture


class _LockedMapping(mmap.mmap):
    """An anonymous mapping, which is unlocked before its memory is given back."""

    device: torch.device | None = None  # of the copies; None: it is not locked
    address = process = 0

    def __del__(self) -> None:
        if self.device is None or sys.is_finalizing():
            return
        if os.getpid() != self.process:  # there is something else at its addresses by now
            _inherited.append(self)
        elif streams.is_capturing(self.device):  # a graph that is recorded ends where somebody waits for the device
            _waiting.append(self)
        else:
            self.unlock()

    def unlock(self) -> None:
        device, self.device = self.device, None
        if device is not None:
            streams.unlock_pages(self.address, device)


def locked_pages(nbytes: int, device: torch.device) -> Tensor | None:
    """Allocate [nbytes] of page-locked memory of the host, uint8, zeros, at the start of a page; None where `device` has no such thing.

    Copies between it and `device` are queued, as with torch's page-locked memory (`streams.page_locked`), which is what to use where this
    returns None, and for fewer than `LEAST_BYTES`. It is unlocked when nobody has a view of it any more; that waits for the device. A process
    that was forked since sees nothing of it.

    Cost: a driver call that locks page by page.
    """
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    if nbytes < LEAST_BYTES or not hasattr(mmap, "MADV_DONTFORK"):
        return None
    while _waiting:
        _waiting.pop().unlock()
    region = _LockedMapping(-1, nbytes, flags=flags)
    region.madvise(mmap.MADV_DONTFORK)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.uint8)
    if not streams.lock_pages(memory.data_ptr(), nbytes, device):
        return None
    region.device, region.address, region.process = device, memory.data_ptr(), os.getpid()
    return streams.host_memory(memory)
