"""New weights on their way from the host to the device: cast there, through a few page-locked slots, while the next unit is updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_accel import streams
from ds_accel.streams import DeviceEvent
from ds_ops.scratch import host_bytes

__all__ = ["SLOTS", "WeightCopies", "crosses_link"]

SLOTS = 3
"""One that an update writes, and two that are being copied."""


class WeightCopies:
    """The stream and the slots of the copies to one device. Of all units on that."""

    def __init__(self, device: torch.device, pin: bool) -> None:
        self._device, self._pin, self._stream = device, pin, streams.new_stream(device)
        self._slots: deque[tuple[Tensor, DeviceEvent | None]] = deque()
        self._sending: dict[int, Tensor] = {}  # by address: whole slots that somebody writes

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory [numel] to be written, exclusively the caller's until `send`. Waits for the oldest copy if all slots are read."""
        nbytes = numel * dtype.itemsize
        slot: Tensor | None = None
        if len(self._slots) + len(self._sending) >= SLOTS and self._slots:
            slot, copied = self._slots.popleft()
            if copied is not None:
                copied.synchronize()
        if slot is None or slot.numel() < nbytes:
            slot = host_bytes(nbytes, self._device, pin=self._pin)
        self._sending[slot.data_ptr()] = slot
        return slot[:nbytes].view(dtype)

    def send(self, staged: Tensor, places: Sequence[Tensor]) -> DeviceEvent:
        """Queue copies of `staged`, of `take`, to `places`, one after the other. Waits for nothing.

        Returns:
            The event for which streams wait that read the places.
        """
        streams.wait_stream(self._stream, streams.current_stream(self._device))  # it may still read the old values
        with streams.on_stream(self._stream, self._device):
            at = 0
            for place in places:
                streams.copy_into(place, staged[at : at + place.numel()])
                at += place.numel()
            copied = streams.record_event(self._device)
        self._slots.append((self._sending.pop(staged.data_ptr()), copied))
        return copied

    def close(self) -> None:
        """Wait for the copies and free the slots."""
        for _, copied in self._slots:
            if copied is not None:
                copied.synchronize()
        self._slots.clear()


def crosses_link(tensor: Tensor, device_side: Tensor) -> bool:
    """Return whether `tensor` is memory of the host while `device_side` is memory of a device."""
    return streams.is_device_memory(device_side) and not streams.is_device_memory(tensor)
