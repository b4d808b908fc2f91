"""What a thread says before it works for a device, or asks about one."""

from __future__ import annotations

import ctypes
import types

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
