"""The optimizer's state of single units is in host memory while a step computes, and back for the update.

Words: a unit's state is *parked* while its storages are empty and its bytes are on the host. Identity, views and values stay, only bytes move.
Who decides when is not here (a compiled graph does, see `verbs.py`). Whoever reads state calls `OptimizerStateStore.fetch_state` before, which
brings back what is parked, so a decision that comes late costs time and no numbers.

On a device copies back go over a stream of their own, and the stream that reads state waits for them. On a host that is the device both
sides are the same memory: bytes are moved all the same, and `bytes` tells what the device would have free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_accel import get_accelerator, streams
from ds_ops.scratch import host_bytes
from ds_zero.runtime.unit import Unit

__all__ = ["Parking"]


@dataclass(frozen=True, slots=True)
class _Moved:
    """An emptied storage, where it was, and its bytes on the host."""

    storage: torch.UntypedStorage
    device: torch.device
    host: Tensor


class Parking:
    """Of the units of one model whose state is updated on the device.

    Args:
        units: In the order of their numbers; those of other tiers are left alone.
        pin: Into page-locked memory, where that is not the device's own.
    Attributes:
        moved: Bytes that went to the host so far, and as many came back.
    """

    def __init__(self, units: Sequence[Unit], *, pin: bool) -> None:
        self._units, self._pin = {unit.number: unit for unit in units if unit.state_store.parks}, pin
        self._away: dict[int, list[_Moved]] = {}
        self._coming: dict[int, Any] = {}  # an event of the copies of units that are on their way back
        self._hosts: dict[tuple[int, int], Tensor] = {}
        self._lane: Any = None
        self.moved = 0
        for number, unit in self._units.items():
            unit.state_store.parked = partial(self.bring, number)

    @property
    def bytes(self) -> dict[int, int]:
        """Bytes that are parked now, by number of the unit."""
        return {number: sum(one.host.numel() for one in parked) for number, parked in self._away.items() if parked}

    def put(self, number: int) -> None:
        """Move a unit's state to the host. Nothing happens where it has none yet, or it is there."""
        unit = self._units.get(number)
        if unit is None or number in self._away:
            return
        self._arrive(number)
        parked, pointers = list[_Moved](), set[int]()
        for part in unit.parts:
            for value in unit.state_store.states(part).values():
                storage = value.untyped_storage() if isinstance(value, Tensor) and value.dim() else None
                # What ranks share, and mappings, cannot be emptied: they stay.
                if storage is None or not storage.nbytes() or storage.data_ptr() in pointers or not storage.resizable():
                    continue
                pointers.add(storage.data_ptr())
                host = self._host((number, len(parked)), storage.nbytes(), value.device)
                streams.copy_into(host, _bytes(storage, value.device))
                parked.append(_Moved(storage, value.device, host))
        for one in parked:
            self.moved += one.host.numel()
            one.storage.resize_(0)  # a device frees it in the order of its stream: behind the copy
        if parked:
            self._away[number] = parked

    def begin(self, number: int) -> None:
        """Start to bring a unit's state back; `bring` waits for it."""
        parked = self._away.pop(number, None)
        if parked is None:
            return
        accelerator = get_accelerator()
        here = accelerator.current_stream()
        for one in parked:
            one.storage.resize_(
                one.host.numel()
            )  # in the order of this stream, which may have used the memory until now
        if self._lane is None:
            self._lane = accelerator.new_stream()
        streams.wait_stream(self._lane, here)
        with accelerator.on_stream(self._lane):
            for one in parked:
                streams.copy_into(_bytes(one.storage, one.device), one.host)
            event = accelerator.new_event()
            event.record()
        self._coming[number] = event

    def bring(self, number: int) -> None:
        """Return when a unit's state may be read and written."""
        self.begin(number)
        self._arrive(number)

    def _arrive(self, number: int) -> None:
        event = self._coming.pop(number, None)
        if event is not None:
            event.wait()  # the current stream does

    def close(self) -> None:
        """Bring everything back, and do nothing from now on."""
        for number, unit in self._units.items():
            self.bring(number)
            unit.state_store.parked = None
        self._units, self._hosts = {}, {}

    def _host(self, key: tuple[int, int], nbytes: int, device: torch.device) -> Tensor:
        """Return a host buffer that is reused in every step: pinning takes long."""
        buffer = self._hosts.get(key)
        if buffer is None or buffer.numel() != nbytes:
            buffer = self._hosts[key] = host_bytes(nbytes, device, pin=self._pin)
        return buffer


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
