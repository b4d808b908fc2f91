"""Which device a thread has made current, on a host without any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from ds_accel import streams

__all__ = ["follow_current_device"]


def follow_current_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[], torch.device | None]:
    """Follow `ds_accel.streams.on_device` in every thread; return a function that tells the calling thread's device, None outside of it.

    A new thread begins with none, as one of CUDA's begins with device 0.
    """
    place = threading.local()

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        before, place.device = getattr(place, "device", None), device
        try:
            yield
        finally:
            place.device = before

    monkeypatch.setattr(streams, "on_device", on_device)
    return lambda: getattr(place, "device", None)
