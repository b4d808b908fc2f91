"""Copies from host memory to a device, which are queued: what they read may be written once their event has happened."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_accel import get_accelerator
from ds_ops.scratch import Event

__all__ = ["to_device"]


def to_device(source: Tensor, device: torch.device) -> tuple[Tensor, Event | None]:
    """Queue a copy of `source` on the current stream of `device`.

    Returns:
        The copy, valid on that stream; and the event after which `source` is no longer read. `source` itself and None where it is there.
    """
    if source.device == device:
        return source, None
    copy, after = source.to(device, non_blocking=True), get_accelerator().new_event()
    after.record()
    event: Event = after
    return copy, event
