"""The helper thread works on the device of the thread that waits."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import torch

from ds_accel import streams
from ds_zero.runtime.reduce_runtime import Helper


class Owner:
    def __init__(self):
        self.seen, self.came = [], threading.Event()

    def help(self):
        self.seen.append(getattr(PLACE, "device", None))
        self.came.set()


PLACE = threading.local()


def test_it_selects_the_device_before_it_helps(monkeypatch):
    """It worked on device 0."""

    @contextmanager
    def on_device(device):
        PLACE.device = device
        yield

    monkeypatch.setattr(streams, "current_device", lambda: torch.device("cuda", 3))
    monkeypatch.setattr(streams, "on_device", on_device)
    owner = Owner()
    helper = Helper(owner.help)
    with helper.waiting(torch.device("cpu")):
        assert owner.came.wait(30)
    helper.close()
    assert set(owner.seen) == {torch.device("cuda", 3)}
