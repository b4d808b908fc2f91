"""What a thread says before it works for a device, or asks about one."""

from __future__ import annotations

import ctypes
import types
from contextlib import contextmanager

import torch

from ds_accel import streams


def test_a_thread_that_only_asks_leaves_captures_of_others_alone():
    asked = []

    def exchange(mode):
        asked.append(ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents.value)
        return 0

    assert streams.relax_capture(types.SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange))
    assert asked == [2]
    assert not streams.relax_capture(types.SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda mode: 3))
    assert not streams.relax_capture(types.SimpleNamespace())


def test_the_device_of_a_thread_is_that_of_who_starts_it(monkeypatch):
    module = types.SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert streams.current_device() == torch.device("cuda", 1)
    module.is_initialized = lambda: False
    assert streams.current_device() == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert streams.current_device() == torch.device("cpu")


def test_a_stream_is_of_the_device_it_is_made_for(monkeypatch):
    """It was one of the device that was current: work of the other was ordered by nothing."""
    current = [0]

    @contextmanager
    def device(index):
        before, current[0] = current[0], torch.device(index).index
        yield
        current[0] = before

    module = types.SimpleNamespace(device=device, Stream=lambda: f"stream of device {current[0]}")
    monkeypatch.setattr(streams, "_module", lambda device: module)
    assert streams.new_stream(torch.device("cuda", 1)) == "stream of device 1"
    assert streams.new_stream(torch.device("cuda")) == "stream of device 0"
    assert current == [0]
