"""Memory that is page-locked where it lies: how much, for how long, and what a child of the process sees."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_accel import locked_pages as module
from ds_accel import streams
from ds_accel.locked_pages import LEAST_BYTES, locked_pages
from ds_accel.streams import StreamsBackend, use_backend

DEVICE = torch.device("cuda", 1)


class Driver(StreamsBackend):
    """Locks pages as a driver does, and reads those that it unlocks: they are there until then."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.locked: dict[int, int] = {}
        self.unlocked: list[int] = []

    def lock_pages(self, module: Any, address: int, nbytes: int) -> bool:
        if not self.refuses:
            self.locked[address] = nbytes
        return not self.refuses

    def unlock_pages(self, module: Any, address: int) -> None:
        self.unlocked.append(self.locked.pop(address))
        with open("/proc/self/maps") as maps:
            ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
        assert any(start <= address < end for start, end in ranges)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setattr(streams, "_module", lambda device: SimpleNamespace())
    monkeypatch.setattr(streams, "is_capturing", lambda device: False)
    monkeypatch.setattr(module.sys, "is_finalizing", lambda: False)
    with use_backend(made := Driver()):
        yield made


def test_as_many_bytes_are_locked_as_were_asked_for_until_the_last_view_is_gone(driver: Driver) -> None:
    memory = locked_pages(LEAST_BYTES + 5, DEVICE)
    assert memory is not None
    assert (memory.numel(), memory.data_ptr() % 4096, int(memory.sum())) == (LEAST_BYTES + 5, 0, 0)
    assert driver.locked == {memory.data_ptr(): LEAST_BYTES + 5}
    view = memory[16:32].view(torch.float32)
    del memory
    gc.collect()
    view.fill_(2.0)
    assert (view.tolist(), driver.unlocked) == ([2.0] * 4, [])
    del view
    gc.collect()
    assert (driver.locked, driver.unlocked) == ({}, [LEAST_BYTES + 5])


def test_little_is_left_to_torch(driver: Driver) -> None:
    assert locked_pages(LEAST_BYTES - 1, DEVICE) is None
    assert driver.locked == {}


def test_a_refusal_gives_nothing_and_unlocks_nothing() -> None:
    with use_backend(Driver(refuses=True)):
        assert locked_pages(LEAST_BYTES, torch.device("cpu")) is None
        gc.collect()


def test_a_child_unlocks_nothing_and_unmaps_nothing(driver: Driver) -> None:
    memory = locked_pages(LEAST_BYTES, DEVICE)
    assert memory is not None
    pid = os.fork()
    if pid == 0:
        address = memory.data_ptr()
        del memory
        gc.collect()
        os._exit(0 if driver.unlocked == [] and list(driver.locked) == [address] and module._inherited else 1)
    assert os.waitpid(pid, 0)[1] == 0
    memory.fill_(1)  # and the child has taken nothing away
    assert len(driver.locked) == 1


def test_what_is_given_back_inside_a_capture_is_unlocked_with_the_next_one(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = locked_pages(LEAST_BYTES, DEVICE)
    monkeypatch.setattr(streams, "is_capturing", lambda device: True)
    del memory
    gc.collect()
    assert driver.unlocked == []
    monkeypatch.setattr(streams, "is_capturing", lambda device: False)
    following = locked_pages(LEAST_BYTES + 1, DEVICE)
    gc.collect()
    assert (driver.unlocked, following is None) == ([LEAST_BYTES], False)
    assert module._waiting == []


def test_torch_is_asked_only_where_a_device_has_begun() -> None:
    calls: list[tuple[int, ...]] = []

    def register(*args: int) -> int:
        calls.append(args)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register)
    asleep = SimpleNamespace(cudart=lambda: runtime, is_initialized=lambda: False)
    awake = SimpleNamespace(cudart=lambda: runtime, is_initialized=lambda: True)
    backend = StreamsBackend()
    assert [backend.lock_pages(one, 4096, 1) for one in (SimpleNamespace(), asleep, awake)] == [False, False, True]
    assert calls == [(4096, 1, 1)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_a_device_copies_by_itself_and_a_refusal_is_no_error_of_the_next_kernel() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.init()
    memory = locked_pages(3 * LEAST_BYTES + 64, device)
    assert memory is not None
    assert memory.is_pinned()
    assert memory[64:].is_pinned()
    there = torch.arange(1000, dtype=torch.float32, device=device)
    view = memory[:4000].view(torch.float32)
    streams.copy_into(view, there)
    streams.record_event(device).synchronize()
    assert view.tolist() == [float(i) for i in range(1000)]
    assert not streams.lock_pages(memory.data_ptr(), memory.numel(), device)  # it is locked already
    assert float(torch.ones(3, device=device).add_(1).sum()) == 6.0
    del memory, view
    gc.collect()
    assert locked_pages(3 * LEAST_BYTES + 64, device) is not None  # perhaps at the same place
