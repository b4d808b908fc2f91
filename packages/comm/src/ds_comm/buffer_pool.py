"""Flat buffers that are used again, so that a steady step allocates nothing.

A *pool* hands out tensors by (elements, dtype, device) and takes them back. A buffer that an unfinished collective writes or reads must
not be given back before its wait. Memory of a device returns to torch's allocator, which keeps it, too, and gives it to activations
meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ds_accel import streams

__all__ = ["BufferPool"]


class BufferPool:
    """Reusable flat buffers.

    Attributes:
        fresh: Buffers allocated so far; stays constant in a steady state.
        bytes: Bytes of all buffers ever allocated and not dropped.
    """

    def __init__(self) -> None:
        self._idle: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}  # the smallest first
        self._shared: dict[Hashable, Any] = {}
        self.fresh = 0
        self.bytes = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized flat buffer [numel], exclusively the caller's until `give`.

        It is part of a larger one where that is idle. Of many sizes there are then as many buffers as are in use at one time, not one of each.
        """
        idle = self._idle.get((dtype, device), [])
        at = bisect_left(idle, numel, key=torch.numel)
        if at < len(idle):
            whole = idle.pop(at)
            return whole if whole.numel() == numel else whole[:numel]
        if idle:  # too small for this, and the new one will do in its place
            self.bytes -= idle.pop().nbytes
        self.fresh += 1
        self.bytes += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer that `take` handed out."""
        if buffer.device.type != "cpu" or streams.is_device_memory(buffer):
            self.bytes -= buffer.nbytes
            return
        whole = buffer if buffer._base is None else buffer._base
        insort(self._idle.setdefault((whole.dtype, whole.device), []), whole, key=torch.numel)

    def shared(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the object under `key` that several units share, building it with `make` on first use.

        The pool closes the object when the pool closes.
        """
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def close(self) -> None:
        """`drop`, and `close` what is shared."""
        self.drop()
        for resource in self._shared.values():
            resource.close()
        self._shared.clear()

    def drop(self) -> int:
        """Free every idle buffer; how many bytes they had."""
        freed = sum(buffer.nbytes for buffers in self._idle.values() for buffer in buffers)
        self.bytes -= freed
        self._idle.clear()
        return freed
